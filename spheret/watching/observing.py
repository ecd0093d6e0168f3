"""Put what was measured into an observation. Numbers on a GPU are waited for here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from spheret.support.sharding import local
from spheret.watching.finding import FoundSublayer
from spheret.watching.hooks import StreamHooks
from spheret.watching.measures import norms
from spheret.watching.observations import Observation

# the weights of the sublayers by name, then those of the other places
Groups = Sequence[Mapping[str, nn.Parameter]]


def fill_stream(observation: Observation, hooks: StreamHooks) -> None:
    """What the hooks have seen of the stream."""
    rows: list[Tensor] = []
    places: list[tuple[int, str]] = []
    for index, seen in enumerate(hooks.sublayers):
        named = {} if seen.measured is None else dict(seen.measured._asdict())
        named |= {key: x for key, x in (("first_token", seen.first), ("sink", seen.sink)) if x is not None}
        if seen.alpha is not None:
            named["alpha"] = local(seen.alpha.detach()).double().mean()
        rows += [x.double() for x in named.values()]
        places += [(index, key) for key in named]
    values = torch.stack([x.reshape(()).to(rows[0].device) for x in rows]).tolist() if rows else []
    for (index, key), value in zip(places, values, strict=True):
        setattr(observation.sublayers[index], key, _finite(value))


def fill_common_gradients(
    observation: Observation,
    hooks: StreamHooks,
    sublayers: Sequence[FoundSublayer],
    modules: Mapping[str, nn.Module],
    processes: int,
) -> None:
    """The common direction in the gradients of the matrices that write to the stream."""
    for each, writer, found in zip(observation.sublayers, hooks.writers, sublayers, strict=True):
        weight = None if found.writer is None else modules[found.writer]._parameters.get("weight")
        if writer is not None and weight is not None and weight.grad is not None:
            share = writer.share(weight.grad, processes)
            each.common_gradient = None if share is None else _finite(share)


def fill_gradients(observation: Observation, groups: Groups) -> None:
    """The gradient norm of every place, and of all together, which may be infinite."""
    values = iter(norms([p.grad for group in groups for p in group.values() if p.grad is not None]))
    total = 0.0
    for each, group in zip(observation.everywhere, groups, strict=True):
        own = [next(values) for p in group.values() if p.grad is not None]
        if own:
            norm = math.hypot(*own)
            total = math.hypot(total, norm)
            each.grad_norm = _finite(norm)
    observation.grad_norm = total


@torch.no_grad()
def fill_updates(observation: Observation, groups: Groups, before: Sequence[Tensor]) -> None:
    """The norm of the change of every place over that of its weights before, which are given in the same order."""
    weights = [p for group in groups for p in group.values()]
    sizes = norms(before)
    changes = norms([p.detach() - old for p, old in zip(weights, before, strict=True)])
    pairs = iter(zip(changes, sizes, strict=True))
    for each, group in zip(observation.everywhere, groups, strict=True):
        own = [next(pairs) for _ in group]
        size = math.hypot(*(size for _, size in own)) if own else 0.0
        each.update = _finite(math.hypot(*(change for change, _ in own)) / size) if size > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
