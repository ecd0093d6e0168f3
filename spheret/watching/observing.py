"""Put what was measured into an observation. Numbers on a GPU are waited for here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from spheret.support.precision import wide
from spheret.support.sharding import local
from spheret.watching.finding import FoundSublayer
from spheret.watching.hooks import StreamHooks
from spheret.watching.measures import StreamMeasures, norms
from spheret.watching.observations import Observation
from spheret.watching.processes import Processes

# the weights of the sublayers by name, then those of the other places
Groups = Sequence[Mapping[str, nn.Parameter]]
# the numbers of the stream, which each process sees in its own part of the batch
_OF_THE_STREAM = (*StreamMeasures._fields, "first_token", "sink", "alpha")


def fill_stream(observation: Observation, hooks: StreamHooks, processes: Processes) -> None:
    """What the hooks have seen of the stream: those of the main process, in its part of the batch."""
    rows: list[Tensor] = []
    places: list[tuple[int, str]] = []
    for index, seen in enumerate(hooks.sublayers):
        named = {} if seen.measured is None else dict(seen.measured._asdict())
        named |= {key: x for key, x in (("first_token", seen.first), ("sink", seen.sink)) if x is not None}
        if seen.alpha is not None:
            named["alpha"] = wide(local(seen.alpha.detach())).mean()
        rows += [wide(x) for x in named.values()]
        places += [(index, key) for key in named]
    values = torch.stack([x.reshape(()).to(rows[0]) for x in rows]).tolist() if rows else []
    measured = dict(zip(places, values, strict=True))
    wanted = [(index, key) for index in range(len(hooks.sublayers)) for key in _OF_THE_STREAM]
    shared = processes.of_main([measured.get(place) for place in wanted])
    for (index, key), value in zip(wanted, shared, strict=True):
        setattr(observation.sublayers[index], key, value)


def fill_common_gradients(
    observation: Observation,
    hooks: StreamHooks,
    sublayers: Sequence[FoundSublayer],
    modules: Mapping[str, nn.Module],
    processes: Processes,
) -> None:
    """The common direction in the gradients of the matrices that write to the stream."""
    weights = [None if s.writer is None else modules[s.writer]._parameters.get("weight") for s in sublayers]
    gradients = [None if weight is None else weight.grad for weight in weights]
    # a process whose tokens did not come here, as in a mixture of experts, must not leave the others waiting
    seen = [
        writer is not None and writer.tokens > 0 and gradient is not None
        for writer, gradient in zip(hooks.writers, gradients, strict=True)
    ]
    rows = zip(observation.sublayers, hooks.writers, gradients, processes.all(seen), strict=True)
    for each, writer, gradient, everywhere in rows:
        if everywhere and writer is not None and gradient is not None:
            share = writer.share(gradient, processes)
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
