"""The modules and hooks that run inside a converted model.

A `Step` stands at each residual. Its `read` hook sees the stream x before the branch does, its `join` hook sees the
branch's output f and returns u' - x, and the layer's own addition x + (u' - x) puts the stream on u'. `Leave` gives
the stream its length back where it leaves the sphere. In between, a `Channel` carries the ratio rho = |h|/R of each
row.

The position t of the annealing decides which of three ways is taken:

| t | the readers see | the turn |
|---|---|---|
| 0 | rho u = h, the original stream | that of the residual sum |
| between | rho^(1-t) length^t u | log alpha between the row's own and the learned one |
| 1 | length u | the scheme's own |

`length` is one number per reader: 1 in front of a norm, which reads the direction alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from spheret.connections import Connection, ScaleNorm
from spheret.conversion import identity
from spheret.conversion.trace import Where
from spheret.kernels import compute_dtype, retract_unchecked

Hooked = tuple[tuple[Any, ...], dict[str, Any]]


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any], where: Where) -> Tensor:
    return kwargs[where] if isinstance(where, str) else args[where]


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], where: Where, x: Tensor) -> Hooked:
    if isinstance(where, str):
        return args, {**kwargs, where: x}
    return (*args[:where], x, *args[where + 1 :]), kwargs


def _rows(x: Tensor, channel_dim: int) -> Tensor:
    return x if channel_dim == -1 else x.movedim(channel_dim, -1)


def _channels(x: Tensor, channel_dim: int) -> Tensor:
    return x if channel_dim == -1 else x.movedim(-1, channel_dim)


def _per_row(ratio: Tensor | None, rows: Tensor) -> Tensor | None:
    """One number per row in the shape of the rows: a layer may flatten its tokens."""
    if ratio is None or ratio.dim() == 1 or ratio.shape[:-1] == rows.shape[:-1]:
        return ratio
    return ratio.reshape(*rows.shape[:-1], 1)


class Flow:
    """What one forward pass carries from one hook to the next."""

    __slots__ = ("calls", "owner", "parts", "radius", "ratio", "rows", "seen", "shown", "wide")

    def __init__(self, ratio: Tensor | None = None, radius: Tensor | None = None):
        self.ratio, self.radius = ratio, radius  # rho and R of the stream
        self.owner: Position | None = None  # the place that has seen the stream last
        self.seen: Tensor | None = None  # the stream as the readers of this sublayer were given it, before the hook
        self.shown: Tensor | None = None  # and after it
        self.rows: Tensor | None = None  # u, with the channels last
        self.wide: Tensor | None = None  # h at t = 0
        self.parts: Tensor | None = None  # the outputs of the branches before the last one
        # how often each module that ends a branch was called in it, by the branch's number, if that is more than once
        self.calls: dict[int, int] = {}


class Channel:
    """The side channel of one stream: the flow of every forward pass that is under way.

    Recomputation under gradient checkpointing starts in the middle of the stream, after the forward pass has ended.
    So each layer's input keeps what was carried to it, for as long as autograd keeps the input.
    """

    def __init__(self) -> None:
        self.flows: dict[int, Flow] = {}
        self.carried = WeakTensorKeyDictionary()

    # copies and pickles of a model start with an empty channel
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @staticmethod
    def _thread() -> int:
        return 0 if torch.compiler.is_compiling() else threading.get_ident()

    def start(self) -> Flow:
        flow = Flow()
        self.flows[self._thread()] = flow
        return flow

    def flow(self) -> Flow | None:
        return self.flows.get(self._thread())

    def end(self) -> None:
        self.flows.pop(self._thread(), None)

    def enter_layer(self, x: Tensor) -> None:
        """Take up the stream at a layer's input: remember what was carried to it, or find it again."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        carried = self.carried.get(x)
        if carried is not None:
            self.flows[self._thread()] = Flow(*carried)
        elif (flow := self.flow()) is not None and flow.ratio is not None:
            self.carried[x] = flow.ratio, flow.radius


class Passage(NamedTuple):
    """What one residual sum did, as rows (..., dim): the channels are last."""

    stream: Tensor  # before the sum: on the sphere, but raw at the first sum of a stream
    branch: Tensor  # f
    after: Tensor  # the stream after the sum, on the sphere
    ratio: Tensor | None  # rho before the sum; None at t = 1 and at the first sum of a stream at t = 0
    next_ratio: Tensor | None  # rho after it; None at t = 1


class Position(nn.Module):
    """A place on the stream, with the position t of the annealing."""

    t: Tensor
    length: Tensor

    def __init__(self, channel: Channel, channel_dim: int, reads_length: bool, like: Tensor):
        super().__init__()
        self.channel, self.channel_dim, self.reads_length = channel, channel_dim, reads_length
        self.register_buffer("t", torch.ones(1, device=like.device, dtype=like.dtype))
        self.register_buffer("length", torch.ones(1, device=like.device, dtype=like.dtype))
        # a Python number beside the buffer: the hooks choose their way by it, and do not wait for a GPU
        self.stage = 1.0
        self.register_load_state_dict_post_hook(_set_stage)

    def anneal(self, t: float) -> None:
        with torch.no_grad():
            self.t.fill_(t)
        _set_stage(self)

    def shown_ratio(self, ratio: Tensor | None) -> Tensor | None:
        """The factor by which a reader sees u lengthened; None for 1."""
        if self.stage == 0:
            return ratio
        if self.stage == 1:
            return self.length if self.reads_length else None
        assert ratio is not None
        t = self.t.to(ratio.dtype)
        # a row of zeros stays zero
        own = torch.where(ratio == 0, 1.0, ratio).log()
        return torch.exp((1 - t) * own + (t * self.length.to(ratio.dtype).log() if self.reads_length else 0.0))


def _set_stage(module: Position, _: Any = None) -> None:
    t = float(module.t)
    # the three ways: two ends, and one between them for all t
    module.stage = t if t in (0.0, 1.0) else 0.5


class Step(Position):
    """One residual of a converted model.

    connection: the scheme's own connection, which has the learned step size.
    unit: a fixed factor of the step size. It is fitted, so that the learned step size starts in its interval.
    enter: the stack's ScaleNorm, which has the radius. It belongs to the first step of the stack.
    """

    unit: Tensor

    def __init__(
        self,
        channel: Channel,
        connection: Connection,
        enter: ScaleNorm,
        owns_enter: bool,
        first: bool,
        factors: list[float],
        channel_dim: int,
        reads_length: bool,
        like: Tensor,
    ):
        super().__init__(channel, channel_dim, reads_length, like)
        self.connection = connection.to(like.device, like.dtype)
        self.register_buffer("unit", torch.ones(1, device=like.device, dtype=like.dtype))
        # a module in a tuple is not registered, so that a shared radius appears once in the state dict
        self._enter = (enter,)
        # transformers' Trainer does not decay what has _norm in its name
        self.entry_norm = enter if owns_enter else None
        self.first, self.factors = first, factors
        # of the branch's output, if the layer itself would do it behind the hook
        self.dropout = 0.0
        self.watcher: Callable[[Step, Passage], None] | None = None

    @property
    def radius(self) -> Tensor:
        """R of the stack, a 1-element tensor."""
        return self._enter[0].radius

    @property
    def alpha(self) -> Tensor:
        """The learned step size times its unit, a 1-element tensor."""
        alpha = self.connection.alpha
        assert alpha is not None
        return alpha.to(self.unit.device) * self.unit.to(alpha.dtype)

    def _radius(self, flow: Flow, like: Tensor) -> Tensor:
        """R, which one forward pass computes once."""
        if flow.radius is None:
            flow.radius = self.radius
        # a model may be spread over several devices
        return flow.radius.to(like.device)

    def meet(self, x: Tensor) -> Flow:
        """The readers' view of the stream x, which is raw at the first step of a stream and on the sphere later."""
        flow = None if self.first else self.channel.flow()
        if self.first or (flow is None and self.stage == 1):
            flow = self.channel.start()
        if flow is None or (flow.ratio is None and not self.first and self.stage != 1):
            raise RuntimeError(
                "a layer of a converted model was called without the layers before it, or on another way than at "
                "the conversion. Before the annealing has ended, a layer needs the lengths that the layers before it "
                "carry: call the whole model, or revert it."
            )
        if self.training and not torch.is_grad_enabled() and x.requires_grad and self.stage != 1:
            raise RuntimeError(
                "reentrant gradient checkpointing loses the lengths that a converted model carries between its "
                'layers: take gradient_checkpointing_kwargs={"use_reentrant": False}, or anneal to 1 first.'
            )
        rows = _rows(x, self.channel_dim)
        flow.ratio = None if flow.ratio is None else _per_row(flow.ratio.to(x.device), rows)
        # what a pass that was cut short left behind goes, too
        flow.seen, flow.owner, flow.parts, flow.calls = x, self, None, {}
        if self.stage == 0:
            if self.first:
                flow.ratio, flow.shown, flow.wide = None, x, rows
                return flow
            assert flow.ratio is not None
            wide = identity.lengthened(rows.to(compute_dtype(rows, flow.ratio)), flow.ratio)
            flow.wide, flow.shown = wide, _channels(wide.to(x.dtype), self.channel_dim)
            return flow
        if self.first and self.stage != 1:
            rows, flow.ratio = identity.on_sphere(rows, self._radius(flow, x))
        elif self.first:
            rows = self._enter[0](rows)
        ratio = self.shown_ratio(flow.ratio)
        shown = rows if ratio is None else identity.lengthened(rows, ratio)
        flow.rows, flow.shown = rows, x if shown is x else _channels(shown, self.channel_dim)
        return flow

    def part(self, f: Tensor, number: int) -> Tensor:
        """What the layer adds instead of a branch's output: nothing before the last branch, then the whole turn."""
        flow = self.channel.flow()
        if flow is None or flow.owner is not self:
            # one dropout may end several branches, and other calls of it are none of ours
            return f
        factor = self.factors[number]
        scaled = f if factor == 1 else f * factor
        if self.dropout > 0:
            scaled = torch.nn.functional.dropout(scaled, self.dropout, self.training)
        flow.parts = scaled if flow.parts is None else flow.parts.reshape(scaled.shape) + scaled
        if number < len(self.factors) - 1:
            return torch.zeros_like(f)
        delta = self.delta(flow)
        return delta if factor == 1 else delta / factor

    def delta(self, flow: Flow) -> Tensor:
        """u' - x, in the dtype of the sum."""
        assert flow.seen is not None
        assert flow.parts is not None
        x, f = _rows(flow.seen, self.channel_dim), _rows(flow.parts, self.channel_dim)
        if x.shape != f.shape:
            x, flow.ratio = x.reshape(f.shape), _per_row(flow.ratio, f)
            flow.wide = None if flow.wide is None else flow.wide.reshape(f.shape)
            flow.rows = None if flow.rows is None else flow.rows.reshape(f.shape)
        kept, wide = torch.promote_types(x.dtype, f.dtype), compute_dtype(x, f)
        ratio: Tensor | None
        if self.stage == 0:
            assert flow.wide is not None
            radius = identity.with_unused(self._radius(flow, x).to(wide), self.connection.parameters())
            delta, ratio = identity.exact_delta(x.to(wide), flow.wide.to(wide), f.to(wide), radius)
        else:
            assert flow.rows is not None
            step = self.connection.retraction_step()
            assert step is not None
            if self.stage == 1:
                turned = retract_unchecked(
                    flow.rows.to(wide), f.to(wide), self.alpha, step.retraction, step.p, step.max_angle
                )
                ratio = None
            else:
                assert flow.ratio is not None
                turned, ratio = identity.blended(
                    flow.rows.to(wide),
                    f.to(wide),
                    flow.ratio.to(wide),
                    self._radius(flow, x).to(wide),
                    self.alpha.to(wide),
                    self.t.to(wide),
                    step.retraction,
                    step.p,
                    step.max_angle,
                )
            delta = turned - x.to(wide)
        if self.watcher is not None:
            self.watcher(self, Passage(x, f, x + delta, flow.ratio, ratio))
        # only the ratio goes on to the next sublayer
        flow.owner = flow.seen = flow.shown = flow.rows = flow.wide = flow.parts = None
        flow.ratio = ratio
        return _channels(delta.to(kept), self.channel_dim)


class Leave(Position):
    """Where a stream leaves the sphere: its readers see it with its length.

    readers: how many modules read the stream there.
    """

    def __init__(self, channel: Channel, channel_dim: int, reads_length: bool, like: Tensor, readers: int):
        super().__init__(channel, channel_dim, reads_length, like)
        self.readers = readers

    def meet(self, x: Tensor) -> Flow:
        flow = self.channel.flow() or Flow()
        if flow.ratio is None and self.stage != 1 and self.reads_length:
            raise RuntimeError(
                "the end of a converted model was called without its layers, so the lengths of the rows are unknown: "
                "call the whole model, or revert it."
            )
        carried = None if flow.ratio is None else flow.ratio.to(x.device)
        ratio = None if carried is None and self.stage != 1 else self.shown_ratio(carried)
        rows = _rows(x, self.channel_dim)
        ratio = _per_row(ratio, rows)
        flow.seen, flow.owner = x, self
        flow.shown = x if ratio is None else _channels(identity.lengthened(rows, ratio), self.channel_dim)
        if self.readers == 1:
            self.channel.end()
        return flow


class ReadHook:
    """The hook before a module that reads the stream."""

    def __init__(self, place: Step | Leave, where: Where):
        self.place, self.where = place, where

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
        x = _taken(args, kwargs, self.where)
        flow = self.place.channel.flow()
        if flow is None or flow.seen is not x or flow.owner is not self.place:
            flow = self.place.meet(x)
        assert flow.shown is not None
        return _replaced(args, kwargs, self.where, flow.shown)


class JoinHook:
    """The hook behind a module that ends a branch."""

    def __init__(self, step: Step, number: int, index: int | None, turn: int | None):
        self.step, self.number, self.index, self.turn = step, number, index, turn

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.turn is not None and not self._is_turn():
            return output
        if self.index is None:
            return self.step.part(output, self.number)
        joined = self.step.part(output[self.index], self.number)
        parts = [*output[: self.index], joined, *output[self.index + 1 :]]
        return type(output)(parts) if type(output) in (tuple, list) else tuple(parts)

    def _is_turn(self) -> bool:
        """Whether this call of a module that runs several times in the branch is the one that ends it."""
        flow = self.step.channel.flow()
        if flow is None or flow.owner is not self.step:
            return False
        done = flow.calls.get(self.number, 0)
        flow.calls[self.number] = done + 1
        return done == self.turn


class LayerHook:
    """The hook before a layer in the middle of a stream, where recomputation may start."""

    def __init__(self, step: Step, where: Where):
        self.step, self.where = step, where

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step.stage != 1:
            self.step.channel.enter_layer(_taken(args, kwargs, self.where))


class OutputHook:
    """The hook behind the last layer, if no module reads the stream there."""

    def __init__(self, leave: Leave, index: int | None):
        self.leave, self.index = leave, index

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        x = output if self.index is None else output[self.index]
        shown = self.leave.meet(x).shown
        if self.index is None:
            return shown
        parts = [*output[: self.index], shown, *output[self.index + 1 :]]
        return type(output)(parts) if type(output) in (tuple, list) else tuple(parts)


HOOKS = (ReadHook, JoinHook, LayerHook, OutputHook)
