"""One observation of a model at rest: what `spheret.watch` sees, what each sublayer is worth, how they follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spheret.connections import Connection, State
from spheret.model.gpt import GPT
from spheret.observe.calls import logits_of, quietly
from spheret.observe.finding import Anatomy, Call, FoundSublayer, find_sublayers
from spheret.observe.hooks import After, Before, StreamHooks, argument, at_calls
from spheret.observe.measures import fill_stream, norms
from spheret.observe.processes import Processes
from spheret.observe.records import Observation, Start, SublayerObservation
from spheret.support.errors import shortened
from spheret.support.precision import wide

# (done, all), called after each sublayer
Tick = Callable[[int, int], object]
# a state that moves by less cannot be told from its own rounding in float32, the precision of a run
INACTIVE = torch.finfo(torch.float32).eps


@dataclass(slots=True)
class Inspection:
    """A model on some windows of text.

    Args:
        model: its class.
        loss: the mean loss.
        entry_norm: the mean length of the stream before the first sublayer.
        sublayers: what was seen at each sublayer.
        inactive: the numbers of those that move the stream by less than float32 resolves.
        note: what could not be measured, and why.
        windows: how many windows of text there were.
        name: of the run, or of the directory.
        scheme: the scheme of a run or of a conversion; of any other model, where its sums have their norms.
        checkpoint: the step of a run's checkpoint.
        own_logit: the logit of the current token above the mean logit, for models of spheret.
        start: what a run's model predicted before training.
    """

    model: str
    loss: float
    entry_norm: float
    sublayers: list[SublayerObservation]
    inactive: list[int]
    note: str = ""
    windows: int = 1
    name: str = ""
    scheme: str = ""
    checkpoint: int | None = None
    own_logit: float | None = None
    start: Start | None = None


def effective_rank(states: Tensor) -> float:
    """exp of the entropy of the normalised singular values of the states, (tokens, width): from 1 to width."""
    values = torch.linalg.svdvals(wide(states))
    return float(torch.special.entr(values / values.sum()).sum().exp())


def update_cosines(states: list[Tensor]) -> list[float | None]:
    """The mean cosine between each change from state to state and the change before; None for the first."""
    steps = [wide(after) - wide(before) for before, after in pairwise(states)]
    pairs = pairwise(steps)
    return [None, *(float(nn.functional.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs)]


def call(model: nn.Module, tokens: Tensor) -> Any:
    """What the model returns for tokens (windows, time), without a cache that a second call would find."""
    has_cache = hasattr(getattr(model, "config", None), "use_cache")
    return model(tokens, use_cache=False) if has_cache else model(tokens)


def anatomy_of(model: nn.Module, tokens: Tensor) -> Anatomy:
    """The sublayers of a model, found as `spheret.watch` does. It is an error if there are none."""
    anatomy = find_sublayers(model, lambda: call(model, tokens[:1]))
    if not anatomy.sublayers:
        raise ValueError(f"the stream of {type(model).__name__} cannot be followed: {anatomy.note}.")
    return anatomy


def token_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of every token, (windows, time)."""
    if isinstance(model, GPT) and not torch.is_grad_enabled():
        # it does not hold all logits
        return model.token_losses(x, y)
    logits = logits_of(call(model, x))
    if logits is None:
        raise ValueError(f"{type(model).__name__} returns no logits (batch, time, vocabulary) from only tokens.")
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(wide(token_losses(model, x, y)).mean())


def gradients(
    model: nn.Module, anatomy: Anatomy, x: Tensor, y: Tensor
) -> tuple[list[float | None], list[float | None]]:
    """Norms of the loss's gradient with respect to each sublayer's weights, and to the state before it.

    A tensor that stays in the state from sublayer to sublayer counts in each of them with its whole gradient. The
    model's own gradients do not change.
    """
    kept = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    carried: list[list[Tensor]] = [[] for _ in anatomy.sublayers]

    def keep(states: list[Tensor], found: FoundSublayer, args: Any, kwargs: Any) -> None:
        states += [x for x in tree_leaves(argument(args, kwargs, found.entry[1])) if x.requires_grad]
        for state in states:
            state.retain_grad()

    pairs = zip(anatomy.sublayers, carried, strict=True)
    before: dict[Call, Before] = {found.entry[0]: partial(keep, states, found) for found, states in pairs}
    try:
        for p, _, _ in kept:
            p.grad = None
            p.requires_grad_(True)
        with quietly(model), torch.enable_grad(), at_calls(dict(model.named_modules()), before, {}):
            loss = model(x, y) if isinstance(model, GPT) else token_losses(model, x, y).mean()
            loss.backward()
        weights = [_gradient_norm(found.parameters.values()) for found in anatomy.sublayers]
        return weights, [_gradient_norm(states) for states in carried]
    finally:
        for p, grad, requires_grad in kept:
            p.grad = grad
            p.requires_grad_(requires_grad)


def _gradient_norm(tensors: Iterable[Tensor]) -> float | None:
    found = norms([x.grad for x in tensors if x.grad is not None])
    return math.hypot(*found) if found else None


def removed(found: FoundSublayer, modules: Mapping[str, nn.Module]) -> Any:
    """A block in which one sublayer passes the stream on unchanged, in one forward pass."""
    if found.join is not None:
        return _without_join(found.join, modules)
    reader, where = found.entry
    stream: list[Tensor] = []

    def keep(args: Any, kwargs: Any) -> None:
        stream.append(argument(args, kwargs, where))

    after: dict[Call, After] = {end.call: partial(_zeros, end.index) for end in found.ends}
    if found.behind is not None:
        # the norm behind the sum belongs to the sublayer
        after[found.behind] = lambda args, output: stream[-1]
    before: dict[Call, Before] = {reader: keep}
    return at_calls(modules, before, after)


def _zeros(index: int | None, args: Any, output: Any) -> Any:
    if index is None:
        return torch.zeros_like(output)
    parts = [*output[:index], torch.zeros_like(output[index]), *output[index + 1 :]]
    return parts if isinstance(output, list) else tuple(parts)


@contextmanager
def _without_join(join: Call, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block, this call of a connection of spheret changes nothing."""
    module: Any = modules[join.module]
    turns = 0
    if isinstance(module, Connection):
        name, write = "write", module.write

        def skipped(state: State, *rest: Any) -> State:
            nonlocal turns
            turns += 1
            return module.skip(state) if turns == join.turn + 1 else write(state, *rest)

    elif hasattr(module, "join"):
        # a step of a converted model, which returns what the layer adds
        name, write = "join", module.join

        def skipped(state: State, *rest: Any) -> State:
            return torch.zeros_like(write(state, *rest))

    else:
        # a SpheretNorm, which is called with the stream and the branch's output
        with at_calls(modules, {}, {join: lambda args, output: args[0]}):
            yield
        return
    setattr(module, name, skipped)
    try:
        yield
    finally:
        delattr(module, name)


def removals(
    model: nn.Module, anatomy: Anatomy, x: Tensor, y: Tensor, tick: Tick = lambda done, total: None
) -> tuple[list[float | None], str]:
    """By how much the loss rises when one sublayer is removed, for each sublayer, and why one could not be removed.

    Values near 0 mean that the sublayer does nothing: the curse of depth.
    """
    modules = dict(model.named_modules())
    rises: list[float | None] = []
    note = ""
    with quietly(model):
        whole = mean_loss(model, x, y)
        for found in anatomy.sublayers:
            try:
                with removed(found, modules):
                    rises.append(mean_loss(model, x, y) - whole)
            # the code is not ours, so that any exception may come
            except Exception as error:
                rises.append(None)
                note = note or f"{found.name} cannot be removed: {shortened(str(error), 200)}"
            tick(len(rises), len(anatomy.sublayers))
    return rises, note


def seen_whole(model: nn.Module, anatomy: Anatomy, run: Callable[[], Any]) -> StreamHooks:
    """What every sublayer did with every token, while `run` calls the model once."""
    hooks = StreamHooks(anatomy, dict(model.named_modules()), keeps=True)
    try:
        run()
    finally:
        hooks.remove()
    for found, seen in zip(anatomy.sublayers, hooks.sublayers, strict=True):
        if seen.states is None:
            raise ValueError(f"the stream of {type(model).__name__} was not seen at {found.name}.")
    return hooks


@torch.no_grad()
def inspect(model: nn.Module, x: Tensor, y: Tensor, tick: Tick = lambda done, total: None) -> Inspection:
    """What the stream of a language model does on some windows of text, by the measures of `spheret.watch`.

    Args:
        model: a GPT of spheret, or any module that returns logits for tokens. It is not changed.
        x: the tokens, (windows, time).
        y: their targets, one token later.
        tick: called after every sublayer that was removed, with how many were and how many there are.
    """
    losses: list[float] = []
    with quietly(model):
        anatomy = anatomy_of(model, x)
        hooks = seen_whole(model, anatomy, lambda: losses.append(mean_loss(model, x, y)))
    names = enumerate(anatomy.sublayers, start=1)
    seen = Observation(0, sublayers=[SublayerObservation(n, found.branch, found.name) for n, found in names])
    fill_stream(seen, hooks, Processes(x.device))
    states = [each.states for each in hooks.sublayers if each.states is not None]
    path = [states[0][0], *(out for _, _, out in states)]
    weights, streams = gradients(model, anatomy, x, y)
    rises, note = removals(model, anatomy, x, y, tick)
    cosines = update_cosines(path)
    for index, (each, hooked) in enumerate(zip(seen.sublayers, hooks.sublayers, strict=True)):
        each.inactive = each.moved is not None and each.moved < INACTIVE
        each.update_cosine, each.effective_rank = cosines[index], effective_rank(path[index + 1])
        each.sink_heads = None if hooked.sinks is None else hooked.sinks.tolist()
        each.grad_norm, each.stream_grad_norm, each.removal = weights[index], streams[index], rises[index]
    return Inspection(
        model=type(model).__name__,
        loss=losses[0],
        entry_norm=float(wide(path[0]).norm(dim=-1).mean()),
        sublayers=seen.sublayers,
        inactive=[each.sublayer for each in seen.sublayers if each.inactive],
        note=note,
        windows=len(x),
        scheme=", ".join(dict.fromkeys(found.norms for found in anatomy.sublayers if found.norms)),
    )
