"""Hooks that see the stream at one step, in the forward and backward passes that the loop makes anyway.

They read and change nothing. A module that runs again, because its layer is checkpointed or because a step has
several micro-batches, is seen once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spheret.model.branches import Attention
from spheret.support.precision import wide
from spheret.watching.finding import Anatomy, BranchEnd, Call, FoundSublayer
from spheret.watching.joins import joining, write_of
from spheret.watching.measures import StreamMeasures, WriterGradient, sample, stream_measures

# how far the sums of attention weights may be from 1
_ROUNDING = 0.02


class _Seen:
    """What one sublayer has shown so far in this step.

    Args:
        found: the sublayer.
        write: (h, f) -> the next state, of rows, if it is not h + f.
        alpha: the step size, if there is one.
    """

    def __init__(
        self, found: FoundSublayer, write: Callable[[Tensor, Tensor], Tensor] | None, alpha: Tensor | None
    ) -> None:
        self.found, self.write, self.alpha = found, write, alpha
        self.h: Tensor | None = None
        self.f: Tensor | None = None
        # of the first token of every sequence, where the stream has tokens
        self.first_h: Tensor | None = None
        self.first_f: Tensor | None = None
        self.waiting = len(found.ends)
        self.first: Tensor | None = None
        self.sink: Tensor | None = None
        self.measured: StreamMeasures | None = None

    def _first(self, x: Tensor) -> Tensor | None:
        has_tokens = x.dim() == 3 and x.shape[1] > 1 and self.found.channel_dim == -1
        return wide(x.detach()[:, 0]) if has_tokens else None

    def stream(self, h: Tensor) -> None:
        self.h, self.first_h = sample(h, self.found.channel_dim), self._first(h)

    def part(self, end: BranchEnd, output: Any) -> None:
        """One part of the branch's output; the last one completes it."""
        x = output[end.index] if end.index is not None else output
        if not isinstance(x, Tensor) or self.h is None:
            return
        self.waiting -= 1
        rows, first = wide(sample(x, self.found.channel_dim)) * end.factor, self._first(x)
        self.f = rows if self.f is None else self.f + rows
        if first is not None:
            self.first_f = first * end.factor if self.first_f is None else self.first_f + first * end.factor
        if self.waiting == 0 and self.found.behind is None:
            self._measure(wide(self.h) + self.f, None if self.first_h is None else self._sum(self.first_h))

    def _sum(self, first_h: Tensor) -> Tensor | None:
        return None if self.first_f is None else first_h + self.first_f

    def state(self, out: Any) -> None:
        """The next state, where a module returns it."""
        if isinstance(out, Tensor):
            self._measure(sample(out, self.found.channel_dim), self._first(out))

    @torch.no_grad()
    def _measure(self, out: Tensor, first: Tensor | None) -> None:
        h, f = self.h, self.f
        self.h = self.f = self.first_h = self.first_f = None
        if h is None or f is None or len(h) != len(f):
            return
        try:
            still = h if self.write is None else self.write(h, torch.zeros_like(h))
        # the norm's code is not ours, and the loop must not end by a look
        except Exception:
            return
        self.measured = stream_measures(h, f, out, still)
        if first is not None:
            self.first = first.norm(dim=-1).mean() / self.measured.norm


class StreamHooks:
    """The hooks of one watched step, from before its forward pass until after its backward pass."""

    def __init__(self, anatomy: Anatomy, modules: dict[str, nn.Module], gradients: bool = True) -> None:
        """gradients: whether a backward pass follows, whose common direction is to be seen."""
        self.sublayers = []
        self.writers: list[WriterGradient | None] = []
        self._calls: dict[str, int] = defaultdict(int)
        self._joins: dict[Call, _Seen] = {}
        self._joining: ExitStack | None = None
        self._handles: list[Any] = []
        before: dict[str, dict[int, Callable[[Any, Any], Any]]] = defaultdict(dict)
        after: dict[str, dict[int, list[Callable[[Any, Any], None]]]] = defaultdict(lambda: defaultdict(list))
        for found in anatomy.sublayers:
            seen = _seen(found, modules)
            self.sublayers.append(seen)
            if found.join is not None:
                self._joins[found.join] = seen
            elif found.reader is not None:
                before[found.reader.module][found.reader.turn] = self._read(seen)
                for end in found.ends:
                    after[end.call.module][end.call.turn].append(partial(_part, seen, end))
                if found.behind is not None:
                    after[found.behind.module][found.behind.turn].append(partial(_state, seen))
            for name in _attentions(found, modules):
                after[name][0].append(partial(_attention, seen, modules[name]))
            writer = WriterGradient() if gradients and found.writer is not None else None
            self.writers.append(writer)
            if writer is not None and found.writer is not None:
                self._handles.append(modules[found.writer].register_forward_hook(writer.see))
        for name in before.keys() | after.keys():
            module = modules[name]
            self._handles.append(
                module.register_forward_pre_hook(self._count(name, before.get(name, {})), with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._done(name, after.get(name, {}))))
        self._turns: dict[str, int] = {}
        if self._joins:
            self._joining = ExitStack()
            self._joining.enter_context(joining(modules[""], self._joined))

    def _count(self, name: str, hooks: dict[int, Callable[[Any, Any], Any]]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            turn = self._calls[name]
            self._calls[name] += 1
            self._turns[name] = turn
            return hooks[turn](args, kwargs) if turn in hooks else None

        return hook

    def _done(self, name: str, hooks: dict[int, list[Callable[[Any, Any], None]]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for each in hooks.get(self._turns.get(name, -1), ()):
                each(args, output)

        return hook

    def _read(self, seen: _Seen) -> Callable[[Any, Any], None]:
        def hook(args: Any, kwargs: Any) -> None:
            where = seen.found.where
            x = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
            if isinstance(x, Tensor):
                seen.stream(x)

        return hook

    def _joined(self, name: str, h: Tensor, f: Tensor, out: Tensor) -> None:
        """A connection has joined a branch's output to the stream."""
        seen = self._joins.get(Call(name, self._calls[name]))
        self._calls[name] += 1
        if seen is not None:
            seen.stream(h)
            seen.f = sample(f)
            seen.state(out)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._joining is not None:
            self._joining.close()
            self._joining = None


def _state(seen: _Seen, args: Any, output: Any) -> None:
    seen.state(output)


def _part(seen: _Seen, end: BranchEnd, args: Any, output: Any) -> None:
    seen.part(end, output)


def _seen(found: FoundSublayer, modules: dict[str, nn.Module]) -> _Seen:
    if found.join is not None:
        connection = modules[found.join.module]
        return _Seen(found, write_of(connection), getattr(connection, "alpha", None))
    if found.behind is not None:
        return _Seen(found, _behind(modules[found.behind.module].forward, found.channel_dim), None)
    return _Seen(found, None, None)


def _behind(norm: Callable[[Tensor], Tensor], channel_dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows h and f to those of norm(h + f), whose norm may want its channels in another place."""

    def write(h: Tensor, f: Tensor) -> Tensor:
        if channel_dim == -1:
            return norm(h + f)
        return norm((h + f).T[None])[0].T

    return write


def _attentions(found: FoundSublayer, modules: dict[str, nn.Module]) -> list[str]:
    """The modules of a sublayer that may hold attention weights."""
    owners = {name.rpartition(".")[0] for name in found.parameters}
    holders = {name for owner in owners for name in (owner, owner.rpartition(".")[0]) if name in modules}
    return [name for name in sorted(holders) if "attention" in type(modules[name]).__name__.lower()]


@torch.no_grad()
def _attention(seen: _Seen, module: nn.Module, args: Any, output: Any) -> None:
    """The share of attention that goes to the first token, where the weights are to be had."""
    weights = None
    if isinstance(module, Attention):
        # of one sequence, because weights are large
        weights = module.weights(args[0][:1].detach())
    elif isinstance(output, (tuple, list)):
        shaped = [x for x in output if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] == x.shape[-2]]
        whole = [x for x in shaped if bool(((x[:1].sum(-1) - 1).abs() < _ROUNDING).all())]
        weights = whole[0][:1].detach() if whole else None
    if weights is not None and weights.shape[-1] > 1:
        seen.sink = wide(weights[:, :, 1:, 0]).mean()
