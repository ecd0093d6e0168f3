"""Figures of the stream's dynamics, and the panels that figures of certificates have too.

Every panel has a title in plain words, and below it one sentence that says what to look for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spheret.analysis.line_styles import scheme_styles
from spheret.support.figure_style import (
    LEGEND_ROW,
    MUTED,
    SMALL,
    TITLE,
    axes_grid,
    legend_below,
    legend_columns,
    own_style,
    png,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# letters of a sentence that are as wide as a panel
_LETTERS = 66
# inches of a plot and of what is around it
PLOT_WIDTH, _LEFT, _BETWEEN, _RIGHT = 3.9, 0.85, 1.05, 0.2

Series = tuple[Sequence[float], Sequence[float | None]]


@dataclass(frozen=True)
class Panel:
    """One quantity: its title, its axes, what to look for, and one line per name.

    x are whole numbers: sublayers, layers or steps. `doubling`: doubling is one step of the horizontal axis.
    """

    title: str
    x: str
    y: str
    look_for: str
    series: Mapping[str, Series]
    log: bool = False
    doubling: bool = False


def grid_columns(count: int) -> int:
    """So many panels stand in up to three columns; four are a square."""
    return 2 if count == 4 else min(3, count)


def grid_width(count: int) -> float:
    """Inches of a grid of so many panels."""
    columns = grid_columns(count)
    return _LEFT + columns * PLOT_WIDTH + (columns - 1) * _BETWEEN + _RIGHT


def panel_grid(count: int, title: str, foot_rows: int = 0, head_rows: int = 0) -> tuple[Figure, list[Axes]]:
    """Axes for so many panels. foot_rows: rows of a legend below all. head_rows: rows of a legend above each."""
    columns = grid_columns(count)
    rows = -(-count // columns)
    # a layout that measures all texts takes as long as the drawing
    plot_height, above, below = 2.4, 0.45 + LEGEND_ROW * head_rows, 0.98
    head, foot = 0.15 + 0.25 * len(title.split("\n")), 0.08 + 0.2 * foot_rows
    width = grid_width(count)
    height = head + rows * (above + plot_height + below) + foot
    figure, grid = axes_grid(rows, columns, size=(width, height), layout=None)
    figure.subplots_adjust(
        left=_LEFT / width, right=1 - _RIGHT / width, wspace=_BETWEEN / PLOT_WIDTH,
        hspace=(above + below) / plot_height, top=1 - (head + above) / height, bottom=(below + foot) / height,
    )  # fmt: skip
    figure.suptitle(title, x=0.15 / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=TITLE, weight="bold")
    axes = list(grid.flat)
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float | None], label: str | None, **style: Any) -> None:
    """Draw a line, with a gap wherever y is None."""
    style = {"marker": "o", "markersize": 3.5, **style}
    axes.plot(x, [float("nan") if value is None else value for value in y], label=label, **style)


def describe(axes: Axes, title: str, x: str, y: str, look_for: str) -> None:
    """The title, the names of the axes, and the sentence below the panel."""
    axes.set_title("\n".join(textwrap.wrap(title, 46)), loc="left", weight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.annotate(
        "\n".join(textwrap.wrap(f"Look for: {look_for}", _LETTERS)), (0, 0), (-30, -36), xycoords="axes fraction",
        textcoords="offset points", va="top", fontsize=SMALL, color=MUTED, annotation_clip=False,
    )  # fmt: skip


def count_ticks(axes: Axes) -> None:
    """Whole numbers, evenly spaced: there is no half sublayer."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    lines: Sequence[Any] = axes.lines
    if min(place for line in lines for place in line.get_xdata()) >= 1:
        # there is no sublayer 0
        axes.set_xlim(left=max(axes.get_xlim()[0], 0.5))


def doubling_ticks(axes: Axes, places: Sequence[float]) -> None:
    """A tick at every place, in plain digits, on an axis on which doubling is one step."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(places))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def log_scale(axes: Axes) -> None:
    """A logarithmic vertical axis, if there is something to show on it."""
    lines: Sequence[Any] = axes.lines
    if any(value > 0 for line in lines for value in line.get_ydata()):
        axes.set_yscale("log")


def lines(title: str, panels: Sequence[Panel], schemes: Mapping[str, str]) -> bytes:
    """One panel per quantity, with one line per name. Panels without a number are left out.

    schemes: the scheme of every name, which gives the line its colour.
    """
    with own_style():
        return png(lines_figure(title, panels, schemes))


def lines_figure(title: str, panels: Sequence[Panel], schemes: Mapping[str, str]) -> Figure:
    """The figure of `lines`, in the style that is set."""
    shown = [panel for panel in panels if any(value is not None for _, y in panel.series.values() for value in y)]
    styles = scheme_styles(schemes)
    columns = legend_columns(list(schemes), grid_width(len(shown)))
    figure, grid = panel_grid(len(shown), title, -(-len(schemes) // columns) if len(schemes) > 1 else 0)
    for axes, panel in zip(grid, shown, strict=True):
        for name, (x, y) in panel.series.items():
            colour, dash = styles[name]
            draw_line(axes, x, y, name, color=colour, linestyle=dash)
        describe(axes, panel.title, panel.x, panel.y, panel.look_for)
        if panel.doubling:
            doubling_ticks(axes, [place for x, _ in panel.series.values() for place in x])
        else:
            count_ticks(axes)
        if panel.log:
            log_scale(axes)
    if len(schemes) > 1:
        handles, labels = grid[0].get_legend_handles_labels()
        legend_below(figure, handles, labels)
    return figure
