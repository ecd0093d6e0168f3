"""The hooks of a converted model, and how they and the steps of a plan get into it and out again.

Each hook is one of the functions of `HOOKS`, with its first arguments bound: the address of the step or read point
that it calls, and where the tensor is that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Spherical
from spheret.conversion.plan import Chain, ConversionPlan, ResidualSum, reads_direction
from spheret.conversion.steps import NAME, AddedModules, Address, Gain, ReadPoint, Step, StepRecord, Stream
from spheret.conversion.trace import Argument

# the host of the stacks' ScaleNorms. transformers' Trainer does not decay what has _norm in its name
_NORMS = "spheret_norm"
# what a host keeps of torch's shortcuts for layers without hooks
_NESTED = "_spheret_use_nested_tensor"
# and of its dropouts that the steps have taken over
_DROPOUTS = "_spheret_dropouts"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_reader(
    address: Address, where: Argument, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Give a module that reads the stream what it is to see. number: of the reader, in the order of their calls."""
    step, x = address.module, _argument(where, args, kwargs)
    state = step.stream.state_of(step)
    # what a pass that was cut short left behind is replaced by the first reader
    if state is None or (number == 0 and state.x is not x):
        state = step.stream.begin(step.read(x))
    return _with_argument(where, args, kwargs, state.reader_input)


def _before_last_reader(
    address: Address,
    where: Argument,
    shared: bool,
    is_last: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments | None:
    """The same where the stream leaves.

    shared: whether the module also runs elsewhere, as a ResNet's relu in the branch.
    is_last: whether no other module reads the stream there.
    """
    point = address.module
    if shared and not point.stream.is_behind_a_sum:
        return None
    if is_last:
        point.stream.forget()
    return _with_argument(where, args, kwargs, point.read(_argument(where, args, kwargs)).reader_input)


def _after_branch(
    address: Address,
    number: int,
    index: int | None,
    call_number: int | None,
    module: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> Any:
    """Return x' - x in place of the output of a branch.

    number: of the branch.
    index: of the branch's output in what the module returns.
    call_number: which call of a module that runs several times in the branch ends it.
    """
    step = address.module
    state = step.stream.state_of(step)
    if state is None:
        # one dropout may end several branches, and this is the call of a different one
        return output
    if call_number is not None:
        done = state.calls.get(number, 0)
        state.calls[number] = done + 1
        if done != call_number:
            return output
    return _with_output(output, index, lambda f: step.join(state, f, number))


def _after_last_layer(
    address: Address, index: int | None, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Give the stream its length back in the last layer's output, if no module reads the stream there."""
    return _with_output(output, index, lambda x: address.module.read(x).reader_input)


def _before_stream(address: Address, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forget what a pass that was cut short has left, before the model and the module that calls the first reader.

    Recomputation under gradient checkpointing stops as soon as it has what the backward pass needs.
    """
    if not torch.compiler.is_compiling():
        address.module.stream.forget()


HOOKS: tuple[Callable[..., Any], ...] = (
    _before_reader,
    _before_last_reader,
    _after_branch,
    _after_last_layer,
    _before_stream,
)


def _argument(where: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x: Tensor = kwargs[where] if isinstance(where, str) else args[where]
    return x


def _with_argument(where: Argument, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Arguments:
    if isinstance(where, str):
        return args, {**kwargs, where: x}
    return (*args[:where], x, *args[where + 1 :]), kwargs


def _with_output(output: Any, index: int | None, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with the tensor at an index of it changed."""
    if index is None:
        return change(output)
    parts = [*output[:index], change(output[index]), *output[index + 1 :]]
    return parts if type(output) is list else tuple(parts)


def read_points(model: nn.Module) -> list[ReadPoint]:
    """Every point where a converted model's streams are read, in order."""
    # PEFT keeps the modules that it has copied beside those in use
    hosted: list[Any] = [module._modules.get(NAME) for module in model.modules()]
    used = {id(one) for added in hosted if _holds_added(added) for one in added.listed()}
    return [module for module in model.modules() if isinstance(module, ReadPoint) and id(module) in used]


def steps(model: nn.Module) -> list[Step]:
    """The steps of a converted model, in order. A model that is not converted has none."""
    return [point for point in read_points(model) if isinstance(point, Step)]


def _holds_added(module: nn.Module | None) -> bool:
    return module is not None and any(isinstance(part, AddedModules) for part in module.modules())


def watched(model: nn.Module, watcher: Callable[[Step, StepRecord], None]) -> AbstractContextManager[None]:
    """A context in which every residual sum of a converted model calls `watcher(step, record)`."""
    return _attribute_set(steps(model), "watcher", watcher)


def checking(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which a converted model computes what the original does, and only its hooks know the stream."""
    return _attribute_set([point.stream for point in read_points(model)], "checking", True)


@contextmanager
def _attribute_set(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    before = [(each, getattr(each, name)) for each in objects]
    try:
        for each, _ in before:
            setattr(each, name, value)
        yield
    finally:
        for each, old in before:
            setattr(each, name, old)


def attach(model: nn.Module, plan: ConversionPlan, scheme: Spherical) -> dict[str, list[Step]]:
    """Add the steps of the plan to the model. Returns the steps of each stack."""
    modules = dict(model.named_modules())
    sizes = {name: len(sums) for name, sums in plan.stacks().items()}
    norms: dict[str, Address] = {}
    stacks: dict[str, list[Step]] = {name: [] for name in sizes}
    for chain in plan.chains:
        stream = Stream()
        for residual in chain.sums:
            stack, host = stacks[residual.stack], modules[residual.host]
            like = _like(modules, residual)
            if residual.stack not in norms:
                norms[residual.stack] = _add(
                    _norm_host(model, host), scheme.enter(residual.dim).to(like.device, like.dtype)
                )
            connection = scheme.connect(residual.dim, len(stack) + 1, sizes[residual.stack])
            reads_length, first = not reads_direction(modules, residual.readers), residual is chain.sums[0]
            gains = [[_gain(modules, name) for name in end.gains] for end in residual.ends]
            step = Step(stream, residual, connection, reads_length, like, first, gains)
            step.enters = first or plan.skips
            stack.append(step)
            if residual.dropout is not None:
                name, p = residual.dropout
                host.__dict__.setdefault(_DROPOUTS, {})[name] = p
                setattr(host, name, 0.0)
            step.norm_address, address = norms[residual.stack], _add(host, step)
            for number, reader in enumerate(residual.readers):
                hook = partial(_before_reader, address, reader.where, number)
                modules[reader.module].register_forward_pre_hook(hook, with_kwargs=True)
            for number, end in enumerate(residual.ends):
                after = partial(_after_branch, address, number, end.index, end.call_number)
                modules[end.module].register_forward_hook(after)
            if first:
                for name in {"", residual.readers[0].path[-1]}:
                    modules[name].register_forward_pre_hook(partial(_before_stream, address))
        _attach_exit(modules, chain, stream, norms[chain.sums[0].stack])
    for module in model.modules():
        # torch turns padded batches into nested tensors, which only its layers without hooks take
        if isinstance(module, nn.TransformerEncoder):
            module.__dict__[_NESTED] = module.use_nested_tensor
            module.use_nested_tensor = False
    return stacks


def _attach_exit(modules: dict[str, nn.Module], chain: Chain, stream: Stream, norm: Address) -> None:
    """Give the stream its length back for the modules that read it behind the last sum."""
    last, readers = chain.sums[-1], sorted(chain.leaving, key=lambda reader: reader.time)
    point = ReadPoint(stream, last.channel_dim, not reads_direction(modules, readers), _like(modules, last))
    point.norm_address, address = norm, _add(modules[last.host], point)
    for reader in readers:
        shared, is_last = reader.module in chain.shared, reader is readers[-1]
        hook = partial(_before_last_reader, address, reader.where, shared, is_last)
        modules[reader.module].register_forward_pre_hook(hook, with_kwargs=True)
    if not readers:
        assert chain.last is not None
        modules[chain.last.module].register_forward_hook(partial(_after_last_layer, address, chain.last.index))


def _norm_host(model: nn.Module, first: nn.Module) -> nn.Module:
    """Where the ScaleNorm of a stack goes: not into a layer, because FSDP2 gathers the weights of one at a time."""
    if isinstance(model, nn.Sequential):
        # it would call what it is given
        return first
    if _NORMS not in model._modules:
        model.add_module(_NORMS, nn.Module())
    return model.get_submodule(_NORMS)


def follow_hosts(model: nn.Module) -> None:
    """Put what was added into training or eval mode as the modules that host it."""
    for module in list(model.modules()):
        for added in (module._modules.get(name) for name in (_NORMS, NAME)):
            if added is not None:
                added.train(module.training)


def _like(modules: dict[str, nn.Module], residual: ResidualSum) -> torch.Tensor:
    """A parameter near a residual, whose device and dtype the new parameters take."""
    near = [reader.module for reader in residual.readers] + [end.module for end in residual.ends]
    found = (p for name in (*near, residual.host, "") for p in modules[name].parameters() if p.is_floating_point())
    return next(found, torch.empty(0))


def _gain(modules: dict[str, nn.Module], name: str) -> Gain:
    host, _, own = name.rpartition(".")
    return Gain(modules[host], own)


def _add(host: nn.Module, module: nn.Module) -> Address:
    if NAME not in host._modules:
        host.add_module(NAME, AddedModules())
    added: Any = host._modules[NAME]
    number = len(added.listed())
    added.add_module(str(number), module.train(host.training))
    return Address(host, number)


def detach(model: nn.Module) -> None:
    """Take every step and hook out of the model. Its own parameters were never changed."""
    for module in list(model.modules()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if getattr(hook, "func", None) in HOOKS]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        if _holds_added(module._modules.get(NAME)):
            del module._modules[NAME]
        module._modules.pop(_NORMS, None)
        for name, p in module.__dict__.pop(_DROPOUTS, {}).items():
            setattr(module, name, p)
        if _NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(_NESTED)
    config = getattr(model, "config", None)
    if config is not None and NAME in getattr(config, "__dict__", {}):
        delattr(config, NAME)
