"""The sublayers of any model, found by one trial forward pass: how to see each, and which weights are its own.

A sublayer is a `Connection` of spheret that is called, or a sum h + f in the code of the model, as `spheret.convert`
finds it. What is not found is still watched by its weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from spheret.connections import Connection, SpheretNorm, State
from spheret.conversion import steps
from spheret.conversion.plan import Chain, ConversionError, ResidualSum, layer_of, make_plan, residual_sums
from spheret.conversion.trace import Argument, Join, Joined, Trace, trace_call
from spheret.model.probes import branch_kind
from spheret.observe.records import Found, SublayerName
from spheret.support.errors import shortened


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward pass: which of its calls it is, from 0."""

    module: str
    turn: int


@dataclass(frozen=True)
class BranchEnd:
    """A call whose output, or an index of it, times `factor` and `gains` is added to the stream.

    Where the layer multiplies the stream by a number, `factor` is divided by it.
    """

    call: Call
    index: int | None
    factor: float
    gains: tuple[nn.Parameter, ...] = ()
    transposed: bool = False

    def of(self, output: Any) -> Any:
        """The rows that the module returned."""
        part = output if self.index is None else output[self.index]
        return part.mT if self.transposed else part

    def scaled(self, rows: Tensor) -> Tensor:
        """The rows that are added, of those that were returned."""
        for gain in self.gains:
            rows = rows * gain.detach().flatten()
        return rows if self.factor == 1 else rows * self.factor


@dataclass
class FoundSublayer:
    """One sublayer.

    join: the call of the connection of spheret that joins it, if there is one. Otherwise the branch's output is the
        sum of `ends`.
    readers: the calls that are given the stream, and where; several where attention and MLP stand side by side.
    behind: the call of a norm behind the sum, whose output is the next state, as in Post-LN.
    norms: where a sum has its norms: "pre-norm", "post-norm", "norms around", "norm behind" or "no norm".
    channel_dim: the dimension of the stream's channels.
    parameters: its own weights, by name.
    """

    name: str
    branch: str
    join: Call | None = None
    readers: list[tuple[Call, Argument]] = field(default_factory=list)
    ends: list[BranchEnd] = field(default_factory=list)
    behind: Call | None = None
    norms: str = ""
    channel_dim: int = -1
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def entry(self) -> tuple[Call, Argument]:
        """The first call that is given the state before the sublayer, and where."""
        return self.readers[0] if self.join is None else (self.join, 0)

    @property
    def peers(self) -> str:
        """Sublayers of one kind in different layers have the same."""
        return re.sub(r"\d+", "#", self.name)


@dataclass
class Anatomy:
    """The sublayers of a model in order, and its other weights by the name of the place that holds them.

    entry: the places that are called before the first sublayer.
    idle: the places of which the trial called no module.
    failed: whether the trial raised an error.
    """

    found: Found
    sublayers: list[FoundSublayer]
    places: dict[str, dict[str, nn.Parameter]]
    note: str = ""
    entry: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    failed: bool = False

    def names(self) -> list[SublayerName]:
        return [SublayerName(number, each.name, each.branch) for number, each in enumerate(self.sublayers, start=1)]


def without_stream(model: nn.Module, note: str, trace: Trace | None = None) -> Anatomy:
    """A model of which only the weights are watched."""
    places = _places(model, set())
    return Anatomy("parameters only", [], places, note, idle=set() if trace is None else _idle(trace, places))


def find_sublayers(model: nn.Module, call: Callable[[], Any]) -> Anatomy:
    """Run `call`, which calls the model, once. Whatever goes wrong in it leaves the weights to be watched."""
    try:
        trace, _ = trace_call(model, call, joining=joining)
    # the code is not ours, so that any exception may come
    except Exception as error:
        anatomy = without_stream(model, f"the trial forward pass failed: {shortened(str(error), 200)}")
        anatomy.failed = True
        return anatomy
    modules = dict(model.named_modules())
    if trace.joins:
        sublayers = _of_joins(trace, modules)
        kind: Found = "connections"
    else:
        sublayers = _of_sums(model, trace, modules)
        kind = "residual sums"
    if not sublayers:
        return without_stream(model, "no sum h + f of a stream and a module's output was found in its code", trace)
    seen: set[int] = set()
    for sublayer in sublayers:
        # a weight that several sublayers share belongs to the first
        sublayer.parameters = {name: p for name, p in sublayer.parameters.items() if id(p) not in seen}
        seen |= {id(p) for p in sublayer.parameters.values()}
    places = _places(model, seen)
    own = {name.rpartition(".")[0] for name in sublayers[0].parameters}
    first = min((time for name in own for time in trace.calls.get(name, ())), default=0)
    entry = {place for place in places if any(time < first for time in trace.calls.get(place, ()))}
    return Anatomy(kind, sublayers, places, entry=entry, idle=_idle(trace, places))


def _idle(trace: Trace, places: dict[str, dict[str, nn.Parameter]]) -> set[str]:
    """The places that hold the weights of modules none of which was called."""
    return {
        place for place, names in places.items() if not any(name.rpartition(".")[0] in trace.calls for name in names)
    }


def _places(model: nn.Module, seen: set[int]) -> dict[str, dict[str, nn.Parameter]]:
    """The weights that are not in `seen`, by layer, or by module outside of layers."""
    places: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            place = layer_of(name) or name.rpartition(".")[0] or name
            places.setdefault(place, {})[name] = parameter
    return places


def _of_joins(trace: Trace, modules: dict[str, nn.Module]) -> list[FoundSublayer]:
    """Sublayers that a connection of spheret joins to the stream."""
    found: list[FoundSublayer] = []
    turns: Counter[str] = Counter()
    ended = 0
    for join in trace.joins:
        start = max(ended, _start(trace, join))
        # a step of a converted model joins in a hook of the module that ends its branch, which returns after it
        end = join.path[-1] if join.path and hasattr(modules[join.name], "watcher") else ""
        ended = min((t for t in trace.calls.get(end, ()) if t > join.time), default=join.time) if end else join.time
        inside = {name: [t for t in times if start < t <= ended] for name, times in trace.calls.items()}
        # the connection's own norms run inside of it, and belong to it
        branch = {
            name: times
            for name, times in inside.items()
            if times and not f"{name}.".startswith(f"{join.name}.") and (name == end or name not in join.path)
        }
        found.append(
            FoundSublayer(
                name=_outer(branch) or join.name,
                branch=branch_kind(modules[name] for name in branch),
                join=Call(join.name, turns[join.name]),
                parameters=_parameters(modules, {**branch, join.name: [join.time]}),
            )
        )
        turns[join.name] += 1
    return found


def _start(trace: Trace, join: Join) -> int:
    """When a branch began: its connection was called, its stream was read, or its layer was called."""
    layer = layer_of(join.name)
    times = []
    for key, reads in trace.reads.items():
        for read in reads:
            if read.time < join.time and (
                read.module == join.name or (key == join.stream and read.module not in join.path)
            ):
                times.append(read.time)
    if times:
        # a module that has read the stream long before, e.g. another layer, does not start this branch
        return min(times)
    called = [r.time for reads in trace.reads.values() for r in reads if r.module == layer and r.time < join.time]
    return max(called, default=0)


def _of_sums(model: nn.Module, trace: Trace, modules: dict[str, nn.Module]) -> list[FoundSublayer]:
    """Sublayers whose sum stands in the code of a model that is not ours."""
    behind: dict[int, Chain] = {}
    try:
        plan = make_plan(model, trace)
        for chain in plan.chains:
            if chain.sums[0].kind == "post-norm":
                behind[id(chain.sums[0])] = chain
        sums = [residual for chain in plan.chains for residual in chain.sums]
        known = {residual.result for residual in sums}
        for residual in residual_sums(model, trace):
            if residual.result not in known and any(end.transposed for end in residual.ends):
                sums.append(residual)
    except ConversionError:
        # what a conversion cannot replace can still be seen
        sums = residual_sums(model, trace)
    order = {addition.result: addition.time for addition in trace.additions}
    sums.sort(key=lambda residual: order[residual.result])
    return [_of_sum(trace, modules, residual, behind.get(id(residual))) for residual in sums]


def _of_sum(trace: Trace, modules: dict[str, nn.Module], residual: ResidualSum, chain: Chain | None) -> FoundSublayer:
    first = min(residual.readers, key=lambda reader: reader.time)
    last = residual.ends[-1].time
    inside = {
        name: [t for t in times if first.time < t <= last]
        for name, times in trace.calls.items()
        if any(first.time < t <= last for t in times)
    }
    norm = chain.leaving[0] if chain is not None else None
    own = inside if norm is None else {**inside, norm.module: [norm.time]}
    return FoundSublayer(
        name=_outer(inside) or residual.name,
        branch=branch_kind(modules[name] for name in inside),
        readers=[
            (Call(each.module, _turn(trace, each.module, each.time)), each.where)
            for each in sorted(residual.readers, key=lambda reader: reader.time)
        ],
        ends=[
            BranchEnd(
                Call(end.module, trace.calls[end.module].index(end.time)),
                end.index,
                end.factor / residual.stream_factor,
                tuple(modules[""].get_parameter(name) for name in end.gains),
                end.transposed,
            )
            for end in residual.ends
        ],
        behind=None if norm is None else Call(norm.module, _turn(trace, norm.module, norm.time)),
        norms=residual.kind,
        channel_dim=residual.channel_dim,
        parameters=_parameters(modules, own),
    )


def _turn(trace: Trace, module: str, time: int) -> int:
    """Which call of a module begins at a time."""
    return sum(ended < time for ended in trace.calls[module])


def _outer(inside: dict[str, list[int]]) -> str:
    """The module of a branch that is called last and holds most of it, e.g. an attention: for a name."""
    holding = {name: sum(other.startswith(f"{name}.") for other in inside) for name in inside}
    most = max(holding.values(), default=0)
    if most:
        return next(name for name, count in holding.items() if count == most)
    return max(inside, key=lambda name: inside[name][-1], default="")


def _parameters(modules: dict[str, nn.Module], inside: dict[str, list[int]]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{inner}" if name else inner: parameter
        for name in inside
        for inner, parameter in modules[name].named_parameters()
    }


@contextmanager
def joining(model: nn.Module, note: Joined) -> Iterator[None]:
    """Within the block, every connection calls `note` with its name, the stream, the branch's output, the next state.

    Rows are last in all of them.
    """
    known = {id(step) for step in steps(model)}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_one = isinstance(module, (Connection, SpheretNorm)) or id(module) in known
        # a part of another connection is not one of them
        if is_one and not any(name.startswith(f"{other}.") for other in found):
            found[name] = module
    handles: list[Any] = []
    try:
        for name, module in found.items():
            if isinstance(module, Connection):
                module.write = _noting(name, module, note)  # type: ignore[method-assign]
            elif isinstance(module, SpheretNorm):
                handles.append(module.register_forward_hook(_norm_hook(name, module.channel_dim, note)))
            else:
                module.watcher = partial(_record, name, note)  # type: ignore[assignment]
        yield
    finally:
        for module in found.values():
            if isinstance(module, Connection):
                vars(module).pop("write", None)
            elif not isinstance(module, SpheretNorm):
                module.watcher = None  # type: ignore[assignment]
        for handle in handles:
            handle.remove()


def _noting(name: str, connection: Connection, note: Joined) -> Callable[..., State]:
    write = connection.write

    def noting(state: State, f: Tensor, *prepared: Any) -> State:
        out = write(state, f, *prepared)
        note(name, connection.stream(state), f, connection.stream(out))
        return out

    return noting


def _norm_hook(name: str, channel_dim: int, note: Joined) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if len(args) == 2:
            note(name, *(x if channel_dim == -1 else x.movedim(channel_dim, -1) for x in (*args, output)))

    return hook


def _record(name: str, note: Joined, step: object, record: Any) -> None:
    stream, after = record.stream, record.after
    if record.ratio is not None:
        # before t = 1 the stream carries its length
        stream, after = stream * record.ratio, after * record.next_ratio
    note(name, stream, record.branch, after)
