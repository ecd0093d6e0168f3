"""Look inside a GPT while it runs: what every sublayer read, said and did, without a line in the model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spheret.connections.spherical import SphericalConnection
from spheret.model.gpt import GPT, Attention


@dataclass
class Sublayer:
    """One sublayer of one forward pass: the state h, the branch's output f and the next state, all (..., width)."""

    number: int
    h: Tensor
    f: Tensor
    out: Tensor
    connection: Any
    branch: Any
    branch_input: Tensor

    @property
    def angle(self) -> Tensor:
        """The turn from h to the next state, (...) in radians; a spherical connection knows its own exactly."""
        if isinstance(self.connection, SphericalConnection):
            return self.connection.update.angle(self.h, self.f)
        u, v = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (self.h, self.out))
        # half-angle form: arccos would lose every small angle
        return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))

    @property
    def attention(self) -> Tensor | None:
        """Attention weights (batch, heads, time, time); None for an MLP. Computed when asked for."""
        return self.branch.weights(self.branch_input) if isinstance(self.branch, Attention) else None


@contextmanager
def probe(model: GPT, see: Callable[[Sublayer], object]) -> Iterator[None]:
    """Within the block, call `see` after every sublayer of every forward pass. Outside it nothing is hooked.

    With `recompute` a backward inside the block runs the sublayers again, and they are seen again. During cached
    generation a branch sees its new tokens alone, and so do the attention weights computed from its input.
    """
    handles = []
    number = 0
    for block in model.each_block():
        for connection, branch in (
            (block.attention_connection, block.attention),
            (block.mlp_connection, block.mlp),
        ):
            number += 1
            heard: dict[str, Tensor] = {}

            def listen(module: Any, args: tuple[Any, ...], f: Tensor, heard: dict[str, Tensor] = heard) -> None:
                heard["input"], heard["f"] = args[0], f

            def report(
                module: Any, args: tuple[Any, ...], out: Tensor,
                heard: dict[str, Tensor] = heard, branch: Any = branch, number: int = number,
            ) -> None:  # fmt: skip
                see(Sublayer(number, args[0], heard.pop("f"), out, module, branch, heard.pop("input")))

            handles += [branch.register_forward_hook(listen), connection.register_forward_hook(report)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
