"""How a loss depends on the learning rate: plain numbers go in, and a bowl comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Bowl:
    """How much the loss depends on the learning rate.

    `low` and `high` are the ends of the range of rates around the best one in which the loss is at most the best loss
    plus the tolerance. An end is None if the range reaches that end of the grid: where the bowl ends is then unknown.
    `factor` is high/low, None if an end is open.
    """

    # the rate of the grid with the lowest loss, and that loss
    best: float
    loss: float
    low: float | None
    high: float | None
    factor: float | None
    # highest over lowest rate of the range inside the grid: `factor`, or a lower bound of it if an end is open
    at_least: float


def bowl(losses: Mapping[float, float | None], tolerance: float = 0.05) -> Bowl:
    """The width of the bowl of losses by learning rate, where None is a run that diverged. One rate has a loss.

    Between two rates of the grid the loss is interpolated linearly in log(rate). A diverged run counts as infinitely
    bad, so the range ends at the last rate before it. The range is the connected one around the best rate: a second
    dip beyond a ridge does not count. Of two equally good rates the lower one is the best.
    """
    grid = sorted((rate, loss) for rate, loss in losses.items() if loss is not None)
    best, lowest = min(grid, key=lambda point: (point[1], point[0]))
    limit = lowest + tolerance
    rates = sorted(losses)
    position = rates.index(best)
    low, open_low = _crossing(losses, rates[position::-1], limit)
    high, open_high = _crossing(losses, rates[position:], limit)
    return Bowl(
        best=best,
        loss=lowest,
        low=None if open_low else low,
        high=None if open_high else high,
        factor=None if open_low or open_high else high / low,
        at_least=high / low,
    )


def _crossing(losses: Mapping[float, float | None], rates: Sequence[float], limit: float) -> tuple[float, bool]:
    """Where the loss first exceeds the limit, walking from the best rate; (the last rate, True) if it never does."""
    for inside, outside in pairwise(rates):
        near, far = losses[inside], losses[outside]
        assert near is not None
        if far is None:
            return inside, False
        if far > limit:
            return inside * (outside / inside) ** ((limit - near) / (far - near)), False
    return rates[-1], True
