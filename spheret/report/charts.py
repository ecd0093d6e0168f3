"""The numbers behind the interactive figures: plain data that the page holds as JSON.

A loss has the digits of the tables, so what a reader finds on a curve is what a table shows. The same runs give the
same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spheret.report.figure_style import line_styles
from spheret.report.results import Result, RunGroup
from spheret.report.statistics import mean_and_deviation
from spheret.runs.metrics import MetricsRecord
from spheret.support.figure_style import PALETTE

# x, y: the names of the axes. xs: every list of places, each once. series: one per contestant, with its lines.
# range: of y at first. window: over how many points a line is averaged at first. digits: of y. log: the scale of y.
Chart = dict[str, Any]
Points = tuple[list[float], list[float]]

# no screen shows more points of one line
MOST_POINTS = 600
LOSS = "loss (nats per token)"


def charts(group: RunGroup) -> dict[str, Chart]:
    """The charts that the runs have numbers for, by the name of the figure that each brings to life."""
    steps = max((result.step for result in group.results), default=0)
    # the static figures average over as many
    window = max(1, steps // 50)
    every = max(1, -(-steps // MOST_POINTS))
    of_steps = f", each point the mean of {every} steps" if every > 1 else ""
    found = {
        "validation": _chart(group, _losses(lambda run, line: line.step), "step", f"validation {LOSS}"),
        "training": _chart(
            group, _means("loss", every), "step", f"training {LOSS}{of_steps}", window=-(-window // every)
        ),
        "time": _chart(
            group,
            _losses(_measured_seconds if group.side_by_side else _own_seconds),
            "seconds of training" if group.side_by_side else "seconds of training, as each run took them",
            f"validation {LOSS}",
        ),
        "gradients": _chart(
            group, _means("grad_norm", every), "step", f"gradient norm{of_steps}", -(-window // every), log=True
        ),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def _measured_seconds(run: Result, line: MetricsRecord) -> float | None:
    return None if run.step_cost is None else line.step * run.step_cost.seconds


def _own_seconds(run: Result, line: MetricsRecord) -> float | None:
    return line.seconds


def _healthy(run: Result, lines: Iterable[MetricsRecord]) -> list[MetricsRecord]:
    """The lines up to the step at which the run diverged: what comes after is on no common scale."""
    return [line for line in lines if run.diverged is None or line.step <= run.diverged[0]]


def _losses(x: Callable[[Result, MetricsRecord], float | None]) -> Callable[[Result], Points]:
    """The validation losses of a run over x."""

    def points(run: Result) -> Points:
        known = [
            (at, line.val_loss)
            for line in _healthy(run, run.evaluations)
            if line.val_loss is not None and (at := x(run, line)) is not None
        ]
        stride = max(1, -(-len(known) // MOST_POINTS))
        # counted from the end, so that the last one stays
        kept = known[::-1][::stride][::-1]
        return [_significant(at, 5) for at, _ in kept], [loss for _, loss in kept]

    return points


def _means(key: str, every: int) -> Callable[[Result], Points]:
    """The means of a key over so many steps each, at the last step of each."""

    def points(run: Result) -> Points:
        lines = [line for line in _healthy(run, run.steps) if getattr(line, key) is not None]
        parts = [lines[start : start + every] for start in range(0, len(lines), every)]
        means = [mean_and_deviation([float(getattr(line, key)) for line in part])[0] for part in parts]
        return [part[-1].step for part in parts], means

    return points


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _chart(
    group: RunGroup, points: Callable[[Result], Points], x: str, y: str, window: int = 1, log: bool = False
) -> Chart | None:
    """One series per contestant, the lowest loss first: the mean over its seeds with their range, or each seed."""

    def rounded(values: Iterable[float]) -> list[float]:
        return [_significant(value, 3) if log else round(value, 3) for value in values]

    colours = {light: index for index, (light, _) in enumerate(PALETTE)}
    xs: list[list[float]] = []
    series: list[dict[str, Any]] = []
    curves: list[Points] = []
    for label, (colour, dash) in line_styles(group).items():
        runs = [(run, points(run)) for run in group.contestants[label]]
        runs = [(run, own) for run, own in runs if own[0]]
        if not runs:
            continue
        lines: list[dict[str, Any]] = []
        places = [own[0] for _, own in runs]
        if len(runs) > 1 and all(place == places[0] for place in places):
            columns = list(zip(*(own[1] for _, own in runs), strict=True))
            means = [mean_and_deviation(column)[0] for column in columns]
            ends = {"low": rounded(map(min, columns)), "high": rounded(map(max, columns))}
            lines.append({"x": _index(xs, places[0]), "y": rounded(means), **ends})
        else:
            lines += [{"x": _index(xs, place), "y": rounded(values)} for _, (place, values) in runs]
        curves += [own for run, own in runs if run.diverged is None]
        style = {"colour": colours[colour], "dash": [] if dash == "-" else list(dash[1])}
        diverged = any(run.diverged is not None for run, _ in runs)
        series.append({"label": label, **style, "diverged": diverged, "lines": lines})
    if not series or max(map(len, xs)) < 2:
        return None
    return {
        "x": x, "y": y, "log": log, "digits": 3, "window": window, "xs": xs, "series": series,
        "range": None if log else _range(curves),
    }  # fmt: skip


def _index(xs: list[list[float]], places: list[float]) -> int:
    """The number of a list among those that are kept, which is added if it is new."""
    if places not in xs:
        xs.append(places)
    return xs.index(places)


def _range(curves: Sequence[Points]) -> list[float] | None:
    """The range of later losses. It may cut the first tenth of the training and a few high ones."""
    if not curves:
        return None
    start = max(xs[-1] for xs, _ in curves) / 10
    later = sorted(y for xs, ys in curves for x, y in zip(xs, ys, strict=True) if x > start)
    if len(later) < 2:
        return None
    low, high = later[0], later[round(0.97 * (len(later) - 1))]
    margin = 0.06 * max(high - low, 0.01)
    return [round(low - margin, 4), round(high + margin, 4)]
