"""One trial forward pass, watched: which modules read the stream, which module ends each branch, and where they meet.

The residual additions of a model stand in its code, not in its module tree. So the trial notes every tensor that a
module reads or returns and every addition of two tensors, by the tensor's identity. An addition whose one side was
read by a module before, and whose other side is what a module returned, is a residual: h + f.
"""

from __future__ import annotations

import copy
import linecache
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
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
# containers whose contents a forward pass may change
_CONTAINERS = {list, tuple, dict, set, OrderedDict, defaultdict, deque}
_GENERATORS = (np.ndarray, np.random.Generator, np.random.RandomState, random.Random)
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
    """A call of the function dropout in the code of a module."""

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
    # products with a number: the factor and the tensor that it multiplied
    products: dict[Key, tuple[float, Key]] = field(default_factory=dict)
    dropouts: list[Dropout] = field(default_factory=list)
    # when each module returned
    calls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # what the model returned
    returned: set[Key] = field(default_factory=set)

    def sources(self, key: Key) -> set[Key]:
        """The tensor itself, and those whose entries it holds in other places."""
        found, waiting = {key}, [key]
        while waiting:
            new = set(self.moved.get(waiting.pop(), ())) - found
            found |= new
            waiting += new
        return found

    def rearranged(self, key: Key) -> list[Key]:
        """The tensors that hold entries of this one in other places."""
        return [other for other in self.moved if other != key and key in self.sources(other)]


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
    def __init__(self, trace: Trace, keeps_values: bool):
        super().__init__()
        self.trace, self.time, self.keeps_values = trace, 0, keeps_values
        self.path: list[str] = []

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
        if function in _PRODUCTS and len(args) == 2:
            factor, x = args if is_rows(args[1]) else reversed(args)
            if isinstance(factor, (int, float)) and is_rows(x):
                self.trace.products[self.note(out)] = (float(factor), self.note(x))
        elif function in _QUOTIENTS and len(args) == 2 and not kwargs and is_rows(args[0]):
            if isinstance(args[1], (int, float)):
                self.trace.products[self.note(out)] = (1 / args[1], self.note(args[0]))
        elif function in _RESHAPES and _same_rows(args[0], out):
            source = self.note(args[0])
            self.note(out)
            self.trace.reshaped[_key(out)] = source
        elif function in _MOVES:
            self._move(args, out)
        elif function is torch.nn.functional.dropout and is_rows(out):
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            host = self.path[-1] if self.path else ""
            self.trace.dropouts.append(Dropout(self.note(out), float(p), host, self.tick()))
        return out

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


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A copy of what a forward pass may change in place. Weights, modules and all other objects stay themselves."""
    if id(value) in known:
        return known[id(value)]
    kind = type(value)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        new: Any = value.detach().clone()
    elif isinstance(value, torch.Generator):
        new = value.clone_state()
    elif isinstance(value, _GENERATORS):
        new = copy.deepcopy(value)
    elif kind in (dict, OrderedDict, defaultdict):
        new = copy.copy(value)
        new.update({key: _copied(each, known) for key, each in value.items()})
    elif kind is deque:
        new = deque((_copied(each, known) for each in value), value.maxlen)
    elif kind in _CONTAINERS:
        new = kind(_copied(each, known) for each in value)
    else:
        return value
    known[id(value)] = new
    return new


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within the block, modules have copies of all that they keep between calls: buffers, hidden states, counters.

    The random numbers of Python, numpy and torch go on behind the block as if it had not been.
    """
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    # a lazy module becomes another one in its first call
    lazy = nn.modules.lazy.LazyModuleMixin, torch.jit.ScriptModule
    kept = [(vars(module), dict(vars(module))) for module in model.modules() if not isinstance(module, lazy)]
    known: dict[int, Any] = {}
    with torch.random.fork_rng(devices=devices):
        for own, before in kept:
            # hooks are put into the dicts that are there
            own.update(
                {
                    name: _copied(value, known)
                    for name, value in before.items()
                    if name not in ("_parameters", "_modules") and "_hooks" not in name
                }
            )
        try:
            yield
        finally:
            for own, before in kept:
                own.clear()
                own.update(before)
            random.setstate(python)
            np.random.set_state(numbers)  # noqa: NPY002


def trace_call(
    model: nn.Module,
    call: Callable[[], Any],
    keeps_values: bool = False,
    joining: Callable[[nn.Module, Joined], AbstractContextManager[object]] | None = None,
) -> tuple[Trace, Any]:
    """Run `call`, which calls the model, and return what was seen and what it returned. The model stays as it was.

    joining: a context in which the connections of the model call the given function with what they join.
    """
    trace = Trace()
    mode = _Tracing(trace, keeps_values)
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(mode.before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(mode.after(name)))
        joined = joining(model, mode.join) if joining is not None else nullcontext()
        with unchanged(model), torch.no_grad(), mode, joined:
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
