"""The look of every figure: one colour per scheme, no dates, labels shown as plain text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spheret.connections import SCHEMES
from spheret.report.results import RunGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ink and grid on white; a dark page replaces them and the palette by its own colours
INK, GRID = "#222222", "#d0d0d0"
# found by search: protanopes and deuteranopes can tell any two apart as well; (on white, on black)
PALETTE = (
    ("#112255", "#9988ff"), ("#dd88aa", "#cc7788"), ("#00bb66", "#44ff77"), ("#55aaff", "#88ccff"),
    ("#551111", "#dd0033"), ("#aaaa00", "#ffff00"), ("#bb0000", "#ff8811"), ("#cc22aa", "#cc0099"),
    ("#221199", "#9911ff"), ("#006655", "#77ffdd"),
)  # fmt: skip
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
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


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG and PNG, with its name and caption."""

    name: str
    caption: str
    svg: str
    png: bytes


def line_styles(group: RunGroup) -> dict[str, tuple[str, Any]]:
    """The colour and dashes of each contestant."""
    return scheme_styles({label: results[0].scheme for label, results in group.contestants.items()})


def scheme_styles(schemes: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """The colour and dashes of each label, by its scheme, which has the same colour in every figure."""
    order, styles = list(SCHEMES), {}
    uses: dict[int, int] = {}
    for label, scheme in schemes.items():
        index = order.index(scheme) if scheme in order else len(order)
        colour = index % len(PALETTE)
        # schemes that share a colour, and variants of one scheme, differ in their dashes
        styles[label] = PALETTE[colour][0], DASHES[uses.get(colour, 0) % len(DASHES)]
        uses[colour] = uses.get(colour, 0) + 1
    return styles


def render(name: str, caption: str, figure: Figure) -> Drawing:
    svg, png = io.StringIO(), io.BytesIO()
    # no date and no version: the same runs give the same bytes
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": caption})
    # the layout takes most of the time, so it is computed once
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    text = svg.getvalue()
    return Drawing(name, caption, text[text.index("<svg") :], png.getvalue())


def axes_grid(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.8), **shared: Any
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


# a function with a name: figures are drawn by other processes, and a lambda cannot be sent there
def _plain(value: float, _: int | None) -> str:
    return f"{value:g}"


def plain_log(axis: Any) -> None:
    """Put ticks at 1, 2 and 5 of each decade, in plain digits: powers need math text, which is off for labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())
