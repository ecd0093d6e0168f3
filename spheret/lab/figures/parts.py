"""What the figures of a study share: their names, labels and panels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from spheret.support.figure_style import SMALL, WIDTH, axes_grid, plain_tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a reader can distinguish so many contestants in one figure
MOST = 20
COLUMNS = 3
# of a title that is as wide as a panel
PANEL_LETTERS = 30
LOSS = "validation loss (nats per token)"


def slug(name: str) -> str:
    """The name of a group or part as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def capped(caption: str, shown: Sequence[Any], most: int = MOST) -> str:
    return f"{caption}. The first {most} of {len(shown)}" if len(shown) > most else caption


def wrapped(label: str, width: int) -> str:
    return "\n".join(textwrap.wrap(label, width, break_long_words=False, break_on_hyphens=False))


def rows_height(count: int, texts: Iterable[str]) -> float:
    """Inches that so many rows need, each of which has room for the longest of these wrapped texts."""
    return count * (0.17 + 0.14 * max(text.count("\n") + 1 for text in texts))


def one_plot(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one plot."""
    figure, grid = axes_grid(size=(width, height))
    # a label may be a little wider in a PNG than in an SVG
    figure.set_layout_engine("constrained", w_pad=0.1)
    return figure, grid[0, 0]


def small_multiples(count: int, height: float = 1.75) -> tuple[Figure, list[Axes]]:
    """Small multiples with common axes."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    size = (max(3.2, WIDTH * columns / COLUMNS), 0.7 + height * rows)
    figure, grid = axes_grid(rows, columns, size=size, sharex=True, sharey=True)
    axes = list(grid.flat)
    for each in axes[count:]:
        each.set_visible(False)
    # the last panel of a column has the labels of its axis
    for each in axes[max(0, count - columns) : count]:
        each.tick_params(labelbottom=True)
    return figure, axes[:count]


def panel_title(axes: Axes, label: str) -> None:
    axes.set_title(wrapped(label, PANEL_LETTERS), loc="left", fontsize=SMALL)


def rate_axis(panels: Sequence[Axes], rates: Sequence[float]) -> None:
    """A logarithmic axis of learning rates for panels that share it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes = panels[0]
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.2, rates[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({rates[0], rates[len(rates) // 2], rates[-1]})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_tick(float(f"{value:.2g}"))))
    for each in panels:
        each.tick_params(labelsize=SMALL)
