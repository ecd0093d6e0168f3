"""What is measured of a model and its sublayers. `watch`, `inspect` and `spheret train` all measure with these.

Numbers stay on the device until a `fill_` function puts them into an observation: it waits for a GPU once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spheret.connections import Bounded, angle_between
from spheret.observe.judge import Item
from spheret.observe.processes import Processes
from spheret.observe.records import Observation

if TYPE_CHECKING:
    from spheret.observe.hooks import StreamHooks
from spheret.support.precision import wide
from spheret.support.sharding import local, whole

# a relative change below is lost in the rounding of float32
_ROUNDED = 1e-8
# an expert with a smaller share of the largest gradient of an expert has got no tokens
_IDLE = 1e-3
# a share of what all have in common that is as good as infinite
_ALL = 1e9
# states of fewer tokens do not show what they have in common
FEWEST_TOKENS = 8
# states of more tokens are not looked at. They are taken from the whole batch, at equal distances
MOST_TOKENS = 512


def sample(states: Tensor, channel_dim: int = -1, most: int = MOST_TOKENS) -> Tensor:
    """Rows (tokens, width) of states (..., width): at most `most` of them, at equal distances."""
    rows = states.detach().movedim(channel_dim, -1).flatten(0, -2)
    count = len(rows)
    if count <= most:
        return rows
    return rows[torch.arange(most, device=rows.device) * count // most]


def mean_cosine(states: Tensor) -> Tensor:
    """The mean cosine between the states of different tokens, from (..., width): (|sum u|^2 - n) / (n (n - 1))."""
    units = nn.functional.normalize(wide(states).flatten(0, -2), dim=-1)
    count = len(units)
    return (units.sum(0).square().sum() - count) / max(1, count * (count - 1))


def common_share(rows: Tensor) -> Tensor:
    """|mean| / |rest| over rows (..., width): the common direction against the root mean square of what is left."""
    rows = wide(rows).flatten(0, -2)
    mean = rows.mean(0)
    return mean.norm() / (rows - mean).square().sum(-1).mean().sqrt()


@torch.no_grad()
def stream_measures(h: Tensor, f: Tensor, out: Tensor, still: Tensor) -> dict[str, Tensor]:
    """Scalars of one sublayer by the fields of `SublayerObservation`, in float64 where the device has it.

    From rows (tokens, width): the state, the branch's output, the next state, and that without the branch.
    """
    h, f, out, still = map(wide, (h, f, out, still))
    angle, norm = angle_between(h, out), out.norm(dim=-1)
    length = still.norm(dim=-1)
    change = (out - still).norm(dim=-1)
    moved = change / torch.where(length > 0, length, 1.0)
    entries = out.abs().flatten()
    return {
        "norm": norm.mean(),
        "growth": norm.mean() / h.norm(dim=-1).mean(),
        "angle_mean": angle.mean(),
        "angle_max": angle.max(),
        "moved": moved.median(),
        "moved_max": moved.max(),
        "cosine": mean_cosine(out),
        "common_stream": common_share(out).clamp(max=_ALL),
        "common_output": common_share(f).clamp(max=_ALL) if len(f) >= FEWEST_TOKENS else f.new_tensor(math.nan),
        "size": change.mean(),
        "massive": entries.max() / entries.median(),
    }


@torch.no_grad()
def mixing_measures(mix: Tensor, streams: Tensor) -> dict[str, Tensor]:
    """Scalars of the matrices (tokens, n, n) that mix streams, and of the streams (tokens, n, width) behind it."""
    mix, count = wide(mix), mix.shape[-1]
    size = math.sqrt(count)
    units = nn.functional.normalize(wide(streams), dim=-1)
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    shares = mix.abs().amax(-1) / mix.abs().sum(-1)
    return {
        "stream_cosine": pairs.mean() / (count * (count - 1)),
        "mix_from_identity": torch.linalg.matrix_norm(mix - torch.eye(count).to(mix)).mean() / size,
        "mix_from_uniform": torch.linalg.matrix_norm(mix - 1 / count).mean() / size,
        "mix_saturation": shares.mean(),
    }


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The norm of each tensor as a whole. If one is sharded, every process must call this."""
    if not tensors:
        return []
    if any(local(x) is not x for x in tensors):
        return [float(whole(torch.linalg.vector_norm(x.detach(), dtype=_summed(x)))) for x in tensors]
    values = [_values(x) for x in tensors]
    found: list[Tensor] = [wide(torch.linalg.vector_norm(x, dtype=_summed(x))) for x in values]
    return torch.stack([x.to(found[0]) for x in found]).tolist()


def _values(x: Tensor) -> Tensor:
    x = x.detach()
    return x.coalesce().values() if x.is_sparse else x


def _summed(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def on_bound(model: nn.Module) -> list[str]:
    """The names of the bounded scalars that are on a bound."""
    names = []
    for prefix, module in model.named_modules():
        if not isinstance(module, Bounded):
            continue
        for scalar in module.bounded_scalars():
            value = wide(scalar.softplus())
            # the softplus of the starting value may be rounded to either side of its bound
            if ((value <= scalar.low * (1 + 1e-6)) | (value >= scalar.high * (1 - 1e-6))).any():
                names.append(f"{prefix}.{scalar.name}" if prefix else scalar.name)
    return names


# the numbers of the stream, which each process sees in its own part of the batch
_OF_THE_STREAM = (
    "norm", "growth", "angle_mean", "angle_max", "moved", "moved_max", "size", "cosine", "common_stream",
    "common_output", "massive", "sink", "drift", "alpha", "attention_logit", "stream_cosine", "mix_from_identity",
    "mix_from_uniform", "mix_saturation", "mix_gain",
)  # fmt: skip


def fill_stream(observation: Observation, hooks: StreamHooks, processes: Processes) -> None:
    """What the hooks of the main process have seen of the stream, in its part of the batch."""
    rows: list[Tensor] = []
    places: list[tuple[int, str]] = []
    start = hooks.sublayers[0].lengths if hooks.sublayers else None
    product: Tensor | None = None
    for index, seen in enumerate(hooks.sublayers):
        named = dict(seen.measured)
        if start is not None and seen.lengths is not None and len(seen.lengths[1]) == len(start[0]):
            named["drift"] = ((seen.lengths[1] - start[0]).abs() / start[0]).max()
        if seen.mix is not None:
            product = wide(seen.mix) if product is None else wide(seen.mix) @ product
            named["mix_gain"] = torch.linalg.matrix_norm(product, ord=2).mean()
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


def fill_gradients(observation: Observation, items: Sequence[Item]) -> None:
    """The gradient norm of every place, and of all together, which may be infinite."""
    values = iter(norms([p.grad for item in items for p in item.parameters.values() if p.grad is not None]))
    total = 0.0
    for each, item in zip(observation.everywhere, items, strict=True):
        own = {name: next(values) for name, p in item.parameters.items() if p.grad is not None}
        if own:
            norm = math.hypot(*own.values())
            total = math.hypot(total, norm)
            each.grad_norm = _finite(norm)
        each.experts = _experts_with_gradient(item, own)
    observation.grad_norm = total


def expert_of(name: str) -> str | None:
    """The expert that a parameter belongs to, by its name; None if it belongs to none."""
    found = re.match(r".*experts\.\d+", name)
    return found[0] if found else None


def _experts_with_gradient(item: Item, own: Mapping[str, float]) -> int | None:
    """How many of its experts have more than a thousandth of the largest gradient of one; None if it has none."""
    sizes = {expert: 0.0 for name in item.parameters if (expert := expert_of(name)) is not None}
    for name, size in own.items():
        if (expert := expert_of(name)) is not None:
            sizes[expert] = math.hypot(sizes[expert], size)
    return sum(size > _IDLE * max(sizes.values()) for size in sizes.values()) if sizes else None


@torch.no_grad()
def fill_updates(observation: Observation, items: Sequence[Item], before: Sequence[Tensor]) -> set[int]:
    """The change of every place relative to its weights before, which are given in the same order.

    Returns the indices of the items of which no matrix has changed beyond rounding.
    """
    weights = [p for item in items for p in item.parameters.values()]
    changes = norms([p.detach() - old for p, old in zip(weights, before, strict=True)])
    sizes = list(zip(weights, changes, norms(before), norms(weights), strict=True))
    rest, still = iter(sizes), set()
    for index, (each, item) in enumerate(zip(observation.everywhere, items, strict=True)):
        own = [next(rest) for _ in item.parameters]
        size = math.hypot(*(size for _, _, size, _ in own))
        if size > 0:
            each.update = _finite(math.hypot(*(change for _, change, _, _ in own)) / size)
            each.shrunk = _finite(1 - math.hypot(*(after for *_, after in own)) / size)
        # the gains and biases of a norm may be in a different place from the matrices behind it
        matrices = [part for part in own if part[0].dim() > 1]
        changed = any(change > _ROUNDED * size for _, change, size, _ in matrices)
        if not changed and (matrices or (each.update or 0.0) <= _ROUNDED):
            still.add(index)
    return still


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
