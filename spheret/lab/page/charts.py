"""The numbers behind the interactive figures: plain data that the page holds as JSON.

A loss has the digits of the tables, so what a reader finds on a curve is what a table shows. The same runs give the
same data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from spheret.lab.answers import GroupAnswer
from spheret.lab.figures.lines import (
    MOST_POINTS,
    Points,
    Series,
    averages,
    later_range,
    run_series,
    steps_per_point,
    validation_by_seconds,
    validation_series,
)
from spheret.lab.figures.parts import slug
from spheret.lab.runs import RunGroup
from spheret.support.figure_style import PALETTE

# x, y: the names of the axes. xs: every list of places, each once. series: one per contestant, with its lines.
# range: of y at first. window: over how many points a line is averaged at first, 0 if that makes no sense. digits: of
# y. log: the scale of y. marks: names of what happened at some x, each with a number of the palette; may be left out.
Chart = dict[str, Any]

LOSS = "loss (nats per token)"


def answer_charts(answers: Sequence[GroupAnswer]) -> dict[str, Chart]:
    """The curves of every group, by the name of the figure that each brings to life."""
    charts = {
        f"{slug(answer.group.name)}-curves": _chart(validation_series(answer), "step", f"validation {LOSS}")
        for answer in answers
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def run_charts(group: RunGroup) -> dict[str, Chart]:
    """The charts that need the metrics of the runs, by the name of the figure that each brings to life."""
    # the static figures average over as many
    window = steps_per_point(group)
    every = max(1, -(-max((run.step for run in group.results), default=0) // MOST_POINTS))
    of_steps = f", each point the mean of {every} steps" if every > 1 else ""
    losses = run_series(group, lambda run: averages(run, "loss", every))
    norms = run_series(group, lambda run: averages(run, "grad_norm", every))
    seconds = "seconds of training" + ("" if group.side_by_side else ", as each run took them")
    charts = {
        "training": _chart(losses, "step", f"training {LOSS}{of_steps}", -(-window // every)),
        "time": _chart(run_series(group, validation_by_seconds), seconds, f"validation {LOSS}"),
        "gradients": _chart(norms, "step", f"gradient norm{of_steps}", -(-window // every), log=True),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _chart(every: Sequence[Series], x: str, y: str, window: int = 1, log: bool = False) -> Chart | None:
    """One series per contestant, the lowest loss first: the mean over its seeds with their range, or each seed."""

    def rounded(values: Iterable[float]) -> list[float]:
        return [_significant(value, 3) if log else round(value, 3) for value in values]

    colours = {light: index for index, (light, _) in enumerate(PALETTE)}
    xs: list[list[float]] = []
    shown: list[dict[str, Any]] = []
    healthy: list[Points] = []
    for series in every:
        columns, lines = series.columns, list[dict[str, Any]]()
        if columns is not None:
            means = [math.fsum(column) / len(column) for column in columns]
            ends = {"low": rounded(map(min, columns)), "high": rounded(map(max, columns))}
            lines.append({"x": _index(xs, series.curves[0][0][0]), "y": rounded(means), **ends})
        else:
            lines += [{"x": _index(xs, places), "y": rounded(values)} for (places, values), _ in series.curves]
        healthy += [points for points, diverged in series.curves if not diverged]
        colour, dash = series.style
        style = {"colour": colours[colour], "dash": [] if dash == "-" else list(dash[1])}
        shown.append({"label": series.label, **style, "diverged": series.diverged, "lines": lines})
    if not shown or max(map(len, xs)) < 2:
        return None
    limits = None if log else later_range(healthy)
    return {
        "x": x, "y": y, "log": log, "digits": 3, "window": window, "xs": xs, "series": shown,
        "range": limits and [round(limit, 4) for limit in limits],
    }  # fmt: skip


def _index(xs: list[list[float]], places: list[float]) -> int:
    """The number of a list among those that are kept, which is added if it is new."""
    places = [_significant(place, 5) for place in places]
    if places not in xs:
        xs.append(places)
    return xs.index(places)
