"""Curves of contestants, as static figures and interactive charts both draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spheret.analysis.line_styles import scheme_styles
from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry
from spheret.lab.rows import Row
from spheret.lab.runs import Result, RunGroup
from spheret.support.figure_style import LOSS_SHARE, spanned

Style = tuple[str, Any]
Points = tuple[list[float], list[float]]
# nobody can see more points than this on one line
MOST_POINTS = 600


@dataclass(frozen=True)
class Series:
    """One contestant. curves: one per seed, each with whether its run diverged there. style: colour and dashes."""

    label: str
    style: Style
    curves: Sequence[tuple[Points, bool]]

    @property
    def diverged(self) -> bool:
        return any(diverged for _, diverged in self.curves)

    @property
    def columns(self) -> list[tuple[float, ...]] | None:
        """The values of all seeds at each place; None with one seed, or if the seeds have other places."""
        places = [xs for (xs, _), _ in self.curves]
        if len(places) < 2 or any(xs != places[0] for xs in places):
            return None
        return list(zip(*(ys for (_, ys), _ in self.curves), strict=True))


def line_styles(answer: GroupAnswer) -> dict[str, Style]:
    """The colour and dashes of each contestant."""
    schemes = {entry.label: entry.scheme for entry in answer.entries}
    return scheme_styles({each.label: schemes[each.label] for each in answer.group.contestants})


def validation_series(answer: GroupAnswer) -> list[Series]:
    """The validation losses of each contestant by step, at the rate that counts, the best contestant first."""
    styles = line_styles(answer)
    every = [
        Series(
            entry.label, styles[entry.label], [(points, row.state == "diverged") for row, points in _curves(entry)]
        )
        for entry in answer.entries
    ]
    return [series for series in every if series.curves]


def _curves(entry: Entry) -> list[tuple[Row, Points]]:
    # where no rate gave a loss, the lowest one shows what happened
    lowest = min((row.rate for row in entry.tries), default=0.0)
    rows = list(entry.finals.values()) or [row for row in entry.tries if row.rate == lowest]
    return [(row, points) for row in rows if len((points := _thinned(row.curve))[0]) > 1]


def _thinned(curve: Sequence[tuple[float, float | None]]) -> Points:
    known = [(step, loss) for step, loss in curve if loss is not None]
    stride = max(1, -(-len(known) // MOST_POINTS))
    # counted from the end, so that the last one stays
    kept = known[::-1][::stride][::-1]
    return [step for step, _ in kept], [loss for _, loss in kept]


def run_series(group: RunGroup, points: Callable[[Result], Sequence[tuple[float, float]]]) -> list[Series]:
    """A curve of every run that is shown, the best contestant first. What comes after a divergence is left out."""
    styles = line_styles(group.answer)
    found = []
    for label, runs in group.contestants.items():
        curves = [(_thinned(points(run)), run.diverged is not None) for run in runs]
        found.append(Series(label, styles[label], [each for each in curves if each[0][0]]))
    return [series for series in found if series.curves]


def averages(run: Result, key: str, every: int) -> list[tuple[float, float]]:
    """The means of a key over so many steps each, at the last step of each."""
    values = [(line.step, getattr(line, key)) for line in run.steps if line.step <= run.healthy_steps]
    known = [(step, float(value)) for step, value in values if value is not None]
    parts = [known[start : start + every] for start in range(0, len(known), every)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def validation_by_seconds(run: Result) -> list[tuple[float, float]]:
    """The validation losses over the seconds of training: measured side by side, or as the run took them."""
    found = []
    for line in run.evaluations:
        seconds = line.seconds if run.step_seconds is None else line.step * run.step_seconds
        if seconds is not None and line.val_loss is not None and line.step <= run.healthy_steps:
            found.append((seconds, line.val_loss))
    return found


def steps_per_point(group: RunGroup) -> int:
    """Over how many steps a training curve is averaged."""
    return max(1, max((run.step for run in group.results), default=0) // 50)


def later_range(curves: Sequence[Points]) -> tuple[float, float] | None:
    """The range of later losses. It may cut the first tenth of the training and a few high ones."""
    if not curves:
        return None
    start = max(xs[-1] for xs, _ in curves) / 10
    later = sorted(y for xs, ys in curves for x, y in zip(xs, ys, strict=True) if x > start)
    if len(later) < 2:
        return None
    low, high = later[0], later[round(0.97 * (len(later) - 1))]
    low, high = spanned(low, high, LOSS_SHARE)
    margin = 0.06 * (high - low)
    return low - margin, high + margin
