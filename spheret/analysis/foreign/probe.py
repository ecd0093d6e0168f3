"""The hooks that show every sublayer of someone else's decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spheret.analysis.foreign.structure import Branch
from spheret.conversion.trace import Argument
from spheret.model.probes import BranchKind, Sublayer

NOT_PROVEN = "measured in float64, not proven: ball arithmetic has rules for spheret's own layers alone"

# the arguments of a call
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class ForeignSublayer(Sublayer):
    """A sublayer of someone else's decoder. `branch` is its `Branch`.

    call: the arguments with which the branch's root was called, if they were asked for.
    weights: attention weights, there only while `see` of `probe` runs.
    copies: how many copies of the window a derivative needs at once.
    """

    call: Call | None = None
    weights: Tensor | None = None
    copies: int = 1

    @property
    def kind(self) -> BranchKind:
        return self.branch.kind

    @property
    def attention(self) -> Tensor | None:
        return self.weights

    @property
    def mixes_tokens(self) -> bool:
        return self.branch.mixes_tokens

    @property
    def not_proven(self) -> str:
        return NOT_PROVEN

    def rows(self, count: int) -> int:
        # a branch always runs on the whole window
        return self.h.shape[1] * self.copies

    @property
    def heads(self) -> int:
        return self.branch.heads if self.kind != "mlp" else 0


class Probe:
    """The hooks of `probe`, and what one forward pass has shown so far."""

    def __init__(self, branches: list[Branch], see: Callable[[Sublayer], object]) -> None:
        self.branches, self.see = branches, see
        self.current: int | None = None
        self.h: Tensor | None = None
        self.parts: list[Tensor] = []
        self.attention: Tensor | None = None
        self.calls: dict[int, Call] = {}

    def _finish(self, out: Tensor) -> None:
        if self.current is None:
            return
        assert self.h is not None
        branch = self.branches[self.current]
        f = sum(self.parts[1:], self.parts[0])
        s = ForeignSublayer(
            self.current + 1, self.h, f, out, branch.connection, branch, self.h, self.calls.pop(self.current, None),
            self.attention,
        )  # fmt: skip
        self.current, self.parts, self.attention = None, [], None
        self.see(s)
        s.weights = None

    def state(self, index: int, where: Argument) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            h = taken(args, kwargs, where)
            step = self.branches[index].step
            if step is not None:
                # the conversion's own hook ran before: its readers may see another length than the stream has
                flow = step.channel.flow()
                assert flow is not None
                assert flow.rows is not None
                h = flow.rows
            self._finish(h)
            self.current, self.h = index, h

        return hook

    def end(self, index: int, place: int | None, factor: float) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # one dropout may end several branches
            if self.current == index:
                part = part_of(output, place)
                self.parts.append(part if factor == 1 else part * factor)

        return hook

    def weights(self, index: int, place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.current == index and isinstance(output[place], Tensor):
                self.attention = output[place]

        return hook

    def call(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[index] = args, kwargs

        return hook

    def leave(self, where: Argument) -> Callable[..., None]:
        return lambda module, args, kwargs: self._finish(taken(args, kwargs, where))

    def last(self, place: int | None) -> Callable[..., None]:
        return lambda module, args, output: self._finish(part_of(output, place))


def taken(args: tuple[Any, ...], kwargs: dict[str, Any], where: Argument) -> Tensor:
    return kwargs[where] if isinstance(where, str) else args[where]


def part_of(output: Any, index: int | None) -> Tensor:
    return output if index is None else output[index]


def put(output: Any, index: int | None, x: Tensor) -> Any:
    if index is None:
        return x
    parts = [*output[:index], x, *output[index + 1 :]]
    return parts if isinstance(output, list) else tuple(parts)
