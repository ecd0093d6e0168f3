"""How much a few updates change a model, sublayer by sublayer, for models of several widths and depths.

Under a parametrization whose learning rate carries over, these numbers do not depend on the size. Under any other one
they grow or shrink as a power of it. (The coordinate check of arXiv 2203.03466, with the depth of arXiv 2505.01618.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spheret.connections.parse import SchemeChoice
from spheret.model.config import default_heads
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.probes import Sublayer, probe
from spheret.optim.base_sizes import PARAMETRIZATIONS
from spheret.optim.build import build_optimizer, set_learning_rate
from spheret.optim.parametrization import OptimizerSettings, parametrize
from spheret.support.precision import wide

# where along the depth a model is looked at, as shares of its sublayers
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
LOGITS = "logits"
VOCAB = 64
# a power of the size that counts as 0: an update then changes by less than a fifth when the size doubles
FLAT = 0.25

# the power of each state and of each update, by "states" and "updates" and the place
Powers = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Setting:
    """What all models of a check share."""

    choice: SchemeChoice
    parametrization: str
    optimizer: str
    lr: float
    steps: int
    batch_size: int
    block: int
    seeds: int
    base_width: int
    base_layers: int

    def shape(self, width: int, layers: int) -> GPTConfig:
        return GPTConfig(
            layers=layers, heads=default_heads(width), width=width, block=self.block, vocab=VOCAB,
            scheme=self.choice.name, scheme_options=self.choice.options,
        )  # fmt: skip

    def optimizer_settings(self) -> OptimizerSettings:
        sizes: dict[str, Any] = {
            "base_width": self.base_width, "base_layers": self.base_layers,
            "base_heads": default_heads(self.base_width),
        }  # fmt: skip
        needed = PARAMETRIZATIONS.get(self.parametrization, ())
        return OptimizerSettings(
            lr=self.lr, optimizer=self.optimizer, parametrization=self.parametrization,
            **{name: sizes[name] for name in needed},
        )  # fmt: skip


@dataclass(frozen=True)
class Coordinates:
    """The measured model of one size.

    states: by place along the depth, the size of the state there over that of the state that enters the stack.
    updates: by place, and for the logits, how far the updates moved it, over its size before; logits as they are.
    Both are after the last update.
    """

    width: int
    layers: int
    states: dict[str, float]
    updates: dict[str, float]


def text(batch_size: int, block: int, seed: int) -> Tensor:
    """Tokens (batch, block + 1) in which each follows from the one before it, up to one of four."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCAB, (batch_size,), generator=generator)]
    for _ in range(block):
        rows.append((5 * rows[-1] + torch.randint(4, (batch_size,), generator=generator)) % VOCAB)
    return torch.stack(rows, 1)


def _size(x: Tensor) -> float:
    return float(wide(x).square().mean().sqrt())


@torch.no_grad()
def _look(model: GPT, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The state that enters the stack, and by place the state there, and the logits."""
    seen: list[Sublayer] = []
    with probe(model, seen.append):
        logits = model(tokens)
    stream = [seen[0].h, *(sublayer.out for sublayer in seen)]
    states = {f"{place:.0%}": stream[round(place * len(seen))] for place in PLACES}
    return stream[0], {**states, LOGITS: logits}


def measure(setting: Setting, width: int, layers: int, seed: int) -> Coordinates:
    """Train a new model for a few updates on one batch, and compare it with itself before them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, settings = GPT(setting.shape(width, layers)), setting.optimizer_settings()
        factors = parametrize(model, settings)
        device = torch.device("cpu")
        optimizer = build_optimizer(
            model, settings.optimizer, settings.lr, settings.weight_decay, settings.betas, device, factors
        )
        set_learning_rate(optimizer, settings.lr)
        batch = text(setting.batch_size, setting.block, seed)
        x, y = batch[:, :-1], batch[:, 1:]
        _, before = _look(model, x)
        for _ in range(setting.steps):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        entered, after = _look(model, x)
    moved = {name: _size(after[name] - before[name]) for name in after}
    return Coordinates(
        width,
        layers,
        {name: _size(state) / _size(entered) for name, state in after.items() if name != LOGITS},
        {name: moved[name] / (1.0 if name == LOGITS else _size(before[name])) for name in moved},
    )


def _middle(values: Iterable[float]) -> float:
    """The geometric mean. NaN if a value is not a number above 0."""
    logs = [math.log(value) if 0 < value < math.inf else math.nan for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def mean_coordinates(same: Sequence[Coordinates]) -> Coordinates:
    """The seeds of one size as one."""
    first = same[0]
    states, updates = (
        {name: _middle(getattr(each, part)[name] for each in same) for name in getattr(first, part)}
        for part in ("states", "updates")
    )
    return Coordinates(first.width, first.layers, states, updates)


def sweep(setting: Setting, sizes: Sequence[tuple[int, int]], tick: Callable[[], None]) -> list[Coordinates]:
    """The coordinates at every width and number of layers, over all seeds."""
    rows = []
    for width, layers in sizes:
        seeds = []
        for seed in range(setting.seeds):
            seeds.append(measure(setting, width, layers, seed))
            tick()
        rows.append(mean_coordinates(seeds))
    return rows


def power(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares slope of log value over log size."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    along = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return along / math.fsum((a - mean_x) ** 2 for a in x)


def powers(rows: Sequence[Coordinates], size: str) -> Powers:
    """The power of the size, "width" or "layers", with which every state and every update changes.

    It is that of the larger half of the sizes: the smallest models are far from the limit of large ones, which is
    what the rules are about.
    """
    rows = rows[min(len(rows) // 2, len(rows) - 2) :]
    sizes = [float(getattr(row, size)) for row in rows]
    return {
        part: {name: power(sizes, [getattr(row, part)[name] for row in rows]) for name in getattr(rows[0], part)}
        for part in ("states", "updates")
    }


def worst(found: Powers) -> tuple[str, float]:
    """What changes most with the size. An update may neither grow nor shrink; a state may only not grow."""
    named = {f"the update of the {_place(name)}": value for name, value in found["updates"].items()}
    named |= {f"the {_place(name)}": max(0.0, value) for name, value in found["states"].items()}
    # NaN is worst of all
    name = max(named, key=lambda each: math.inf if math.isnan(named[each]) else abs(named[each]))
    return name, named[name]


def _place(name: str) -> str:
    return name if name == LOGITS else f"state at {name} of the depth"


def _is_finite(row: Coordinates) -> bool:
    return all(0 < value < math.inf for value in (*row.states.values(), *row.updates.values()))


def is_flat(found: Powers) -> bool:
    return abs(worst(found)[1]) <= FLAT


def verdict(setting: Setting, by_size: Mapping[str, tuple[Sequence[Coordinates], Powers]]) -> str:
    """One sentence: for which sizes the updates do not depend on the size, and what depends on it most."""
    parts = []
    for size, (rows, found) in by_size.items():
        if lost := [row for row in rows if not _is_finite(row)]:
            parts.append(
                f"no answer for {size}: at width {lost[0].width} and {lost[0].layers} layers the numbers are not "
                f"finite or 0, so take another --lr than {setting.lr:g}"
            )
            continue
        least, most = (getattr(rows[place], size) for place in (0, -1))
        name, value = worst(found)
        sizes = f"from width {least} to {most}" if size == "width" else f"from {least} to {most} layers"
        holds = "do not depend on the size" if is_flat(found) else "depend on the size"
        parts.append(f"{sizes} updates {holds} ({name} changes most, as {size}^{value:.2f})")
    who = f"{setting.choice.label} with {setting.optimizer} and the {setting.parametrization} parametrization"
    return f"{who}: {'; '.join(parts)}."


def as_dict(rows: Sequence[Coordinates], found: Powers) -> dict[str, Any]:
    """Plain data for JSON, which has no number for NaN."""
    numbers = [
        {"width": row.width, "layers": row.layers, "states": _plain(row.states), "updates": _plain(row.updates)}
        for row in rows
    ]
    return {
        "rows": numbers,
        "powers": {part: _plain(values) for part, values in found.items()},
        "flat": is_flat(found),
    }


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
