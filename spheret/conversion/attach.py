"""Put the steps of a plan into a model, and take them out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spheret.connections import ScaleNorm, Spherical
from spheret.conversion.plan import Chain, Plan, Reader, Residual, is_norm
from spheret.conversion.steps import (
    HOOKS,
    Channel,
    JoinHook,
    LayerHook,
    Leave,
    OutputHook,
    Passage,
    Position,
    ReadHook,
    Step,
)

# the name of the steps in the module that hosts them, and of the entry in the model's config
NAME = "spheret"
# what a host keeps of torch's shortcuts for layers without hooks
_NESTED = "_spheret_use_nested_tensor"
# and of its dropouts that the steps have taken over
_DROPOUTS = "_spheret_dropouts"


def positions(model: nn.Module) -> list[Position]:
    """Every place where a converted model's streams have hooks, in order."""
    return [module for module in model.modules() if isinstance(module, Position)]


def steps(model: nn.Module) -> list[Step]:
    """The steps of a converted model, in order. A model that is not converted has none."""
    return [module for module in model.modules() if isinstance(module, Step)]


@contextmanager
def watched(model: nn.Module, watcher: Callable[[Step, Passage], None]) -> Iterator[None]:
    """A context in which every residual sum of a converted model calls `watcher(step, passage)`."""
    all_steps = steps(model)
    try:
        for step in all_steps:
            step.watcher = watcher
        yield
    finally:
        for step in all_steps:
            step.watcher = None


def attach(model: nn.Module, plan: Plan, scheme: Spherical) -> dict[str, list[Step]]:
    """Add the steps of the plan to the model. Returns the steps of each stack."""
    modules = dict(model.named_modules())
    numbers: dict[str, int] = {}
    sizes = {name: len(residuals) for name, residuals in plan.stacks().items()}
    enters: dict[str, ScaleNorm] = {}
    stacks: dict[str, list[Step]] = {name: [] for name in sizes}
    for chain in plan.chains:
        channel = Channel()
        for residual in chain.residuals:
            number = numbers[residual.stack] = numbers.get(residual.stack, 0) + 1
            connection = scheme.connect(residual.dim, number, sizes[residual.stack])
            like = _like(modules, residual)
            owns = residual.stack not in enters
            if owns:
                enter = scheme.enter(residual.dim)
                assert isinstance(enter, ScaleNorm)
                enters[residual.stack] = enter.to(like.device, like.dtype)
            step = Step(
                channel,
                connection,
                enters[residual.stack],
                owns,
                residual is chain.residuals[0],
                [end.factor for end in residual.ends],
                residual.channel_dim,
                not _reads_direction(modules, residual.readers),
                like,
            )
            stacks[residual.stack].append(step)
            if residual.dropout is not None:
                name, step.dropout = residual.dropout
                host = modules[residual.host]
                host.__dict__.setdefault(_DROPOUTS, {})[name] = step.dropout
                setattr(host, name, 0.0)
            _host(modules[residual.host], step)
            _hook(modules, residual, step)
        _leave(modules, chain, channel)
    for module in model.modules():
        # torch turns padded batches into nested tensors, which only its layers without hooks take
        if isinstance(module, nn.TransformerEncoder):
            module.__dict__[_NESTED] = module.use_nested_tensor
            module.use_nested_tensor = False
    return stacks


def follow_hosts(model: nn.Module) -> None:
    """Put the steps into training or eval mode as the modules that host them."""
    for module in list(model.modules()):
        added = module._modules.get(NAME)
        if added is not None:
            added.train(module.training)


def _reads_direction(modules: dict[str, nn.Module], readers: list[Reader]) -> bool:
    return all(is_norm(modules[reader.module]) for reader in readers)


def _like(modules: dict[str, nn.Module], residual: Residual) -> torch.Tensor:
    """A parameter near the residual, whose device and dtype the new parameters take."""
    near = [reader.module for reader in residual.readers] + [end.module for end in residual.ends]
    for name in (*near, residual.host, ""):
        for parameter in modules[name].parameters():
            if parameter.is_floating_point():
                return parameter
    return torch.empty(0)


def _host(host: nn.Module, place: Position) -> None:
    if not hasattr(host, NAME):
        host.add_module(NAME, nn.ModuleList())
    getattr(host, NAME).append(place.train(host.training))


def _hook(modules: dict[str, nn.Module], residual: Residual, step: Step) -> None:
    if residual.container is not None and not step.first:
        hook = LayerHook(step, residual.container.where).hook
        modules[residual.container.module].register_forward_pre_hook(hook, with_kwargs=True)
    for reader in residual.readers:
        modules[reader.module].register_forward_pre_hook(ReadHook(step, reader.where).hook, with_kwargs=True)
    for number, end in enumerate(residual.ends):
        modules[end.module].register_forward_hook(JoinHook(step, number, end.index, end.turn).hook)


def _leave(modules: dict[str, nn.Module], chain: Chain, channel: Channel) -> None:
    last = chain.residuals[-1]
    reads_length = not (chain.leaving and _reads_direction(modules, chain.leaving))
    leave = Leave(channel, last.channel_dim, reads_length, _like(modules, last), max(len(chain.leaving), 1))
    _host(modules[last.host], leave)
    for reader in chain.leaving:
        modules[reader.module].register_forward_pre_hook(ReadHook(leave, reader.where).hook, with_kwargs=True)
    if not chain.leaving:
        assert chain.last is not None
        modules[chain.last.module].register_forward_hook(OutputHook(leave, chain.last.index).hook)


def _own_hooks(module: nn.Module) -> Iterator[tuple[Any, int]]:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), HOOKS):
                yield hooks, number


def detach(model: nn.Module) -> None:
    """Take every step and hook out of the model. Its own parameters were never changed."""
    for module in list(model.modules()):
        for hooks, number in _own_hooks(module):
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
        added = module._modules.get(NAME)
        if added is not None and any(isinstance(place, Position) for place in added.modules()):
            del module._modules[NAME]
        for name, p in module.__dict__.pop(_DROPOUTS, {}).items():
            setattr(module, name, p)
        if _NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(_NESTED)
    config = getattr(model, "config", None)
    if config is not None and NAME in getattr(config, "__dict__", {}):
        delattr(config, NAME)
