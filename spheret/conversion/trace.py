"""One trial forward pass, watched: which modules read the stream, which module ends each branch, and where they meet.

The residual additions of a model stand in its code, not in its module tree. So the trial notes every tensor that a
module reads or returns and every addition of two tensors, by the tensor's identity. An addition whose one side was
read by a module before, and whose other side is what a module returned, is a residual: h + f.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spheret.connections import Connection

# a tensor object and its version, because relu(inplace=True) returns the object that it was given
Key = tuple[int, int]
# the name of a connection, the stream, the branch's output and the next state
Joined = Callable[[str, Tensor, Tensor, Tensor], None]
# where a module takes a tensor: the index of an argument, or the name of a keyword
Argument = int | str

_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_QUOTIENTS = {torch.div, Tensor.div, Tensor.__truediv__}
# other ways to scale or shift every entry
_CHANGES = _ADDITIONS | _PRODUCTS | _QUOTIENTS | {torch.sub, Tensor.sub, Tensor.__sub__}
_RESHAPES = {
    Tensor.view,
    Tensor.view_as,
    Tensor.reshape,
    Tensor.reshape_as,
    Tensor.flatten,
    torch.reshape,
    torch.flatten,
}
# what moves entries to other places, and changes none of them
_MOVES = _RESHAPES | {
    getattr(home, name)
    for home in (torch, Tensor)
    for name in (
        "cat", "chunk", "clone", "contiguous", "expand", "flip", "gather", "index_select", "movedim", "narrow",
        "permute", "repeat", "roll", "split", "squeeze", "stack", "swapaxes", "transpose", "unbind", "unfold",
        "unflatten", "unsqueeze", "__getitem__",
    )
    if hasattr(home, name)
} | {torch.nn.functional.pad, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]  # fmt: skip
# random numbers by which code may skip a layer
_CHANCES, _COINS = {torch.rand, Tensor.uniform_}, {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}
# the random inputs of a trial
_BATCH, _TOKENS, _SEED = 2, 16, 0
# what a model returns of the stream itself, and its caches
_SKIPPED = ("hidden_states", "attentions", "past_key_values", "encoder_hidden_states")


@dataclass(frozen=True)
class Read:
    """A module was called with a tensor."""

    module: str
    where: Argument
    path: tuple[str, ...]  # the modules that were running, outermost first
    time: int


@dataclass(frozen=True)
class Made:
    """A module returned a tensor, as its output or at an index of it."""

    module: str
    index: int | None
    time: int


@dataclass(frozen=True)
class Addition:
    """first + second, in the forward of the last module of `path`."""

    first: Key
    second: Key
    result: Key
    path: tuple[str, ...]
    place: str  # the file and line of the code
    time: int

    @property
    def host(self) -> str:
        """The module whose code adds."""
        return self.path[-1] if self.path else ""


@dataclass(frozen=True)
class Dropout:
    """A call of the function dropout in the code of a module. In evaluation mode it returns what it is given."""

    source: Key
    result: Key
    p: float
    host: str
    time: int


@dataclass(frozen=True)
class Join:
    """A connection of spheret joined a branch's output to the stream."""

    name: str
    stream: Key
    branch: Key
    result: Key
    path: tuple[str, ...]
    time: int


@dataclass
class Trace:
    """What the trial saw."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    # tensors that hold the rows of another one in the same order: they go by its key
    reshaped: dict[Key, Key] = field(default_factory=dict)
    reads: dict[Key, list[Read]] = field(default_factory=lambda: defaultdict(list))
    made: dict[Key, list[Made]] = field(default_factory=lambda: defaultdict(list))
    additions: list[Addition] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    # tensors that hold entries of others in other places
    moved: dict[Key, list[Key]] = field(default_factory=dict)
    # what modules were called with, as it was then: a tensor may be changed in place later
    values: dict[Key, Tensor] = field(default_factory=dict)
    # products with a number, or with a parameter, which goes by its name: that factor and the other tensor
    products: dict[Key, tuple[float | str, Key]] = field(default_factory=dict)
    # what else was scaled or shifted by a tensor, and the rows that it was made of
    changed: dict[Key, list[Key]] = field(default_factory=dict)
    dropouts: list[Dropout] = field(default_factory=list)
    # when each module returned
    calls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # what the model returned
    returned: set[Key] = field(default_factory=set)

    def sources(self, key: Key) -> set[Key]:
        """The tensor itself, and those whose entries it holds in other places."""
        return _reached(key, lambda one: self.moved.get(one, ()))

    def made_from(self, key: Key) -> set[Key]:
        """The tensor itself, and those that it was before they were scaled or shifted."""
        return _reached(key, lambda one: [*self.changed.get(one, ()), *self.products.get(one, ())[1:]])

    def rearranged(self, key: Key) -> list[Key]:
        """The tensors that hold entries of this one in other places."""
        return [other for other in self.moved if other != key and key in self.sources(other)]


def _reached(key: Key, before: Callable[[Key], Iterable[Any]]) -> set[Key]:
    found, waiting = {key}, [key]
    while waiting:
        new = set(before(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def returned_tensors(output: Any, known: set[int] | None = None) -> Iterator[Tensor]:
    """The floating-point tensors in what a model returns, without the stream itself and the caches."""
    known = set() if known is None else known
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    if id(output) in known or isinstance(output, (str, bytes, type, nn.Module)):
        return
    known.add(id(output))
    if isinstance(output, Mapping):
        parts = dict(output)
    elif is_dataclass(output):
        parts = {field.name: getattr(output, field.name) for field in fields(output)}
    elif isinstance(output, (tuple, list)):
        parts = dict(enumerate(output))
    else:
        parts = getattr(output, "__dict__", {})
    for name, part in parts.items():
        if not str(name).endswith(_SKIPPED):
            yield from returned_tensors(part, known)


def _key(x: Tensor) -> Key:
    return id(x), x._version


def is_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2 and not isinstance(x, nn.Parameter)


def _same_rows(x: Any, y: Any) -> bool:
    """Whether y, which is x reshaped, has the rows of x. Images are left out: their channels are not last."""
    if not (is_rows(x) and is_rows(y)) or x is y:
        return False
    return max(x.dim(), y.dim()) < 4 and x.shape[-1] == y.shape[-1]


class _Tracing(TorchFunctionMode):
    def __init__(self, trace: Trace, model: nn.Module, keeps_values: bool, chances: Iterator[float] | None):
        super().__init__()
        self.trace, self.time, self.keeps_values, self.chances = trace, 0, keeps_values, chances
        self.path: list[str] = []
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}

    def note(self, x: Tensor) -> Key:
        # the trace keeps each tensor alive, so that no identity is used twice
        key = _key(x)
        self.trace.tensors.setdefault(key, x)
        return self.trace.reshaped.get(key, key)

    def tick(self) -> int:
        self.time += 1
        return self.time

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ADDITIONS and len(args) == 2 and is_rows(args[0]) and is_rows(args[1]):
            return self._addition(function, args, kwargs)
        out = function(*args, **kwargs)
        if function in _CHANGES:
            self._change(function, args, out)
        elif function in _RESHAPES and _same_rows(args[0], out):
            source = self.note(args[0])
            self.note(out)
            self.trace.reshaped[_key(out)] = source
        elif function in _MOVES:
            self._move(args, out)
        elif function is torch.nn.functional.dropout and is_rows(out):
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            host = self.path[-1] if self.path else ""
            self.trace.dropouts.append(Dropout(self.note(args[0]), self.note(out), float(p), host, self.tick()))
        elif self.chances is not None and function in _CHANCES | _COINS and out.numel() == 1:
            chance = next(self.chances)
            out.fill_(round(chance) if function in _COINS else chance)
        return out

    def _change(self, function: Any, args: Any, out: Any) -> None:
        """Note what scales or shifts rows: by a number, by a parameter, or by anything else."""
        rows = [x for x in args if is_rows(x)]
        if not rows or not is_rows(out):
            return
        by = next((x for x in args if not is_rows(x)), None)
        factor = self.parameters.get(id(by)) if isinstance(by, Tensor) else by
        if function in _PRODUCTS and isinstance(factor, (int, float, str)):
            self.trace.products[self.note(out)] = factor, self.note(rows[0])
        elif function in _QUOTIENTS and by is args[1] and isinstance(by, (int, float)) and by:
            self.trace.products[self.note(out)] = 1 / by, self.note(rows[0])
        else:
            self.trace.changed[self.note(out)] = [self.note(x) for x in rows]

    def _addition(self, function: Any, args: Any, kwargs: Any) -> Any:
        first, second = (self.note(x) for x in args)
        same = args[0].shape == args[1].shape and not kwargs
        out = function(*args, **kwargs)
        if same and isinstance(out, Tensor):
            place = _place()
            path = tuple(self.path)
            self.trace.additions.append(Addition(first, second, self.note(out), path, place, self.tick()))
        return out

    def _move(self, args: Any, out: Any) -> None:
        # torch.cat has its tensors in a list
        given = args[0] if args and isinstance(args[0], (tuple, list)) else args[:1]
        sources = [self.note(x) for x in given if is_rows(x)]
        for x in (out if isinstance(out, (tuple, list)) else (out,)) if sources else ():
            if is_rows(x) and not any(x is y for y in given):
                self.trace.moved[self.note(x)] = sources

    def join(self, name: str, h: Tensor, f: Tensor, out: Tensor) -> None:
        keys = self.note(h), self.note(f), self.note(out)
        self.trace.joins.append(Join(name, *keys, tuple(self.path), self.tick()))

    def before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            time, path = self.tick(), tuple(self.path)
            given = [*enumerate(args), *kwargs.items()]
            if isinstance(module, Connection):
                # its state may hold several tensors
                given = [(where, x) for where, state in given for x in tree_leaves(state)]
            for where, x in given:
                if is_rows(x):
                    key = self.note(x)
                    self.trace.reads[key].append(Read(name, where, path, time))
                    if self.keeps_values and key not in self.trace.values:
                        self.trace.values[key] = x.detach().clone()
            self.path.append(name)

        return hook

    def after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.path.pop()
            time = self.tick()
            self.trace.calls[name].append(time)
            parts = list(enumerate(output)) if isinstance(output, (tuple, list)) else [(None, output)]
            for index, x in parts:
                if is_rows(x):
                    self.trace.made[self.note(x)].append(Made(name, index, time))

        return hook


def _place() -> str:
    """The file and line of the code that adds, outside of torch and of this room."""
    here, torch_home = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(here) and not (name.startswith(torch_home) and "/nn/modules/" not in name):
            line = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno} ({line})"
        frame = frame.f_back
    return "unknown code"


# what torch keeps in every module
_TORCHS_OWN = frozenset(vars(nn.Module()))
_STATE = (type(None), bool, int, float, str, tuple, list, dict, Tensor)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """A context for calls of ours, after which the model and the generators of random numbers are as before.

    The state of a module is its buffers, and the tensors, numbers and lists among its attributes.
    """
    kept = []
    for module in model.modules():
        if isinstance(module, LazyModuleMixin):
            # the first call gives it its sizes
            continue
        own = {name: x for name, x in vars(module).items() if name not in _TORCHS_OWN and isinstance(x, _STATE)}
        tensors = [x for x in (*module._buffers.values(), *own.values()) if isinstance(x, Tensor)]
        copies = [(x, x.detach().clone()) for x in tensors if not (x.is_meta or x.is_inference())]
        lists = [(x, x.copy()) for x in own.values() if isinstance(x, (list, dict))]
        kept.append((module, own, set(vars(module)), module._buffers.copy(), copies, lists))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for module, own, names, buffers, copies, lists in kept:
            for x, old in copies:
                # batch norms do not raise the version of their buffers
                if not torch.equal(x, old):
                    with torch.no_grad():
                        x.copy_(old)
            for one, contents in lists:
                one.clear()
                one.update(contents) if isinstance(one, dict) else one.extend(contents)
            for name in set(vars(module)) - names:
                del vars(module)[name]
            vars(module).update(own)
            module._buffers.update(buffers)


@contextmanager
def _drawing(model: nn.Module, chances: Iterator[float]) -> Iterator[None]:
    """A context in which the model's code draws these numbers where it asks Python or numpy for a single one."""

    real = np.random.rand

    def rand(*shape: int) -> Any:
        return np.full(shape, next(chances))[()] if np.prod(shape) == 1 else real(*shape)

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return low + (high - low) * rand(*(() if size is None else np.atleast_1d(size)))

    fakes = {
        id(random.random): rand,
        id(random.uniform): uniform,
        id(np.random.rand): rand,
        id(np.random.random): lambda size=None: uniform(size=size),
        id(np.random.uniform): uniform,
    }
    # code may have imported the function, and not its module
    homes = {type(module).__module__ for module in model.modules()} | {"random", "numpy.random"}
    with ExitStack() as stack:
        for home in homes & sys.modules.keys():
            own = {name: fakes[id(x)] for name, x in vars(sys.modules[home]).items() if id(x) in fakes}
            stack.enter_context(patch.dict(vars(sys.modules[home]), own))
        yield


def trace_call(
    model: nn.Module,
    call: Callable[[], Any],
    keeps_values: bool = False,
    joining: Callable[[nn.Module, Joined], AbstractContextManager[object]] | None = None,
    chances: bool = False,
) -> tuple[Trace, Any]:
    """Run `call`, which calls the model, and return what was seen and what it returned. The model stays as it was.

    joining: a context in which the connections of the model call the given function with what they join.
    chances: let every other single random number be 0, so that what the model skips at random is skipped.
    """
    trace = Trace()
    drawn = cycle((0.0, 0.999)) if chances else None
    mode = _Tracing(trace, model, keeps_values, drawn)
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(mode.before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(mode.after(name)))
        joins = nullcontext() if joining is None else joining(model, mode.join)
        drawing = nullcontext() if drawn is None else _drawing(model, drawn)
        with undisturbed(model), torch.no_grad(), mode, joins, drawing:
            output = call()
        trace.returned = {mode.note(x) for x in returned_tensors(output)}
    finally:
        for handle in handles:
            handle.remove()
    return trace, output


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on these inputs: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def random_inputs(model: nn.Module) -> Any:
    """Random inputs for a trial of the model; None if it does not say what it takes."""
    generator = torch.Generator().manual_seed(_SEED)
    parameter = next(model.parameters())

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(parameter.device, parameter.dtype)

    def tokens(vocab: int, most: int | None) -> Tensor:
        length = min(_TOKENS, most or _TOKENS)
        return torch.randint(vocab, (_BATCH, length), generator=generator).to(parameter.device)

    inputs: Any = _transformers(model, rows, tokens)
    inputs = _torch_layers(model, rows) if inputs is None else inputs
    if inputs is None and isinstance(cfg := getattr(model, "pretrained_cfg", None), Mapping) and "input_size" in cfg:
        # timm
        inputs = (rows(_BATCH, *cfg["input_size"]),)
    config: Any = getattr(model, "config", None)
    if inputs is None and hasattr(config, "vocab") and hasattr(config, "block"):
        # spheret.GPT
        inputs = (tokens(config.vocab, config.block),)
    return inputs


def _transformers(model: nn.Module, rows: Any, tokens: Any) -> dict[str, Tensor] | None:
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if name is None or config is None:
        return None
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        if size is None:
            return None
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {name: rows(_BATCH, getattr(config, "num_channels", 3), height, width)}
    if name != "input_ids":
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = tokens(text.vocab_size, getattr(text, "max_position_embeddings", None))
    return {name: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {name: ids}


def _torch_layers(model: nn.Module, rows: Any) -> tuple[Tensor, ...] | None:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
    if attention is None or not isinstance(model, (*kinds, nn.Transformer)):
        return None
    shape = (_BATCH, _TOKENS) if attention.batch_first else (_TOKENS, _BATCH)
    one = rows(*shape, attention.embed_dim)
    return (one,) if isinstance(model, kinds[:2]) else (one, rows(*shape, attention.embed_dim))
