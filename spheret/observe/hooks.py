"""Hooks at single calls of modules, and those that see the stream in the forward pass that the loop makes anyway.

The latter read and change nothing. A module that runs again, because its layer is checkpointed or because a step has
several micro-batches, is seen once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spheret.connections import Connection, State
from spheret.conversion.trace import Argument
from spheret.model.branches import Attention
from spheret.observe.finding import Anatomy, BranchEnd, Call, FoundSublayer, joining
from spheret.observe.measures import MOST_TOKENS, mixing_measures, sample, stream_measures
from spheret.support.precision import wide
from spheret.support.sharding import local

# (args, kwargs) -> those to call with, and (args, output) -> what to return; None changes nothing
Before = Callable[[Any, Any], "tuple[Any, Any] | None"]
After = Callable[[Any, Any], Any]
# what attention is computed by in code
_SOFTMAX = {torch.softmax, Tensor.softmax, nn.functional.softmax}
# queries of one sequence that are looked at
_QUERIES = 64
# how far the sums of attention weights may be from 1
_ROUNDING = 0.02


@contextmanager
def at_calls(
    modules: Mapping[str, nn.Module], before: Mapping[Call, Before], after: Mapping[Call, After]
) -> Iterator[None]:
    """Within the block, run these functions before and after these calls. Calls count from the block's start."""
    turns: Counter[str] = Counter()

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        change = before.get(Call(name, turns[name]))
        return None if change is None else change(args, kwargs)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        change = after.get(Call(name, turns[name]))
        turns[name] += 1
        return None if change is None else change(args, output)

    handles: list[Any] = []
    try:
        for name in {call.module for call in (*before, *after)}:
            handles.append(modules[name].register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            handles.append(modules[name].register_forward_hook(partial(leave, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def argument(args: Any, kwargs: Any, where: Argument) -> Any:
    """What a module is called with at a place."""
    return kwargs[where] if isinstance(where, str) else args[where]


def with_argument(args: Any, kwargs: Any, where: Argument, x: Any) -> tuple[Any, Any]:
    """The arguments of a call with another one at a place."""
    if isinstance(where, str):
        return args, {**kwargs, where: x}
    return (*args[:where], x, *args[where + 1 :]), kwargs


@dataclass
class SeenSublayer:
    """What one sublayer has shown so far in this step.

    Args:
        found: the sublayer.
        take_logit: returns the largest logit of the attention since it was called last.
        keeps: whether every row is looked at and kept, and not a sample.
        write: (h, f) -> the next state, of rows, if it is not h + f.
        alpha: the step size, if there is one.
        states: the rows (tokens, width) of the state, the branch's output and the next state, if they are kept.
        still: the next state without the branch, where that takes the whole state of many streams.
        mix: the matrices of the tokens that mix many streams.
        measured: scalars by the fields of `SublayerObservation`.
        sinks: the mean attention of each head to the first token.
        lengths: the length of every row before and behind.
    """

    found: FoundSublayer
    take_logit: Callable[[], Tensor | None]
    keeps: bool
    write: Callable[[Tensor, Tensor], Tensor] | None = None
    alpha: Tensor | None = None
    states: tuple[Tensor, Tensor, Tensor] | None = None
    still: Tensor | None = None
    mix: Tensor | None = None
    h: Tensor | None = None
    f: Tensor | None = None
    parts: int = 0
    measured: dict[str, Tensor] = field(default_factory=dict)
    sinks: Tensor | None = None
    lengths: tuple[Tensor, Tensor] | None = None

    def rows(self, x: Tensor) -> Tensor:
        most = x.numel() if self.keeps else MOST_TOKENS
        return sample(x, self.found.channel_dim, most)

    def stream(self, h: Tensor) -> None:
        self.h = self.rows(h)

    def part(self, end: BranchEnd, args: Any, output: Any) -> None:
        """One part of the branch's output; the last one completes it."""
        x = end.of(output)
        if not isinstance(x, Tensor) or self.h is None:
            return
        self.parts += 1
        rows = end.scaled(wide(self.rows(x)))
        self.f = rows if self.f is None else self.f + rows
        if self.parts == len(self.found.ends) and self.found.behind is None:
            self._measure(wide(self.h) + self.f)

    def state(self, args: Any, output: Any) -> None:
        """The next state, where a module returns it."""
        if isinstance(output, Tensor):
            self._measure(self.rows(output))

    @torch.no_grad()
    def _measure(self, out: Tensor) -> None:
        h, f = self.h, self.f
        self.h = self.f = None
        if (logit := self.take_logit()) is not None:
            self.measured["attention_logit"] = logit
        if h is None or f is None or len(h) != len(f):
            return
        try:
            still = self.still
            if still is None:
                still = h if self.write is None else self.write(h, torch.zeros_like(h))
        # the norm's code is not ours, and monitoring must never crash training
        except Exception:
            return
        self.measured |= stream_measures(h, f, out, still)
        self.states = (h, f, out) if self.keeps else None
        self.lengths = wide(h).norm(dim=-1), wide(out).norm(dim=-1)


class AttentionLogits(TorchFunctionMode):
    """Within the block, the largest logit of the attentions that are computed, of one sequence each."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch.no_grad():
            if function is nn.functional.scaled_dot_product_attention:
                self._see_queries(*args[:2], **kwargs)
            elif function in _SOFTMAX and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
                self._largest.append(wide(args[0][:1].detach()).max())
        return function(*args, **kwargs)

    def _see_queries(self, query: Tensor, key: Tensor, *_: Any, scale: float | None = None, **__: Any) -> None:
        q, k = query.detach()[:1], key.detach()[:1]
        if q.dim() != 4:
            return
        q = q[:, :, :: -(-q.shape[2] // _QUERIES)]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self._largest.append(wide(q @ k.mT).max() * factor)

    def take(self) -> Tensor | None:
        """The largest since the last call."""
        largest, self._largest = self._largest, []
        return torch.stack(largest).max() if largest else None


class StreamHooks:
    """The hooks of one watched step, from before its forward pass until after it."""

    def __init__(self, anatomy: Anatomy, modules: dict[str, nn.Module], keeps: bool = False) -> None:
        """keeps: whether every row is looked at and kept, and not a sample."""
        # to be entered around the forward pass
        self.logits = AttentionLogits()
        self.sublayers = [SeenSublayer(found, self.logits.take, keeps) for found in anatomy.sublayers]
        self._joins: dict[Call, SeenSublayer] = {}
        self._joined: Counter[str] = Counter()
        self._open = ExitStack()
        before: dict[Call, Before] = {}
        after: dict[Call, list[After]] = defaultdict(list)
        for found, seen in zip(anatomy.sublayers, self.sublayers, strict=True):
            if found.join is not None:
                self._joins[found.join] = seen
                connection = modules[found.join.module]
                seen.alpha = getattr(connection, "alpha", None)
                # without it, a step of a converted model: its rows are last, whatever its channels are
                if isinstance(connection, Connection) and connection.state_type is Tensor:
                    seen.write = connection.write
                if isinstance(connection, Connection) and seen.write is None:
                    for handle in (
                        connection.register_forward_pre_hook(partial(_without_branch, seen)),
                        connection.register_forward_hook(partial(_mixing, seen)),
                    ):
                        self._open.callback(handle.remove)
            else:
                reader, where = found.entry
                before[reader] = partial(_read, seen, where)
                for end in found.ends:
                    after[end.call].append(partial(seen.part, end))
                if found.behind is not None:
                    seen.write = _behind(modules[found.behind.module].forward, found.channel_dim)
                    after[found.behind].append(seen.state)
            for name in _attentions(found, modules):
                after[Call(name, 0)].append(partial(_attention, seen, modules[name]))
        self._open.enter_context(
            at_calls(modules, before, {place: partial(_each, hooks) for place, hooks in after.items()})
        )
        if self._joins:
            self._open.enter_context(joining(modules[""], self._join))

    def _join(self, name: str, h: Tensor, f: Tensor, out: Tensor) -> None:
        """A connection has joined a branch's output to the stream."""
        seen = self._joins.get(Call(name, self._joined[name]))
        self._joined[name] += 1
        if seen is not None:
            seen.stream(h)
            seen.f = seen.rows(f)
            seen.state(None, out)

    def remove(self) -> None:
        self._open.close()


def _read(seen: SeenSublayer, where: Argument, args: Any, kwargs: Any) -> None:
    x = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
    if isinstance(x, Tensor):
        seen.stream(x)


def _each(hooks: list[After], args: Any, output: Any) -> None:
    for hook in hooks:
        hook(args, output)


@torch.no_grad()
def _without_branch(seen: SeenSublayer, connection: Connection, args: Any) -> None:
    """Before a connection of many streams is called: its next stream if the branch returned zeros."""
    state = args[0]
    # the class's own forward: the module's is hooked
    still = type(connection).write(connection, state, torch.zeros_like(connection.stream(state)))
    seen.still = seen.rows(connection.stream(still))


@torch.no_grad()
def _mixing(seen: SeenSublayer, connection: Connection, args: Any, out: State) -> None:
    """After a connection of many streams is called: how it mixes them, and how alike they are."""
    mix = connection.mixing(args[0])
    if mix is None:
        return
    count = mix.shape[-1]
    streams = next(x for x in tree_leaves(out) if x.dim() > 2 and x.shape[-2] == count)
    rows = seen.rows(streams.flatten(-2)).unflatten(-1, (count, -1))
    every = mix.expand(*streams.shape[:-2], count, count).flatten(-2)
    seen.mix = seen.rows(every).unflatten(-1, (count, count))
    seen.measured |= mixing_measures(seen.mix, rows)


def _behind(norm: Callable[[Tensor], Tensor], channel_dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows h and f to the rows of norm(h + f), whose norm may want its channels in a different place."""

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
def _attention(seen: SeenSublayer, module: nn.Module, args: Any, output: Any) -> None:
    """The share of attention that goes to the first token, where the weights are to be had."""
    if any(local(p) is not p for p in module.parameters()) and isinstance(module, Attention):
        # FSDP2 has already freed the whole weights
        return
    weights = None
    if isinstance(module, Attention):
        # of one sequence, because weights are large
        weights = module.weights(args[0][: None if seen.keeps else 1].detach())
    elif isinstance(output, (tuple, list)):
        shaped = [x for x in output if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] == x.shape[-2]]
        whole = [x for x in shaped if bool(((x[:1].sum(-1) - 1).abs() < _ROUNDING).all())]
        weights = whole[0][: None if seen.keeps else 1].detach() if whole else None
    if weights is not None and weights.shape[-1] > 1:
        seen.sinks = wide(weights[:, :, 1:, 0]).mean((0, 2))
        seen.measured["sink"] = seen.sinks.mean()
