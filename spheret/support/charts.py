"""A chart is data: lines, points with intervals, panels. `draw` makes files of it; pages draw it with uPlot."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spheret.support.figure_style import (
    GRID,
    INK,
    NAMES,
    PALETTE,
    SMALL,
    TEXT,
    TITLE,
    WIDTH,
    Drawing,
    axes_grid,
    legend_below,
    own_style,
    render,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour and dashes
Style = tuple[str, Any]
# letters that are as wide as a small panel, as a large one, and as the name of a row
LETTERS, WIDE_LETTERS, ROW_LETTERS = 30, 60, 40


@dataclass(frozen=True)
class Line:
    """Points of one name.

    low, high: the ends of an interval at each point. mark: a marker of matplotlib for the points, or "ring". joined:
    whether a line joins them. faint: whether they stand back. failed: whether a cross marks the last one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    mark: str = ""
    joined: bool = True
    faint: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the horizontal axis. colour: a number of the palette."""

    x: float
    text: str
    colour: int


@dataclass(frozen=True)
class Panel:
    """Lines with their axes. x, y: the names of the axes.

    limits: of the vertical axis. ticks: the names of places on the horizontal axis. rows: whether these places stand
    below each other, and the values run from left to right. level: a value that a thin line shows, and its name.
    failures: places with their markers, at the upper edge.
    """

    lines: Sequence[Line]
    x: str
    y: str
    title: str = ""
    log: bool = False
    log_x: bool = False
    limits: tuple[float, float] | None = None
    ticks: Mapping[float, str] = field(default_factory=dict)
    rows: bool = False
    level: tuple[float, str] | None = None
    marks: Sequence[Mark] = ()
    failures: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Chart:
    """Panels under one name and caption.

    shared: whether the panels have the same axes, and show each other's first lines in grey. window: over how many
    points a line is averaged at first; 0 if its points do not follow each other in time.
    """

    name: str
    caption: str
    panels: Sequence[Panel]
    title: str = ""
    shared: bool = False
    window: int = 0


def draw(chart: Chart, with_png: bool = True) -> Drawing:
    """The chart as files. The same chart gives the same bytes."""
    with own_style():
        return render(chart.name, chart.caption, figure(chart), with_png)


def figure(chart: Chart) -> Figure:
    """The chart as a figure of matplotlib, in the style that is set."""
    panels, count = chart.panels, len(chart.panels)
    columns = 2 if count == 4 and not chart.shared else min(3, count)
    rows = -(-count // columns)
    drawn, grid = axes_grid(rows, columns, _size(chart, rows, columns), sharex=chart.shared, sharey=chart.shared)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.remove()
    for axes, panel in zip(every, panels, strict=False):
        if chart.shared:
            for other in panels:
                if other is not panel and other.lines:
                    axes.plot(other.lines[0].x, other.lines[0].y, color=GRID, lw=0.9, zorder=1)
        _draw_panel(axes, panel, chart.window)
        if chart.shared:
            axes.set_title(_wrapped(panel.title, LETTERS), loc="left", fontsize=SMALL)
            axes.tick_params(labelsize=SMALL)
        else:
            axes.set_title(_wrapped(panel.title, WIDE_LETTERS), loc="left", weight="bold")
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
    if chart.shared:
        # the last panel of a column has the labels of its axis
        for axes in every[max(0, count - columns) : count]:
            axes.tick_params(labelbottom=True)
        drawn.supxlabel(panels[0].x, fontsize=TEXT)
        drawn.supylabel(panels[0].y, fontsize=TEXT)
    elif not panels[0].rows:
        _legend(drawn, every[:count])
    if chart.title:
        drawn.suptitle(chart.title, fontsize=TITLE, weight="bold")
    return drawn


def _size(chart: Chart, rows: int, columns: int) -> tuple[float, float]:
    first = chart.panels[0]
    if first.rows:
        # every row has room for the longest name
        longest = max(1 + _row(name).count("\n") for name in first.ticks.values())
        return WIDTH, 1.0 + len(first.ticks) * (0.17 + 0.14 * longest)
    if chart.shared:
        title = max(_wrapped(panel.title, LETTERS).count("\n") for panel in chart.panels)
        return max(3.2, WIDTH * columns / 3), 0.7 + (1.75 + 0.12 * title) * rows
    return WIDTH, 4.8 if columns == 1 else 3.5 * rows


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def _row(name: str) -> str:
    return _wrapped(name, ROW_LETTERS)


def _draw_panel(axes: Axes, panel: Panel, window: int) -> None:
    # the first line is the most important one: it is drawn last, above the others
    for place, line in enumerate(panel.lines):
        _draw_line(axes, line, panel.rows, max(1, window), 3 - place / len(panel.lines))
    if panel.level is not None:
        value, name = panel.level
        (axes.axvline if panel.rows else axes.axhline)(value, color=INK, lw=0.9, ls=(0, (4, 3)), zorder=1)
        if name and not panel.rows:
            at: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(name, (0.99, value), (0, -8), ha="right", va="top", fontsize=NAMES, **at)
    for mark in panel.marks:
        axes.axvline(mark.x, color=PALETTE[mark.colour][0], lw=1, ls=(0, (4, 2)))
        top = axes.get_xaxis_transform()
        axes.text(mark.x, 0.99, mark.text, transform=top, rotation=90, ha="right", va="top", fontsize=SMALL)
    for x, marker in panel.failures:
        colour, height = panel.lines[0].style[0], 0.93 if marker == "v" else 0.82
        axes.plot(x, height, marker, color=colour, transform=axes.get_xaxis_transform(), ms=6, mew=1.8, zorder=5)
    _scale(axes, panel)


def _draw_line(axes: Axes, line: Line, swapped: bool, window: int, order: float) -> None:
    colour, dash = line.style
    x, y, low, high = line.x, *(_smoothed(values, window) for values in (line.y, line.low, line.high))
    look: dict[str, Any] = {"color": colour, "ls": dash if line.joined else "none", "marker": line.mark, "ms": 4}
    if line.mark == "ring":
        look |= {"marker": "o", "mfc": "none", "ms": 10, "mew": 1.6}
    elif not line.joined and low:
        look |= {"ms": 7.5}
    name = f"{line.label} (x: diverged)" if line.failed else line.label
    # a name that begins with _ is not shown
    look |= {"alpha": 0.35 if line.faint else 1, "zorder": order, "label": name or "_"}
    axes.plot(*((y, x) if swapped else (x, y)), **look)
    if low and line.joined:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    elif low:
        (axes.hlines if swapped else axes.vlines)(x, low, high, color=colour, lw=2.4, zorder=order)
    if line.failed:
        axes.plot(x[-1:], y[-1:], "x", color=colour, ms=9, mew=2.5, zorder=5)


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last points of a window, or of all that there are so far."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _scale(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

    if panel.log and any(value > 0 for line in panel.lines for value in line.y):
        axes.set_yscale("log")
    if panel.limits is not None:
        (axes.set_xlim if panel.rows else axes.set_ylim)(*panel.limits)
    places = list(panel.ticks)
    if panel.rows:
        axes.set_yticks(places, [_row(name) for name in panel.ticks.values()], fontsize=NAMES)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        return
    if panel.log_x:
        axes.set_xscale("log")
    if places:
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_major_formatter(FixedFormatter(list(panel.ticks.values())))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.x.startswith("sublayer"):
        # there is no half sublayer
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend(drawn: Figure, every: Sequence[Axes]) -> None:
    found = [pair for axes in every for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(found)}
    labels = list(dict.fromkeys(label for _, label in found))
    if len(labels) > 1:
        legend_below(drawn, [handles[label] for label in labels], labels)
