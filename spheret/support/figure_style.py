"""The look of every figure: colours, dashes and fonts, no dates, labels shown as plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from spheret.support.pgf import to_pgf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ink and grid on white; a dark page replaces them and the palette by its own colours
INK, GRID = "#222222", "#d0d0d0"
# of notes, which stand back behind titles and labels
MUTED = "#5c5c5c"
# one pair per scheme of the paper, (on white, on the dark page), in the order of SCHEMES. Protanopes
# and deuteranopes can distinguish any two as well: tests/lab/test_palette.py
PALETTE = (
    ("#023da9", "#8bb8ff"), ("#872e1d", "#ffb4ad"), ("#899a65", "#ece45a"), ("#1d9ba9", "#89e9e6"),
    ("#734064", "#b080ab"), ("#017958", "#0a8d6f"), ("#f73397", "#fd3170"), ("#a56100", "#f57403"),
    ("#8a67fb", "#7f6bfe"),
)  # fmt: skip
# what a figure fills the cell of a failed run with: colours on which white letters can be read
COLLAPSED, DIVERGED = PALETTE[7][0], PALETTE[1][0]
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (10, 3)), (0, (6, 2, 1.5, 2, 1.5, 2)),
)  # fmt: skip
STYLE: Any = {
    "svg.hashsalt": "spheret",
    "svg.fonttype": "none",
    # a label from a run is plain text, even if it contains a dollar sign
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.dpi": 100,
}


@contextmanager
def own_style() -> Iterator[None]:
    """Figures of our look, whatever the user's matplotlibrc says. One in the current directory could start LaTeX."""
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        yield


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG and PNG, and as PGF for LaTeX, with its name and caption.

    A figure with an image has no PGF. One that was not drawn by matplotlib has no PNG either: its bytes are empty.
    """

    name: str
    caption: str
    svg: str
    png: bytes
    pgf: str | None = None


def render(name: str, caption: str, figure: Figure, pgf: bool = False) -> Drawing:
    """The figure in all formats. pgf: whether it is written in PGF too."""
    svg, png = io.StringIO(), io.BytesIO()
    # no date and no version: the same runs give the same bytes
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": caption})
    # the layout takes most of the time, so it is computed once
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    text = svg.getvalue()
    return Drawing(name, caption, text[text.index("<svg") :], png.getvalue(), to_pgf(figure) if pgf else None)


def axes_grid(
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (6.4, 4.8),
    layout: Literal["constrained"] | None = "constrained",
    **shared: Any,
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


# a function with a name: figures are drawn by other processes, and a lambda cannot be sent there
def _plain(value: float, _: int | None) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")


def plain_log(axis: Any) -> None:
    """Put ticks at 1, 2 and 5 of each decade, in plain digits: powers need math text, which is off for labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(map(abs, axis.get_view_interval()))
    # over many decades the powers of ten are enough
    wide = low <= 0 or high / low > 1e4
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())
