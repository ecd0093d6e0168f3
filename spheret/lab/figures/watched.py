"""The charts and maps of a watched training: its loss, its gradient, and every sublayer over depth and time.

The same observations give the same bytes. Nothing is drawn by matplotlib, because the page is written while a
training waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spheret.lab.figures.lines import MOST_POINTS, later_range
from spheret.lab.figures.svg import Ring, draw_chart, draw_map
from spheret.lab.page.charts import Chart
from spheret.lab.watch_file import Watched
from spheret.support.figure_style import Drawing

# so many events are marked on a curve
MOST_MARKS = 30
# numbers of the palette
COLOURS = {"alarm": 1, "warning": 7}
ENDS = {"low": np.minimum, "high": np.maximum}
# colour and dashes of the last watched step, of one half-way and of the first
STYLES: tuple[tuple[int, list[float]], ...] = ((0, []), (3, [5, 2]), (7, [1.5, 1.5]))


@dataclass(frozen=True)
class Measure:
    """What is measured per sublayer.

    name: in the table. ends: of its axis, if it is a share or a cosine. log: its scale. absent: why it may lack.
    """

    key: str
    name: str
    caption: str
    unit: str = "no unit"
    ends: tuple[float, float] | None = None
    log: bool = False
    absent: str = ""


_STREAM = "the residual stream was not found"
# in the order of the page: what the forward pass shows, then gradients and updates
STREAM = (
    Measure("norm", "norm", "Mean norm of the stream behind each sublayer", log=True, absent=_STREAM),
    Measure("angle_mean", "angle", "Mean angle by which each sublayer turns the stream", "radians", absent=_STREAM),
    Measure(
        "cosine",
        "token cosine",
        "Mean cosine between the states of different tokens. At 1 all are alike",
        ends=(0, 1),
        absent=_STREAM,
    ),
    Measure(
        "common_stream",
        "common in stream",
        "Share of the common direction in the stream",
        ends=(0, 1),
        absent=_STREAM,
    ),
    Measure(
        "common_output",
        "common in output",
        "Share of the common direction in the output of the branch",
        ends=(0, 1),
        absent=_STREAM,
    ),
    Measure("massive", "massive", "Largest activation over the median one", log=True, absent=_STREAM),
    Measure(
        "sink",
        "sink",
        "Mean attention to the first token",
        ends=(0, 1),
        absent="the model returns no attention weights",
    ),
)
UPDATES = (
    Measure("grad_norm", "gradient norm", "Gradient norm of the weights", log=True, absent="there was no gradient"),
    Measure(
        "update", "update", "Norm of the last update over the norm of the weights", log=True, absent="no step yet"
    ),
    Measure(
        "common_gradient",
        "common in gradient",
        "Share of the common direction in the gradient of the matrix that writes to the stream",
        ends=(0, 1),
        absent="no matrix that writes to the stream was found",
    ),
)
# shown in the table alone
OTHERS = (
    Measure("growth", "growth", "", absent=_STREAM),
    Measure("angle_max", "largest angle", "", absent=_STREAM),
    Measure("moved", "moved", "", absent=_STREAM),
    Measure("first_token", "first token", "", absent=_STREAM),
    Measure("alpha", "alpha", "", absent="the connections have no step size"),
)


def curves(watched: Watched) -> dict[str, tuple[str, Chart]]:
    """The captions and numbers of the loss and of the whole gradient norm, by the name of the figure."""
    marks = _marks(watched)
    found = {
        "loss": ("Loss by step, with the alarms and warnings", _curve(*watched.losses, "loss", marks)),
        "gradient": (
            "Norm of the whole gradient at watched steps",
            _curve(*watched.norms, "gradient norm", marks, log=True),
        ),
    }
    return {name: (caption, chart) for name, (caption, chart) in found.items() if chart is not None}


def _marks(watched: Watched) -> list[dict[str, Any]]:
    """The first events, one per step, level and kind, alarms before warnings."""
    seen = {(event.step, event.level, event.kind) for event in watched.events}
    return [{"x": step, "text": kind, "colour": COLOURS[level]} for step, level, kind in sorted(seen)[:MOST_MARKS]]


def _curve(
    steps: np.ndarray, values: np.ndarray, y: str, marks: list[dict[str, Any]], log: bool = False
) -> Chart | None:
    """One line. Many points become the means of a few each, with the range of these: a spike stays visible."""
    if log:
        steps, values = steps[values > 0], values[values > 0]
    if not len(steps):
        return None
    every = -(-len(steps) // MOST_POINTS)
    starts = np.arange(0, len(steps), every)
    places = [int(step) for step in steps[np.append(starts[1:], len(steps)) - 1]]
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(steps))
    line: dict[str, Any] = {"x": 0, "y": _rounded(means)}
    if every > 1:
        line |= {name: _rounded(end.reduceat(values, starts)) for name, end in ENDS.items()}
    limits = None if log else later_range([([float(place) for place in places], means.tolist())])
    # a loss that is not finite has no place, and its alarm stands where the line ends
    inside = [{**mark, "x": min(max(mark["x"], places[0]), places[-1])} for mark in marks]
    series = {"label": y, "colour": 0, "dash": [], "diverged": False, "lines": [line]}
    name = f"{y}, mean and range of {every} steps" if every > 1 else y
    return _chart("step", name, [places], [series], log=log, limits=limits, window=1, marks=inside)


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _chart(
    x: str,
    y: str,
    xs: list[list[int]],
    series: list[dict[str, Any]],
    log: bool,
    limits: Sequence[float] | None,
    window: int,
    marks: Sequence[dict[str, Any]] = (),
) -> Chart:
    return {
        "x": x, "y": y, "log": log, "digits": 3, "window": window, "xs": xs, "series": series,
        "range": limits and [round(limit, 4) for limit in limits], "marks": list(marks),
    }  # fmt: skip


def _depth(watched: Watched, measure: Measure, values: np.ndarray, what: str) -> Chart | None:
    """A measure by sublayer, at the last watched step, at one half-way and at the first."""
    steps = [observation.step for observation in watched.shown]
    chosen = list(dict.fromkeys((len(steps) - 1, len(steps) // 2, 0)))
    xs, series = list[list[int]](), list[dict[str, Any]]()
    for column, (colour, dash) in zip(chosen, STYLES, strict=False):
        column_values = values[:, column]
        keep = np.isfinite(column_values) & ((column_values > 0) | (not measure.log))
        if keep.any():
            lines = [{"x": len(xs), "y": _rounded(column_values[keep])}]
            xs.append([int(place) + 1 for place in np.flatnonzero(keep)])
            label = f"step {steps[column]:,}"
            series.append({"label": label, "colour": colour, "dash": dash, "diverged": False, "lines": lines})
    if not series:
        return None
    limits = _ends(measure, values)
    return _chart(what, f"{measure.name} ({measure.unit})", xs, series, measure.log, limits, window=0)


def _ends(measure: Measure, values: np.ndarray) -> tuple[float, float] | None:
    """The ends of an axis: those of the measure, or from 0 on. A cosine may lie below."""
    if measure.log:
        return None
    low, high = measure.ends or (0.0, 1.05 * max(0.05, float(np.nanmax(values))))
    return min(low, math.floor(10 * float(np.nanmin(values))) / 10), high


def measured(watched: Watched, measures: Sequence[Measure]) -> list[Measure]:
    """Those of the measures that have a number at some watched step."""
    return [each for each in measures if np.isfinite(watched.measures.get(each.key, np.nan)).any()]


def figure_names(watched: Watched, measures: Sequence[Measure]) -> list[str]:
    """Per measure a chart over depth and, with several watched steps, a map over depth and time."""
    suffixes = ("depth", "time") if len(watched.shown) > 1 else ("depth",)
    return [f"{each.key}-{suffix}".replace("_", "-") for each in measured(watched, measures) for suffix in suffixes]


def draw(watched: Watched) -> tuple[list[Drawing], dict[str, Chart]]:
    """Every figure, and the numbers behind those that scripts bring to life, by the name of the figure."""
    drawings, charts = list[Drawing](), dict[str, Chart]()
    for name, (caption, chart) in curves(watched).items():
        drawings.append(draw_chart(name, caption, chart))
        # a single point is no line
        charts |= {name: chart} if len(chart["xs"][0]) > 1 else {}
    what = "sublayer" if watched.header.sublayers else "place, as numbered in the table"
    steps, rings = [observation.step for observation in watched.shown], _rings(watched)
    for measure in measured(watched, (*STREAM, *UPDATES)):
        stem, values = measure.key.replace("_", "-"), watched.measures[measure.key]
        depth = _depth(watched, measure, values, what)
        if depth is not None:
            drawings.append(draw_chart(f"{stem}-depth", measure.caption, depth))
            charts |= {f"{stem}-depth": depth} if max(map(len, depth["xs"])) > 1 else {}
        if len(steps) > 1:
            names = "step (one column per watched step)", f"{what.split(',')[0]}; {measure.name}"
            ends = _ends(measure, values)
            drawings.append(
                draw_map(
                    f"{stem}-time", f"{measure.caption}, over time", values, steps, *names, ends, measure.log, rings
                )
            )
    return drawings, charts


def _rings(watched: Watched) -> list[Ring]:
    """Where events that name a sublayer lie on a map."""
    rows = {each.sublayer: row for row, each in enumerate(watched.header.sublayers)}
    steps = [observation.step for observation in watched.shown]
    found = []
    for event in watched.events[:MOST_MARKS]:
        if event.sublayer in rows and steps:
            column = next((index for index, step in enumerate(steps) if step >= event.step), len(steps) - 1)
            found.append(Ring(rows[event.sublayer], column, COLOURS[event.level]))
    return list(dict.fromkeys(found))
