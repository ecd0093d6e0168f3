"""Hooks that see the stream at one step, in the forward and backward passes that the loop makes anyway.

They read and change nothing. A module that runs again, because its layer is checkpointed or because a step has several
micro-batches, is seen once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Connection
from spheret.model.branches import Attention
from spheret.watching.finding import Anatomy, BranchEnd, Call, FoundSublayer
from spheret.watching.measures import StreamMeasures, WriterGradient, first_token, sample, stream_measures

# how far the sums of attention weights may be from 1
_ROUNDING = 0.02


class _Seen:
    """What one sublayer has shown so far in this step."""

    def __init__(self, found: FoundSublayer, connection: Connection | None) -> None:
        self.found, self.connection = found, connection
        self.h: Tensor | None = None
        self.parts: dict[Call, Tensor] = {}
        self.f: Tensor | None = None
        self.first: Tensor | None = None
        self.sink: Tensor | None = None
        self.measured: StreamMeasures | None = None

    def stream(self, h: Tensor) -> None:
        self.h = sample(h, self.found.channel_dim)

    def part(self, end: BranchEnd, output: Any) -> None:
        """One part of the branch's output; the last one completes it."""
        x = output[end.index] if end.index is not None else output
        if not isinstance(x, Tensor):
            return
        self.parts[end.call] = sample(x, self.found.channel_dim).double() * end.factor
        if len(self.parts) == len(self.found.ends):
            self.f = sum(self.parts.values(), start=torch.zeros_like(self.parts[end.call]))
            if self.found.behind is None:
                self.state(None)

    def state(self, out: Tensor | None) -> None:
        """The next state, or None if it is h + f. Measures, and lets go of what was kept."""
        h, f = self.h, self.f
        self.h, self.f, self.parts = None, None, {}
        if h is None or f is None or len(h) != len(f):
            return
        rows = h.double() + f if out is None else sample(out, self.found.channel_dim)
        still = h
        if self.connection is not None:
            with torch.no_grad():
                still = self.connection.write(h, torch.zeros_like(h))
        self.measured = stream_measures(h, f, rows, still)
        if out is not None and out.dim() == 3 and out.shape[1] > 1 and self.found.channel_dim == -1:
            self.first = first_token(out)


class StreamHooks:
    """The hooks of one watched step, from before its forward pass until after its backward pass."""

    def __init__(self, anatomy: Anatomy, modules: dict[str, nn.Module], gradients: bool = True) -> None:
        """gradients: whether a backward pass follows, whose common direction is to be seen."""
        self.sublayers = []
        self.writers: list[WriterGradient | None] = []
        self._calls: dict[str, int] = defaultdict(int)
        self._handles: list[Any] = []
        before: dict[str, dict[int, Callable[[Any, Any], Any]]] = defaultdict(dict)
        after: dict[str, dict[int, list[Callable[[Any, Any], None]]]] = defaultdict(lambda: defaultdict(list))
        for found in anatomy.sublayers:
            joined = found.connection is not None
            connection = modules[found.connection.module] if found.connection is not None else None
            seen = _Seen(found, connection if isinstance(connection, Connection) else None)
            self.sublayers.append(seen)
            if found.connection is not None:
                before[found.connection.module][found.connection.turn] = self._given(seen)
                after[found.connection.module][found.connection.turn].append(lambda args, out, s=seen: s.state(out))
            elif found.reader is not None:
                before[found.reader.module][found.reader.turn] = self._read(seen)
                for end in found.ends:
                    after[end.call.module][end.call.turn].append(lambda args, out, s=seen, e=end: s.part(e, out))
                if found.behind is not None:
                    after[found.behind.module][found.behind.turn].append(lambda args, out, s=seen: s.state(out))
            for name in self._attentions(found, modules, joined):
                after[name][0].append(lambda args, out, s=seen, m=modules[name]: _attention(s, m, args, out))
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

    def _attentions(self, found: FoundSublayer, modules: dict[str, nn.Module], joined: bool) -> list[str]:
        owners = {name.rpartition(".")[0] for name in found.parameters}
        holders = {name for owner in owners for name in (owner, owner.rpartition(".")[0]) if name in modules}
        return [
            name
            for name in holders
            if isinstance(modules[name], Attention) or "attention" in type(modules[name]).__name__.lower()
        ]

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

    def _given(self, seen: _Seen) -> Callable[[Any, Any], Any]:
        """A connection is given the stream, and the branch as a function or as its output."""

        def hook(args: Any, kwargs: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return None
            seen.stream(args[0])
            other = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
            if isinstance(other, Tensor):
                seen.f = sample(other)
                return None
            if len(args) < 2 or not callable(other):
                return None

            def branch(*given: Any, **named: Any) -> Any:
                f = other(*given, **named)
                if isinstance(f, Tensor) and seen.h is not None:
                    seen.f = sample(f)
                return f

            return (args[0], branch, *args[2:]), kwargs

        return hook

    @property
    def fired(self) -> bool:
        """Whether a sublayer was seen. In compiled code hooks may not run."""
        return any(seen.measured is not None for seen in self.sublayers)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


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
        seen.sink = weights[:, :, 1:, 0].double().mean()
