"""From a trace to a plan: the residuals of a model, in order, with their readers, ends and streams."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from spheret.conversion.trace import Addition, Key, Made, Read, Trace


class ConversionError(ValueError):
    """A model cannot be converted. Nothing of it was changed."""


@dataclass(frozen=True)
class BranchEnd:
    """A module that ends a branch: its output, or an index of it, times `factor` and `gains` is what is added."""

    module: str
    index: int | None
    factor: float
    time: int  # when it was called
    key: Key
    makers: tuple[str, ...]  # every module that returned this tensor: the last one may be a dropout in eval mode
    # which of the module's calls in the branch it is, from 0, if there are several: one dropout may serve all places
    call_number: int | None = None
    # whether its last two dimensions change places before it is added, which `convert` cannot replace
    transposed: bool = False
    # the names of the parameters that the layer's code multiplies it by
    gains: tuple[str, ...] = ()


@dataclass
class ResidualSum:
    """One addition a h + b f."""

    ends: list[BranchEnd]
    readers: list[Read]  # in the order of their calls
    host: str  # the module whose code adds
    path: tuple[str, ...]
    stack: str
    dim: int
    channel_dim: int
    place: str
    stream: Key
    result: Key
    # the host's attribute for a dropout behind the branch, and its value
    dropout: tuple[str, float] | None = None
    # a
    stream_factor: float = 1.0
    kind: str = ""

    @property
    def name(self) -> str:
        return self.ends[-1].module

    @property
    def where(self) -> str:
        """For people: the module that adds, and the one that ends the branch."""
        return f"{self.host or 'the model'} (the branch that ends in {self.name})"


@dataclass
class Chain:
    """Sums that follow each other on one stream, and the modules that read the stream where it leaves."""

    sums: list[ResidualSum]
    leaving: list[Read] = field(default_factory=list)
    # the module whose output is the stream, if no module reads it there
    last: Made | None = None
    # modules of `leaving` that also run elsewhere, such as a ResNet's relu inside of the branch
    shared: set[str] = field(default_factory=set)


@dataclass
class ConversionPlan:
    """What a conversion puts where."""

    chains: list[Chain]
    left: list[tuple[str, str]]  # what was not converted: its place, and why
    # whether the model leaves out layers at random in training mode
    skips: bool = False

    def stacks(self) -> dict[str, list[ResidualSum]]:
        """The residual sums of each stack of layers, in order."""
        stacks: dict[str, list[ResidualSum]] = {}
        for chain in self.chains:
            for residual in chain.sums:
                stacks.setdefault(residual.stack, []).append(residual)
        return stacks


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm or an RMSNorm under any name: it reads only the direction of its input."""
    name = type(module).__name__.lower()
    other = any(word in name for word in ("batch", "group", "instance"))
    return "norm" in name and not other and not list(module.children())


def reads_direction(modules: dict[str, nn.Module], readers: list[Read]) -> bool:
    """Whether only norms read the stream."""
    return bool(readers) and all(is_norm(modules[reader.module]) for reader in readers)


def layer_of(name: str) -> str:
    """The name of the layer that a module stands in: all up to the first number. Empty if there is none."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else ""


def stack_of(name: str) -> str:
    """The name of the list of layers that a module stands in: all before the first number. Empty if there is none."""
    layer = layer_of(name)
    return layer.rpartition(".")[0] or "layers" if layer else ""


def _outermost(reads: list[Read]) -> list[Read]:
    names = {read.module for read in reads}
    return [read for read in reads if not names.intersection(read.path)]


def _branch_ends(
    trace: Trace, key: Key, path: tuple[str, ...], before: int, transposes: bool = False
) -> list[BranchEnd] | None:
    """The modules whose outputs make up a branch's output; None if something else does.

    transposes: whether an output may be transposed.
    """
    made = [m for m in trace.made.get(key, []) if m.module not in path and m.time < before]
    if made:
        return [BranchEnd(made[-1].module, made[-1].index, 1.0, made[-1].time, key, tuple(m.module for m in made))]
    if key in trace.products:
        factor, source = trace.products[key]
        ends = _branch_ends(trace, source, path, before)
        if ends and isinstance(factor, str):
            return [replace(end, gains=(*end.gains, factor)) for end in ends]
        return ends and [replace(end, factor=end.factor * float(factor)) for end in ends]
    for dropout in trace.dropouts:
        if dropout.result == key != dropout.source:
            return _branch_ends(trace, dropout.source, path, before, transposes)
    if transposes and len(trace.moved.get(key, ())) == 1:
        (source,) = trace.moved[key]
        x, y = trace.tensors[source], trace.tensors[key]
        if x.dim() == y.dim() == 3 and torch.equal(x.mT, y):
            ends = _branch_ends(trace, source, path, before)
            return ends and [replace(end, transposed=True) for end in ends]
    for addition in trace.additions:
        if addition.result == key and addition.time < before and addition.path == path:
            parts = [_branch_ends(trace, side, path, addition.time) for side in (addition.first, addition.second)]
            return parts[0] + parts[1] if parts[0] and parts[1] else None
    return None


def _readers(trace: Trace, stream: Key, addition: Addition) -> list[Read]:
    """The modules that were called with the stream before it was added to, and do not add themselves."""
    # a dropout in eval mode returns the very tensor that it was given
    passing = {made.module for made in trace.made.get(stream, [])}
    reads = [r for r in trace.reads.get(stream, []) if r.time < addition.time and r.module not in passing]
    containers = [read for read in reads if read.module in addition.path]
    readers = [r for r in reads if r.module not in addition.path]
    # a module that is called with the stream elsewhere, e.g. rotary embeddings, does not start a branch: the readers
    # stand in the smallest container that has some, or in the layer
    within = ([r for r in readers if container.module in r.path] for container in reversed(containers))
    inside = next((found for found in within if found), [])
    layer = layer_of(addition.host)
    return _outermost([r for r in readers if r in inside or layer_of(r.module) == layer or r.path == addition.path])


def _channel_dim(trace: Trace, stream: Key, modules: Iterable[nn.Module]) -> int:
    """1 for images (N, C, H, W) whose branch is convolutional, else the last dimension."""
    shape = trace.tensors[stream].shape
    if len(shape) == 4:
        for module in modules:
            for part in module.modules():
                names = ("in_channels", "num_features", "num_channels")
                width = next((getattr(part, name) for name in names if hasattr(part, name)), None)
                if isinstance(part, (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)) and width == shape[1]:
                    return 1
    return -1


def make_plan(model: nn.Module, trace: Trace) -> ConversionPlan:
    """The residual sums of the traced model. Raises ConversionError if one is of an unknown kind."""
    modules = dict(model.named_modules())
    finder = _SumFinder(trace, modules, type(model).__name__)
    for addition in trace.additions:
        finder.add(addition)
    sums = finder.sums
    if finder.unknown and not any(layer_of(residual.host) for residual in sums):
        raise ConversionError(next(iter(finder.unknown.values())))
    left = list(finder.left.values())
    left += [(where, "adds something that no module returns, outside of the layers") for where in finder.unknown]
    layers = {layer_of(residual.host) for residual in sums}
    why = "adds a h + b f, and a is not one positive number: a number per channel or token is not a length"
    left += [(where, why) for host, where in finder.scaled if layer_of(host) not in layers]
    left += _bare_layers(trace, sums, {place.partition(",")[0] for place, _ in left}, modules)
    sums = _of_one_layer(_in_stacks(sums, left), left)
    _split_widths(sums)
    _check_shared(sums)
    _check_earlier_states(trace, sums)
    _number_calls(trace, sums)
    _check_dropouts(trace, sums)
    return ConversionPlan(_chains(trace, sums, modules), left)


def residual_sums(model: nn.Module, trace: Trace) -> list[ResidualSum]:
    """The residual sums of the traced model as far as they are of a known kind. Others are left out."""
    finder = _SumFinder(trace, dict(model.named_modules()), type(model).__name__, transposes=True)
    for addition in trace.additions:
        with contextlib.suppress(ConversionError):
            finder.add(addition)
    return _in_stacks(finder.sums, [])


class _SumFinder:
    """Finds the residual sums among the additions of a trace, in order, and those that are left or unknown."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], model: str, transposes: bool = False):
        self.trace, self.modules, self.model, self.transposes = trace, modules, model, transposes
        self.sums: list[ResidualSum] = []
        self.by_result: dict[Key, ResidualSum] = {}
        # sums that are no residuals. One that turns out to be the sum of two branches is taken out again
        self.left: dict[Key, tuple[str, str]] = {}
        # unknown sums in code that belongs to no layer
        self.unknown: dict[str, str] = {}
        # the hosts and places of sums a h + b f in which a is more than one number
        self.scaled: list[tuple[str, str]] = []

    def add(self, addition: Addition) -> None:
        sides = addition.first, addition.second
        for stream, branch in (sides, sides[::-1]):
            ends = _branch_ends(self.trace, branch, addition.path, addition.time, self.transposes)
            if self._continues(addition, stream, ends) or self._is_residual(addition, stream, branch, ends):
                return
        self._note_left(addition)
        for x, y in (sides, sides[::-1]):
            streams, branches = self.trace.made_from(x) - {x}, self.trace.made_from(y)
            if any(_readers(self.trace, key, addition) for key in streams) and any(
                _branch_ends(self.trace, key, addition.path, addition.time) for key in branches
            ):
                self.scaled.append((addition.host, self._where(addition)))

    def _continues(self, addition: Addition, stream: Key, ends: list[BranchEnd] | None) -> bool:
        """h + f + g: the second sum continues the first, because nobody reads the stream between them."""
        previous = self.by_result.get(addition.first) or self.by_result.get(addition.second)
        if previous is None or previous.result != stream or not ends or _readers(self.trace, stream, addition):
            return False
        if any(self.trace.reads.get(key) for key in self.trace.rearranged(stream)):
            # e.g. the windows of an image, which the branch reads
            return False
        previous.ends = sorted([*previous.ends, *ends], key=lambda end: end.time)
        del self.by_result[previous.result]
        previous.result = addition.result
        self.by_result[addition.result] = previous
        return True

    def _is_residual(self, addition: Addition, stream: Key, branch: Key, ends: list[BranchEnd] | None) -> bool:
        factor, readers = 1.0, _readers(self.trace, stream, addition)
        while not readers and stream in self.trace.products:
            times, stream = self.trace.products[stream]
            if isinstance(times, str) or times <= 0:
                return False
            factor, readers = factor * times, _readers(self.trace, stream, addition)
        if not readers:
            return False
        if ends is None:
            self._refuse(addition, readers)
            return False
        if max(end.time for end in ends) < min(read.time for read in readers):
            return False
        self.left.pop(branch, None)
        dropout = _dropout(self.trace, branch, ends, addition, self.modules[addition.host], self._where(addition))
        ends = sorted(ends, key=lambda end: end.time)
        near = [end.module for end in ends] + [read.module for read in readers]
        channel_dim = _channel_dim(self.trace, stream, [self.modules[name] for name in near])
        dim = self.trace.tensors[stream].shape[channel_dim]
        if dim < 2:
            raise ConversionError(
                f"the stream in {self._where(addition)} has rows of one entry, which have no direction. Nothing was "
                "changed."
            )
        residual = ResidualSum(
            ends=ends,
            readers=sorted(readers, key=lambda read: read.time),
            host=addition.host,
            path=addition.path,
            stack=stack_of(ends[-1].module),
            dim=dim,
            channel_dim=channel_dim,
            place=addition.place,
            stream=stream,
            result=addition.result,
            dropout=dropout,
            stream_factor=factor,
        )
        self.sums.append(residual)
        self.by_result[addition.result] = residual
        return True

    def _where(self, addition: Addition) -> str:
        return f"{addition.host or self.model} ({type(self.modules[addition.host]).__name__}), {addition.place}"

    def _refuse(self, addition: Addition, readers: list[Read]) -> None:
        """Raise if a layer adds something to its stream that no hook reaches. Outside of layers it is noted."""
        layer, where = layer_of(addition.host), self._where(addition)
        if all(layer_of(read.module) != layer for read in readers):
            # e.g. a position bias that every layer is given: it is not a stream of this layer
            return
        refusal = (
            f"unknown residual in {where}: the stream is added to something that no module returns, so no hook can "
            "take its place. Nothing was changed."
        )
        if layer:
            raise ConversionError(refusal)
        # e.g. an embedding and its positions, if the residuals stand in layers
        self.unknown[where] = refusal

    def _note_left(self, addition: Addition) -> None:
        """Keep in mind what a report must name: sums in layers that look like residuals and are not converted."""
        host, sides = addition.host, (addition.first, addition.second)
        if not stack_of(host):
            return
        why = None
        if all(self.trace.made.get(side) for side in sides):
            why = "a sum of two modules' outputs, of which none is a stream that a branch reads"
        elif any(
            self._holds_stream(addition, x) and self._holds_branch(addition, y) for x, y in (sides, sides[::-1])
        ):
            why = "adds to a part or a rearrangement of the stream"
        if why is not None:
            self.left[addition.result] = (f"{host}, {addition.place}", why)

    def _holds_stream(self, addition: Addition, side: Key) -> bool:
        """Whether a tensor holds entries of the layer's input, or of a sum that was taken up before."""
        sources = self.trace.sources(side)
        if any(key in self.by_result or key in self.left for key in sources):
            return True
        layer = layer_of(addition.host)
        own = {name for name in addition.path if layer_of(name) == layer}
        return any(read.module in own for key in sources for read in self.trace.reads.get(key, ()))

    def _holds_branch(self, addition: Addition, side: Key) -> bool:
        """Whether a tensor holds entries of what a module of the layer has returned."""
        ends = (_branch_ends(self.trace, key, addition.path, addition.time) for key in self.trace.sources(side))
        layer = layer_of(addition.host)
        return any(layer_of(end.module) == layer for found in ends for end in found or ())


def _dropout(
    trace: Trace, branch: Key, ends: list[BranchEnd], addition: Addition, host: nn.Module, where: str
) -> tuple[str, float] | None:
    """The function dropout between the branch's last module and the sum: the host's attribute for it, and its value.

    The step takes it over, because the host would drop out what the hook returns.
    """
    start = max(end.time for end in ends)
    calls = [d for d in trace.dropouts if d.result == branch and start < d.time < addition.time and d.p > 0]
    if not calls:
        return None
    p = calls[0].p
    names = [name for name, value in vars(host).items() if "drop" in name and isinstance(value, float) and value == p]
    if len(calls) != 1 or len(names) != 1:
        raise ConversionError(
            f"unknown residual in {where}: the function dropout with p = {p:g} stands between the branch's last "
            "module and the addition, where no hook reaches, and the layer has no single attribute for it. Set this "
            "dropout to 0 in the model, and convert again."
        )
    return names[0], p


def _check_dropouts(trace: Trace, residuals: list[ResidualSum]) -> None:
    """Refuse a host whose dropout attribute may serve other dropouts than those behind its branches."""
    for residual in residuals:
        if residual.dropout is not None:
            name, p = residual.dropout
            own = [r for r in residuals if r.host == residual.host and r.dropout == residual.dropout]
            if sum(d.host == residual.host and d.p == p for d in trace.dropouts) != len(own):
                raise ConversionError(
                    f"{residual.where} drops out more than its branches' outputs with p = {p:g}, so its attribute "
                    f"{name} cannot be taken over. Set this dropout to 0 in the model, and convert again."
                )


def _bare_layers(
    trace: Trace, residuals: list[ResidualSum], known: set[str], modules: dict[str, nn.Module]
) -> list[tuple[str, str]]:
    """Layers that ran beside layers with residuals and have none. A lone norm or dropout is not a layer."""
    with_residuals = {layer_of(residual.name) for residual in residuals}
    stacks = {stack_of(layer) for layer in with_residuals if layer}
    names = [name for name in trace.calls if name and layer_of(name) == name and stack_of(name) in stacks]
    accounted = with_residuals | {layer_of(host) for host in known}
    bare = [name for name in names if name not in accounted and list(modules[name].children())]
    return [(name, "the layer has no residual sum h + f") for name in bare]


def _in_stacks(residuals: list[ResidualSum], left: list[tuple[str, str]]) -> list[ResidualSum]:
    """Leave residuals outside of all stacks of layers as they are, unless there are no others."""
    inside = [residual for residual in residuals if residual.stack]
    outside = [residual for residual in residuals if inside and not residual.stack]
    left += [(f"{one.name}, {one.place}", "stands outside of the stacks of layers") for one in outside]
    return inside or residuals


def _of_one_layer(residuals: list[ResidualSum], left: list[tuple[str, str]]) -> list[ResidualSum]:
    """Leave sums with a tensor that several layers add to, e.g. positions: a stream is a different one in each."""
    layers: dict[Key, set[str]] = {}
    for residual in residuals:
        layers.setdefault(residual.stream, set()).add(layer_of(residual.host))
    several = [residual for residual in residuals if len(layers[residual.stream]) > 1]
    left += [(f"{one.host}, {one.place}", "adds something that several layers add") for one in several]
    return [residual for residual in residuals if len(layers[residual.stream]) == 1]


def _split_widths(residuals: list[ResidualSum]) -> None:
    """A list of layers whose width changes is one stack per width."""
    widths = {(residual.stack, residual.dim, residual.channel_dim) for residual in residuals}
    for residual in residuals:
        if sum(stack == residual.stack for stack, _, _ in widths) > 1:
            residual.stack = f"{residual.stack} of width {residual.dim}"


def _check_shared(residuals: list[ResidualSum]) -> None:
    """Refuse blocks that run more than once in one forward pass."""
    places: set[tuple[str, str, str]] = set()
    reading: set[str] = set()
    for residual in residuals:
        # the same code may add in a loop over modules of their own
        place = residual.host, residual.place, residual.name
        if place in places or any(reader.module in reading for reader in residual.readers):
            raise ConversionError(
                f"{residual.where} runs more than once in one forward pass: "
                "blocks that share their weights cannot have step sizes of their own, so the model is not converted."
            )
        places.add(place)
        reading.update(reader.module for reader in residual.readers)


def _check_earlier_states(trace: Trace, residuals: list[ResidualSum]) -> None:
    """Refuse a stream that is read beside the states of earlier layers, as by block attention residuals."""
    for residual in residuals:
        calls = {(reader.module, reader.time) for reader in residual.readers}
        shape = trace.tensors[residual.stream].shape
        for key in trace.moved:
            x = trace.tensors[key]
            beside = any((read.module, read.time) in calls for read in trace.reads.get(key, ()))
            if beside and x.shape[:-2] == shape[:-1] and x.shape[-1] == shape[-1]:
                raise ConversionError(
                    f"{residual.readers[0].module} reads the stream beside earlier states of each "
                    f"token, so that {residual.where} adds to a part of a state and not to one stream. Nothing was "
                    "changed."
                )


def _number_calls(trace: Trace, residuals: list[ResidualSum]) -> None:
    """Number the calls of a module that ends a branch and also runs elsewhere in it."""
    for residual in residuals:
        start, stop = residual.readers[0].time, residual.ends[-1].time
        for number, end in enumerate(residual.ends):
            calls = [time for time in trace.calls[end.module] if start < time <= stop]
            if len(calls) > 1:
                residual.ends[number] = replace(end, call_number=calls.index(end.time))


def _chains(trace: Trace, residuals: list[ResidualSum], modules: dict[str, nn.Module]) -> list[Chain]:
    chains: list[Chain] = []
    ending: dict[Key, Chain] = {}
    for residual in residuals:
        chain = ending.pop(residual.stream, None)
        if chain is None:
            chain = Chain([])
            chains.append(chain)
        else:
            # a stream may pass from one list of layers to the next: it keeps its radius
            residual.stack = chain.sums[0].stack
        chain.sums.append(residual)
        ending[residual.result] = chain
    for chain in chains:
        last = chain.sums[-1]
        made = trace.made.get(last.result, [])
        passing = {*last.path, *(m.module for m in made)}
        reads = [read for read in trace.reads.get(last.result, []) if read.module not in passing]
        chain.leaving = _outermost(reads)
        chain.last = next(iter(made), None)
        if chain.last is not None and _is_used_elsewhere(trace, last.result, chain):
            # every reader finds the length in what the last layer returns
            chain.leaving = []
        chain.shared = {reader.module for reader in chain.leaving if len(trace.calls[reader.module]) > 1}
        if not chain.leaving and chain.last is None:
            raise ConversionError(
                f"the stream after {last.name} ({last.place}) is neither read nor returned by a module, so it cannot "
                "be given its length back. Nothing was changed."
            )
        for residual in chain.sums:
            residual.kind = _kind(residual, chain, modules)
    return chains


def _is_used_elsewhere(trace: Trace, result: Key, chain: Chain) -> bool:
    """Whether the stream is also used where it leaves and no reader of it has a hook, e.g. returned by the model."""
    assert chain.last is not None
    names = {reader.module for reader in chain.leaving}
    if not names or min(reader.time for reader in chain.leaving) < chain.last.time:
        return False
    rearranged = trace.rearranged(result)
    reads = [read for key in rearranged for read in trace.reads.get(key, ())]
    return not trace.returned.isdisjoint({result, *rearranged}) or any(names.isdisjoint(read.path) for read in reads)


def _kind(residual: ResidualSum, chain: Chain, modules: dict[str, nn.Module]) -> str:
    before = reads_direction(modules, residual.readers)
    behind = any(is_norm(modules[name]) for name in residual.ends[-1].makers)
    single = len(chain.sums) == 1 and chain.leaving and is_norm(modules[chain.leaving[0].module])
    if single and not before:
        return "post-norm"
    return {(True, True): "norms around", (True, False): "pre-norm", (False, True): "norm behind"}.get(
        (before, behind), "no norm"
    )
