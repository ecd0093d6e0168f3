"""Put the steps of a plan into a model, and take them out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spheret.connections import ScaleNorm, Spherical
from spheret.conversion.plan import Chain, ConversionPlan, Reader, ResidualSum, is_norm
from spheret.conversion.steps import (
    NAME,
    Channel,
    Home,
    Hook,
    JoinHook,
    LayerHook,
    Leave,
    OutputHook,
    Passage,
    Places,
    Position,
    ReadHook,
    StartHook,
    Step,
)

# what a host keeps of torch's shortcuts for layers without hooks
_NESTED = "_spheret_use_nested_tensor"
# and of its dropouts that the steps have taken over
_DROPOUTS = "_spheret_dropouts"


def positions(model: nn.Module) -> list[Position]:
    """Every place where a converted model's streams have hooks, in order."""
    # PEFT keeps the places that it has copied beside those in use
    hosted: list[Any] = [module._modules.get(NAME) for module in model.modules()]
    used = {id(place) for places in hosted if _holds_places(places) for place in places.listed()}
    return [module for module in model.modules() if isinstance(module, Position) and id(module) in used]


def steps(model: nn.Module) -> list[Step]:
    """The steps of a converted model, in order. A model that is not converted has none."""
    return [place for place in positions(model) if isinstance(place, Step)]


def _holds_places(module: nn.Module | None) -> bool:
    return module is not None and any(isinstance(part, Places) for part in module.modules())


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


def attach(model: nn.Module, plan: ConversionPlan, scheme: Spherical) -> dict[str, list[Step]]:
    """Add the steps of the plan to the model. Returns the steps of each stack."""
    modules = dict(model.named_modules())
    sizes = {name: len(sums) for name, sums in plan.stacks().items()}
    owners: dict[str, Home] = {}
    stacks: dict[str, list[Step]] = {name: [] for name in sizes}
    for chain in plan.chains:
        channel = Channel()
        layers: list[LayerHook] = []
        homes = []
        for residual in chain.sums:
            stack = stacks[residual.stack]
            connection = scheme.connect(residual.dim, len(stack) + 1, sizes[residual.stack])
            like = _like(modules, residual)
            entry_norm = None
            if residual.stack not in owners:
                enter = scheme.enter(residual.dim)
                assert isinstance(enter, ScaleNorm)
                entry_norm = enter.to(like.device, like.dtype)
            step = Step(
                channel,
                connection,
                entry_norm,
                residual is chain.sums[0],
                [end.factor for end in residual.ends],
                residual.channel_dim,
                not _reads_direction(modules, residual.readers),
                like,
            )
            stack.append(step)
            if residual.dropout is not None:
                name, step.dropout = residual.dropout
                host = modules[residual.host]
                host.__dict__.setdefault(_DROPOUTS, {})[name] = step.dropout
                setattr(host, name, 0.0)
            home = _host(modules[residual.host], step)
            step.owner = owners.setdefault(residual.stack, home)
            homes.append(home)
            if not step.first:
                layers += _hook_layers(modules, residual.containers, home)
        leave = _host(modules[chain.sums[-1].host], _leave(modules, chain, channel))
        # what reads the stream where it leaves may be a layer, too
        layers += _hook_layers(modules, [r for r in chain.leaving if r.module not in chain.shared], leave)
        for residual, home in zip(chain.sums, homes, strict=True):
            _hook(modules, residual, home, layers if residual is chain.sums[0] else [])
        for name in {"", chain.sums[0].caller}:
            modules[name].register_forward_pre_hook(StartHook(homes[0]).hook)
        _hook_leave(modules, chain, leave)
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


def _like(modules: dict[str, nn.Module], residual: ResidualSum) -> torch.Tensor:
    """A parameter near the residual, whose device and dtype the new parameters take."""
    near = [reader.module for reader in residual.readers] + [end.module for end in residual.ends]
    for name in (*near, residual.host, ""):
        for parameter in modules[name].parameters():
            if parameter.is_floating_point():
                return parameter
    return torch.empty(0)


def _host(host: nn.Module, place: Position) -> Home:
    if not hasattr(host, NAME):
        host.add_module(NAME, Places())
    places = getattr(host, NAME)
    places.append(place.train(host.training))
    return Home(host, len(places.listed()) - 1)


def _hook_layers(modules: dict[str, nn.Module], readers: list[Reader], home: Home) -> list[LayerHook]:
    hooks = [LayerHook(home, reader.where, modules[reader.module]) for reader in readers]
    for hook in hooks:
        hook.layer.register_forward_pre_hook(hook.hook, with_kwargs=True)
    return hooks


def _hook(modules: dict[str, nn.Module], residual: ResidualSum, home: Home, layers: list[LayerHook]) -> None:
    for reader in residual.readers:
        hook = ReadHook(home, reader.where, layers).hook
        modules[reader.module].register_forward_pre_hook(hook, with_kwargs=True)
    for number, end in enumerate(residual.ends):
        modules[end.module].register_forward_hook(JoinHook(home, number, end.index, end.turn).hook)


def _leave(modules: dict[str, nn.Module], chain: Chain, channel: Channel) -> Leave:
    last = chain.sums[-1]
    reads_length = not (chain.leaving and _reads_direction(modules, chain.leaving))
    return Leave(channel, last.channel_dim, reads_length, _like(modules, last), max(len(chain.leaving), 1))


def _hook_leave(modules: dict[str, nn.Module], chain: Chain, home: Home) -> None:
    for reader in chain.leaving:
        hook = ReadHook(home, reader.where, [], reader.module in chain.shared).hook
        modules[reader.module].register_forward_pre_hook(hook, with_kwargs=True)
    if not chain.leaving:
        assert chain.last is not None
        modules[chain.last.module].register_forward_hook(OutputHook(home, chain.last.index).hook)


def _own_hooks(module: nn.Module) -> Iterator[tuple[Any, int]]:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Hook):
                yield hooks, number


def detach(model: nn.Module) -> None:
    """Take every step and hook out of the model. Its own parameters were never changed."""
    for module in list(model.modules()):
        for hooks, number in _own_hooks(module):
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
        added = module._modules.get(NAME)
        if _holds_places(added):
            del module._modules[NAME]
        for name, p in module.__dict__.pop(_DROPOUTS, {}).items():
            setattr(module, name, p)
        if _NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(_NESTED)
    config = getattr(model, "config", None)
    if config is not None and NAME in getattr(config, "__dict__", {}):
        delattr(config, NAME)
