"""The bare training step, for benchmarks that time several models side by side in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spheret.model.gpt import GPT


def share_parameters(model: nn.Module, other: nn.Module) -> None:
    """Let a model use the parameters of another where name and shape agree: many models need the memory of one."""
    theirs = dict(other.named_parameters())
    for name, parameter in list(model.named_parameters()):
        if name in theirs and theirs[name].shape == parameter.shape:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, theirs[name])


def training_step(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    precision: str = "float32",
    clip: float = 1.0,
) -> Callable[[], None]:
    """A function that makes one update from these micro-batches: forward, backward, clip, AdamW, zero_grad."""
    if isinstance(model, GPT):
        # models that share parameters would be constrained by each other's steps
        model.constrained_by_steps = False

    def run() -> None:
        for x, y in batches:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = loss(x, y) / len(batches)
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model, GPT):
            model.constrain()

    return run
