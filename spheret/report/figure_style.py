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
# one pair per scheme of the paper, (on white, on the dark page), in the order of SCHEMES. Found by a search, so that
# protanopes and deuteranopes can tell any two apart as well: tests/report/search_palette.py
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
# the SpheretNorms are a family: their dashes differ too, for print without colour
OWN_DASHES = {"cay-spheretnorm": 1, "p-spheretnorm": 2}
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
    """The colour and dashes of each label, by its scheme, which has the same ones in every figure.

    The schemes that are not the paper's share its colours and have other dashes. So have variants of one scheme: the
    first has the scheme's dashes, the others take the next that are free.
    """
    places = {label: _place(scheme) for label, scheme in schemes.items()}
    taken = set(places.values())
    styles, first = {}, set()
    for label, (colour, dash) in places.items():
        if (colour, dash) in first:
            choices = [(dash + more) % len(DASHES) for more in range(1, len(DASHES))]
            dash = next((each for each in choices if (colour, each) not in taken), dash)
            taken.add((colour, dash))
        first.add((colour, dash))
        styles[label] = PALETTE[colour][0], DASHES[dash]
    return styles


def _place(scheme: str) -> tuple[int, int]:
    """The indices of a scheme in PALETTE and DASHES."""
    order = list(SCHEMES)
    # a scheme of the user's own comes after ours
    index = order.index(scheme) if scheme in order else len(order)
    lap, colour = divmod(index, len(PALETTE))
    return colour, (OWN_DASHES.get(order[colour], 0) + lap) % len(DASHES)


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
