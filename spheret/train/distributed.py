"""One process or many: everything the loop needs to know of the others. The model knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from spheret.gpt import GPT


class World:
    """A world of one process."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def wrap(self, model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
        """What turns a batch into a loss, given the model on its device."""
        return model

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are shared after the last one only."""
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in float64."""
        return values.double()

    def clip(self, model: GPT, largest: float) -> Tensor:
        """Scale the gradient down to a norm of at most `largest`, and return the norm it had."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), largest)

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter or its state, gathered from whatever shards it has."""
        return tensor.detach()

    def random_states(self) -> list[str]:
        """The generators' state of every process."""
        return [_random_state(self.device)]

    def restore_random(self, states: list[str], seed: int) -> None:
        """Back to this process's saved state; in a world of another size, to a seed of its own."""
        if len(states) == self.size:
            _set_random_state(self.device, states[self.rank])
        else:
            torch.manual_seed(seed + self.rank)

    def barrier(self) -> None:
        """Wait for every process."""

    def close(self) -> None:
        """Leave the group."""


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _random_state(device: torch.device) -> str:
    return ",".join(bytes(g.get_state().numpy()).hex() for g in _generators(device))


def _set_random_state(device: torch.device, state: str) -> None:
    # a state saved on another kind of device has fewer or more parts
    for generator, text in zip(_generators(device), state.split(","), strict=False):
        generator.set_state(torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))


def resolve_device(wanted: str | None) -> torch.device:
    """The device by name, or the best there is: cuda, mps, cpu."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted is None:
        wanted = next(name for name, there in have.items() if there)
    kind = wanted.split(":")[0]
    if not have.get(kind, False):
        usable = ", ".join(name for name, there in have.items() if there)
        raise ValueError(f"--device {wanted} is not there: this machine has {usable}.")
    return torch.device(wanted)
