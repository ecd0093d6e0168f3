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

t is read from its buffer in every forward pass, and hooks find their places through the module tree. So whatever
copies, averages, swaps or wraps the state of a model (AveragedModel, functional_call, PEFT's modules_to_save) takes
effect.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spheret.connections import Connection, ScaleNorm
from spheret.conversion import identity
from spheret.conversion.trace import Argument
from spheret.kernels import compute_dtype, retract_unchecked

# the name of the places in the module that hosts them, and of the entry in the model's config
NAME = "spheret"
# stands for every t between the two ends
BETWEEN = 0.5

_MOVED = (
    "the position t of a converted model was changed where it could not be read: call "
    "spheret.conversion.position(model), which reads it anew, before the next forward pass."
)

Hooked = tuple[tuple[Any, ...], dict[str, Any]]


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any], where: Argument) -> Tensor:
    return kwargs[where] if isinstance(where, str) else args[where]


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], where: Argument, x: Tensor) -> Hooked:
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

    __slots__ = ("calls", "owner", "parts", "radius", "ratio", "rows", "seen", "shown", "way", "wide")

    def __init__(self, ratio: Tensor | None = None, radius: Tensor | None = None):
        self.ratio, self.radius = ratio, radius  # rho and R of the stream
        self.way = 1.0  # 0, BETWEEN or 1, of this sublayer
        self.owner: Position | None = None  # the place that has seen the stream last
        self.seen: Tensor | None = None  # the stream as the readers of this sublayer were given it, before the hook
        self.shown: Tensor | None = None  # and after it
        self.rows: Tensor | None = None  # u, with the channels last
        self.wide: Tensor | None = None  # h at t = 0
        self.parts: Tensor | None = None  # the outputs of the branches before the last one
        # how often each module that ends a branch was called in it, by the branch's number, if that is more than once
        self.calls: dict[int, int] = {}


class _Carried(NamedTuple):
    """What was carried to a layer's input: rho and R, without their graphs, which a recomputation does not need."""

    memory: StorageWeakRef
    source: weakref.ref[Tensor]  # rho with its graph
    ratio: Tensor
    radius: Tensor | None


def _without_graph(x: Tensor) -> Tensor:
    # a recomputation must save the same tensors for its backward pass
    return x.detach().requires_grad_(x.requires_grad)


class Channel:
    """The side channel of one stream: the flow of every forward pass that is under way.

    Recomputation under gradient checkpointing starts in the middle of the stream, after the forward pass has ended.
    So what was carried to each layer's input is kept for as long as the input's memory: nested checkpoints hand the
    layer a new tensor on the same memory.
    """

    def __init__(self) -> None:
        self.flows: dict[int, Flow] = {}
        self.carried: dict[tuple[Any, ...], _Carried] = {}

    # copies and pickles of a model start with an empty channel
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @staticmethod
    def _thread() -> int:
        return 0 if torch.compiler.is_compiling() else threading.get_ident()

    def start(self) -> Flow:
        if not torch.compiler.is_compiling():
            for key, carried in list(self.carried.items()):
                if carried.memory.expired():
                    self.carried.pop(key, None)
        flow = Flow()
        self.flows[self._thread()] = flow
        return flow

    def flow(self) -> Flow | None:
        return self.flows.get(self._thread())

    def end(self) -> None:
        self.flows.pop(self._thread(), None)

    def enter_layer(self, x: Tensor) -> None:
        """Take up the stream at a layer's input: remember what was carried to it, or find it again."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) is not Tensor:
            return
        memory, flow = x.untyped_storage(), self.flow()
        key = memory._cdata, x.storage_offset(), x.shape, x._version
        carried = self.carried.get(key)
        if carried is not None and not carried.memory.expired():
            # the layers around this one may have been called with x, too, a moment ago
            known = flow is not None and (
                flow.ratio is carried.source()
                or flow.ratio is carried.ratio
                or (flow.owner is not None and _is_same(x, flow.seen))
            )
            if not known:
                self.flows[self._thread()] = Flow(carried.ratio, carried.radius)
        elif flow is not None and flow.ratio is not None:
            radius = None if flow.radius is None else _without_graph(flow.radius)
            source = weakref.ref(flow.ratio)
            self.carried[key] = _Carried(StorageWeakRef(memory), source, _without_graph(flow.ratio), radius)


class Passage(NamedTuple):
    """What one residual sum did, as rows (..., dim): the channels are last."""

    stream: Tensor  # before the sum: on the sphere, but raw at the first sum of a stream
    branch: Tensor  # f
    after: Tensor  # the stream after the sum, on the sphere
    ratio: Tensor | None  # rho before the sum; None at t = 1 and at the first sum of a stream at t = 0
    next_ratio: Tensor | None  # rho after it; None at t = 1


class _LastRead:
    """The tensor and its version that t was read from last. Copies and pickles of a model start without it."""

    def __init__(self) -> None:
        self.tensor: weakref.ref[Tensor] | None = None
        self.version = -1

    def __reduce__(self) -> Any:
        return _LastRead, ()

    def is_of(self, t: Tensor) -> bool:
        return self.tensor is not None and self.tensor() is t and self.version == t._version

    def note(self, t: Tensor) -> None:
        self.tensor, self.version = weakref.ref(t), t._version


class Position(nn.Module):
    """A place on the stream, with the position t of the annealing."""

    t: Tensor
    length: Tensor

    def __init__(self, channel: Channel, channel_dim: int, reads_length: bool, like: Tensor):
        super().__init__()
        self.channel, self.channel_dim, self.reads_length = channel, channel_dim, reads_length
        self.register_buffer("t", torch.ones(1, device=like.device, dtype=like.dtype))
        self.register_buffer("length", torch.ones(1, device=like.device, dtype=like.dtype))
        # the way that t led when it was read last
        self._way, self._last_read = 1.0, _LastRead()
        self.register_load_state_dict_post_hook(_read_anew)

    def anneal(self, t: float) -> None:
        with torch.no_grad():
            self.t.fill_(t)
        self.read_way()

    def read_way(self) -> float:
        """Read the buffer t: 0 and 1 are the ends, BETWEEN stands for all others."""
        t = float(self.t)
        self._last_read.note(self.t)
        self._way = t if t in (0.0, 1.0) else BETWEEN
        return self._way

    def way(self) -> float:
        """The way that the buffer t leads now: 0, BETWEEN or 1. It does not wait for a GPU."""
        t = self.t
        if torch.compiler.is_compiling() or type(t) is not Tensor or t.is_meta:
            # no number can be read: `check_way` has the graph compare it
            return self._way
        if torch._C._functorch.is_batchedtensor(t):
            # an ensemble under vmap, whose members may stand anywhere. This way leads to the ends, too
            return BETWEEN
        return self.read_way() if t.device.type == "cpu" or not self._last_read.is_of(t) else self._way

    def check_way(self, way: float) -> None:
        """Raise an error where t was changed and could not be read: in a graph, or through `.data` on a GPU."""
        if way != BETWEEN and (torch.compiler.is_compiling() or self.t.is_cuda):
            torch._assert_async((self.t == way).all(), _MOVED)

    def shown_ratio(self, ratio: Tensor | None, way: float) -> Tensor | None:
        """The factor by which a reader sees u lengthened; None for 1."""
        if way == 0:
            return ratio
        if way == 1:
            return self.length if self.reads_length else None
        assert ratio is not None
        t = self.t.to(ratio.dtype)
        # a row of zeros stays zero
        own = torch.where(ratio == 0, 1.0, ratio).log()
        return torch.exp((1 - t) * own + (t * self.length.to(ratio.dtype).log() if self.reads_length else 0.0))


def _read_anew(module: Position, _: Any) -> None:
    if not module.t.is_meta:
        module.read_way()


class Places(nn.Module):
    """The places that one module hosts, under their numbers. A copy of it alone stays a part of the model.

    PEFT's modules_to_save=["spheret"] puts a wrapper in its place, which finds `at` and `listed` in the active copy.
    """

    def append(self, place: Position) -> None:
        self.add_module(str(len(self._modules)), place)

    def at(self, number: int) -> Any:
        return self._modules[str(number)]

    def listed(self) -> list[Position]:
        return list(self._modules.values())  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Places:
        if not memo:
            # nothing else is copied: the streams and their owners stay those of the model
            for place in self.listed():
                memo[id(place.channel)] = place.channel
                if isinstance(place, Step):
                    memo[id(place.owner.host)] = place.owner.host
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


class Home:
    """Where a place stands: in this module, under this number. What is there may be replaced."""

    def __init__(self, host: nn.Module, number: int):
        self.host, self.number = host, number

    @property
    def place(self) -> Any:
        places: Any = self.host._modules[NAME]
        return places.at(self.number)


class Step(Position):
    """One residual of a converted model.

    connection: the scheme's own connection, which has the learned step size.
    unit: a fixed factor of the step size. It is fitted, so that the learned step size starts in its interval.
    entry_norm: the stack's ScaleNorm, which has the radius. It belongs to the first step of the stack, the `owner`.
    """

    unit: Tensor
    # set where the step is put into a model
    owner: Home

    def __init__(
        self,
        channel: Channel,
        connection: Connection,
        entry_norm: ScaleNorm | None,
        first: bool,
        factors: list[float],
        channel_dim: int,
        reads_length: bool,
        like: Tensor,
    ):
        super().__init__(channel, channel_dim, reads_length, like)
        self.connection = connection.to(like.device, like.dtype)
        self.register_buffer("unit", torch.ones(1, device=like.device, dtype=like.dtype))
        # transformers' Trainer does not decay what has _norm in its name
        self.entry_norm = entry_norm
        self.first, self.factors = first, factors
        # of the branch's output, if the layer itself would do it behind the hook
        self.dropout = 0.0
        self.watcher: Callable[[Step, Passage], None] | None = None

    @property
    def stack_norm(self) -> ScaleNorm:
        """The ScaleNorm of the stack, whichever step has it."""
        norm: ScaleNorm = self.owner.place.entry_norm
        return norm

    @property
    def radius(self) -> Tensor:
        """R of the stack, a 1-element tensor."""
        return self.stack_norm.radius

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
        way = self.way()
        if self.first:
            # all places of a model move together
            self.check_way(way)
        flow = None if self.first else self.channel.flow()
        if self.first or (flow is None and way == 1):
            flow = self.channel.start()
        if flow is None or (flow.ratio is None and not self.first and way != 1):
            raise RuntimeError(
                "a layer of a converted model was called without the layers before it, or on another way than at "
                "the conversion. Before the annealing has ended, a layer needs the lengths that the layers before it "
                "carry: call the whole model, or revert it."
            )
        if self.training and not torch.is_grad_enabled() and x.requires_grad and way != 1:
            raise RuntimeError(
                "reentrant gradient checkpointing loses the lengths that a converted model carries between its "
                'layers: take gradient_checkpointing_kwargs={"use_reentrant": False}, or anneal to 1 first.'
            )
        rows = _rows(x, self.channel_dim)
        flow.ratio = None if flow.ratio is None else _per_row(flow.ratio.to(x.device), rows)
        # what a pass that was cut short left behind goes, too
        flow.seen, flow.owner, flow.parts, flow.calls, flow.way = x, self, None, {}, way
        if way == 0:
            if self.first:
                flow.ratio, flow.shown, flow.wide = None, x, rows
                return flow
            assert flow.ratio is not None
            wide = identity.lengthened(rows.to(compute_dtype(rows, flow.ratio)), flow.ratio)
            flow.wide, flow.shown = wide, _channels(wide.to(x.dtype), self.channel_dim)
            return flow
        if self.first and way != 1:
            rows, flow.ratio = identity.on_sphere(rows, self._radius(flow, x))
        elif self.first:
            rows = self.stack_norm(rows)
        ratio = self.shown_ratio(flow.ratio, way)
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
        if flow.way == 0:
            assert flow.wide is not None
            radius = identity.with_unused(self._radius(flow, x).to(wide), self.connection.parameters())
            delta, ratio = identity.exact_delta(x.to(wide), flow.wide.to(wide), f.to(wide), radius)
        else:
            assert flow.rows is not None
            step = self.connection.retraction_step()
            assert step is not None
            if flow.way == 1:
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
        way, flow = self.way(), self.channel.flow() or Flow()
        if flow.ratio is None and way != 1 and self.reads_length:
            raise RuntimeError(
                "the end of a converted model was called without its layers, so the lengths of the rows are unknown: "
                "call the whole model, or revert it."
            )
        carried = None if flow.ratio is None else flow.ratio.to(x.device)
        ratio = None if carried is None and way != 1 else self.shown_ratio(carried, way)
        rows = _rows(x, self.channel_dim)
        ratio = _per_row(ratio, rows)
        flow.seen, flow.owner = x, self
        flow.shown = x if ratio is None else _channels(identity.lengthened(rows, ratio), self.channel_dim)
        if self.readers == 1:
            self.channel.end()
        return flow


def _is_same(x: Tensor, y: Tensor | None) -> bool:
    """Whether x is y, or another name for its memory: FSDP2 hands each module that it shards fresh tensors."""
    if x is y or y is None or torch.compiler.is_compiling():
        return x is y
    if type(x) is not Tensor or type(y) is not Tensor or x.is_meta:
        return False
    return x.shape == y.shape and x.dtype == y.dtype and x.numel() > 0 and x.data_ptr() == y.data_ptr()


class Hook:
    """A hook of a converted model, and the place that it serves."""

    def __init__(self, home: Home):
        self.home = home

    @property
    def place(self) -> Any:
        return self.home.place


class ReadHook(Hook):
    """The hook before a module that reads the stream.

    layers: at the first step of a stream, the hooks before the layers behind it.
    shared: at the end of a stream, whether the module also runs elsewhere, as a ResNet's relu in the branch.
    """

    def __init__(self, home: Home, where: Argument, layers: list[LayerHook], shared: bool = False):
        super().__init__(home)
        self.where, self.layers, self.shared = where, layers, shared

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
        place = self.place
        flow = place.channel.flow()
        if self.shared and (flow is None or isinstance(flow.owner, Step)):
            return None
        x = _taken(args, kwargs, self.where)
        if flow is None or flow.owner is not place or not _is_same(x, flow.seen):
            for layer in self.layers:
                layer.stand_first()
            flow = place.meet(x)
        assert flow.shown is not None
        return _replaced(args, kwargs, self.where, flow.shown)


class JoinHook(Hook):
    """The hook behind a module that ends a branch."""

    def __init__(self, home: Home, number: int, index: int | None, turn: int | None):
        super().__init__(home)
        self.number, self.index, self.turn = number, index, turn

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        step = self.place
        if self.turn is not None and not self._is_turn(step):
            return output
        if self.index is None:
            return step.part(output, self.number)
        joined = step.part(output[self.index], self.number)
        parts = [*output[: self.index], joined, *output[self.index + 1 :]]
        return type(output)(parts) if type(output) in (tuple, list) else tuple(parts)

    def _is_turn(self, step: Step) -> bool:
        """Whether this call of a module that runs several times in the branch is the one that ends it."""
        flow = step.channel.flow()
        if flow is None or flow.owner is not step:
            return False
        done = flow.calls.get(self.number, 0)
        flow.calls[self.number] = done + 1
        return done == self.turn


class LayerHook(Hook):
    """The hook before a layer in the middle of a stream, where recomputation may start."""

    def __init__(self, home: Home, where: Argument, layer: nn.Module):
        super().__init__(home)
        self.where, self.layer = where, layer

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self.place
        if not torch.compiler.is_compiling() and step.way() != 1:
            step.channel.enter_layer(_taken(args, kwargs, self.where))

    def stand_first(self) -> None:
        """Go before hooks that came later, such as FSDP2's, which hands the layer other tensors in recomputation."""
        if torch.compiler.is_compiling():
            return
        hooks = self.layer._forward_pre_hooks
        for hook in hooks.values():
            own = getattr(hook, "__self__", None)
            if own is self:
                return
            if not isinstance(own, LayerHook):
                break
        number = next(number for number, hook in hooks.items() if getattr(hook, "__self__", None) is self)
        hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]


class StartHook(Hook):
    """The hook before a model, and before the module that calls a stream's first reader: it forgets a cut pass.

    Recomputation under gradient checkpointing stops as soon as it has what the backward pass needs.
    """

    def hook(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.place.channel.end()


class OutputHook(Hook):
    """The hook behind the last layer, if no module reads the stream there."""

    def __init__(self, home: Home, index: int | None):
        super().__init__(home)
        self.index = index

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        x = output if self.index is None else output[self.index]
        shown = self.place.meet(x).shown
        if self.index is None:
            return shown
        parts = [*output[: self.index], shown, *output[self.index + 1 :]]
        return type(output)(parts) if type(output) in (tuple, list) else tuple(parts)
