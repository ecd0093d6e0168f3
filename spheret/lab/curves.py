"""How a loss depends on the learning rate and on the compute: bowls and compute-equivalent gains.

Plain numbers go in and small records come out. `bowl` takes diverged runs, as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


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


@dataclass(frozen=True)
class ComputeGain:
    """How many times a run's compute the reference would need for the run's loss.

    `factor` is above 1 if the run is better than the reference. It is None where the reference gives no answer.
    `beyond` then says why: "below" if the loss lies below all losses of the reference, "above" if it lies above all,
    None if the reference's loss does not fall with compute there.
    """

    factor: float | None
    beyond: Literal["below", "above"] | None = None


def compute_gain(reference: Sequence[tuple[float, float]], compute: float, loss: float) -> ComputeGain:
    """The compute-equivalent gain of a run over a reference that was trained with several amounts of compute.

    Args:
        reference: (compute, loss) of each run of the reference, in any order, each of another compute.
        compute: the compute of the run, in the same unit.
        loss: the loss of the run.

    Between two runs of the reference, its loss is interpolated linearly in log(compute). Beyond them nothing is
    extrapolated. If the reference has this loss where its loss rises or stays the same, several amounts of compute
    would fit, and there is no number.
    """
    ladder = sorted(reference)
    if loss < min(value for _, value in ladder):
        return ComputeGain(None, "below")
    if loss > max(value for _, value in ladder):
        return ComputeGain(None, "above")
    if any(before <= loss <= after for (_, before), (_, after) in pairwise(ladder)):
        return ComputeGain(None)
    # every other stretch falls, and the losses are continuous: exactly one stretch holds this loss
    for (less, before), (more, after) in pairwise(ladder):
        if before >= loss >= after:
            return ComputeGain(less * (more / less) ** ((before - loss) / (before - after)) / compute)
    # a reference of one run, with this very loss
    return ComputeGain(ladder[0][0] / compute)
