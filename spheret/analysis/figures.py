"""Figures of the stream's dynamics, and the panels that figures of certificates have too.

Every panel has a title in plain words, and below it one sentence that says what to look for.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spheret.analysis.line_styles import scheme_styles
from spheret.support.figure_style import MUTED, axes_grid, own_style, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# letters of a sentence that are as wide as a panel
_WIDTH = 62

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


def panel_grid(count: int, title: str, legend_rows: int = 0) -> tuple[Figure, list[Axes]]:
    """Axes for so many panels, in up to three columns; four are a square. Below them is room for a legend."""
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    # inches of a plot and of what is around it. A layout that measures all texts takes as long as the drawing
    plot_width, plot_height, left, between, above, below = 3.9, 2.4, 0.85, 1.05, 0.45, 0.98
    head, foot = 0.15 + 0.25 * len(title.split("\n")), 0.08 + 0.2 * legend_rows
    width = left + columns * plot_width + (columns - 1) * between + 0.2
    height = head + rows * (above + plot_height + below) + foot
    figure, grid = axes_grid(rows, columns, size=(width, height), layout=None)
    figure.subplots_adjust(
        left=left / width, right=1 - 0.2 / width, wspace=between / plot_width, hspace=(above + below) / plot_height,
        top=1 - (head + above) / height, bottom=(below + foot) / height,
    )  # fmt: skip
    figure.suptitle(title, x=0.15 / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, weight="bold")
    axes = list(grid.flat)
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def png(figure: Figure) -> bytes:
    """The bytes of a figure, the same for the same figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float | None], label: str | None, **style: Any) -> None:
    """Draw a line, with a gap wherever y is None."""
    style = {"marker": "o", "markersize": 3.5, **style}
    axes.plot(x, [float("nan") if value is None else value for value in y], label=label, **style)


def describe(axes: Axes, title: str, x: str, y: str, look_for: str) -> None:
    """The title, the names of the axes, and the sentence below the panel."""
    axes.set_title("\n".join(textwrap.wrap(title, 42)), loc="left", fontsize=11, weight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.annotate(
        "\n".join(textwrap.wrap(f"Look for: {look_for}", _WIDTH)), (0, 0), (-30, -36), xycoords="axes fraction",
        textcoords="offset points", va="top", fontsize=8.5, color=MUTED, annotation_clip=False,
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
        plain_log(axes.yaxis)


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
    columns = min(6, max(1, 120 // (6 + max(map(len, schemes)))))
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
        figure.legend(handles, labels, loc="lower left", ncols=columns, handlelength=2.6)
    return figure
