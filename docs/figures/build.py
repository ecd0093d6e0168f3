"""Draw docs/figures/connection.svg and .png: how a spherical stream is computed, and what one update does to it.

    python docs/figures/build.py

The angles are those of the library's retractions. The SVG follows the reader's light or dark setting. The PNG is
light.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spheret.connections import SCHEMES
from spheret.retractions import RETRACTIONS, angular
from spheret.support.charts import (
    GRID,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    TEXT,
    THEMES,
    Drawing,
    axes_grid,
    own_style,
    render,
    scheme_styles,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
NAME, CAPTION = "connection", "A spherical stream: how an update is computed, and what it does to the stream"
CARD = "#f4f6f9"
# (on white, on dark)
COLOURS = (*THEMES.values(), (CARD, "#1f242b"))
# inches: as wide as the column of the site, which would make the letters of a wider figure smaller
WIDE, LETTERS = 7.66, 8.5
# the step of the picture; every retraction turns by another angle
BETA = 1.2
TURNS = {
    "p-spheretnorm": ("p = 1/2", angular(0.5)),
    "proj-spheretnorm": ("projection", RETRACTIONS["projection"]),
    "cay-spheretnorm": ("Cayley", RETRACTIONS["cayley"]),
    "geonorm": ("exponential", RETRACTIONS["exponential"]),
}


def angles() -> dict[str, float]:
    """The angle of a step of BETA for each scheme of the picture."""
    step = torch.tensor(BETA, dtype=torch.float64)
    return {scheme: float(row.angle(step)) for scheme, (_, row) in TURNS.items()}


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, **more: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = {"facecolor": PAPER, "edgecolor": INK, "linewidth": 1.1, **more}
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.12", **style))
    axes.text(x, y, text, ha="center", va="center", fontsize=LETTERS, linespacing=1.3)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.3, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11, **more}
    axes.annotate("", end, start, arrowprops=style)


def _pipeline(axes: Axes) -> None:
    """From the tokens at the bottom to the next token at the top."""
    from matplotlib.patches import FancyBboxPatch

    stream, branch = 1.55, 4.4
    axes.set(xlim=(-0.05, 6.45), ylim=(-0.25, 7.5), aspect="equal", anchor="NW")
    axes.axis("off")
    frame = FancyBboxPatch((0.35, 2.0), 5.95, 4.25, boxstyle="round,pad=0,rounding_size=0.2", facecolor=CARD)
    frame.set(edgecolor=GRID, linewidth=1)
    axes.add_patch(frame)
    axes.text(6.3, 6.35, "one sublayer, two per layer", ha="right", va="bottom", fontsize=LETTERS, color=MUTED)
    _box(axes, stream, 0.1, 3.0, 0.55, "token embedding")
    _box(axes, stream, 1.2, 3.0, 0.75, "ScaleNorm\n|h| = r for every token")
    _box(axes, branch, 3.05, 3.3, 0.75, "branch\nf = attention(h) or MLP(h)")
    _box(axes, branch, 4.3, 3.3, 0.75, "drop the part along h\nz = f \u2212 c h")
    turn = PALETTE[6][0]
    _box(axes, 3.325, 5.55, 5.65, 0.85, "retraction: turn h towards z by the angle \u03b8(\u03b2)\n"
         "\u03b2 = \u03b1 |z| / |h|,   the length |h| stays", edgecolor=turn, linewidth=1.8)  # fmt: skip
    _box(axes, stream, 7.05, 3.0, 0.75, "final norm and head\nnext token")
    _arrow(axes, (stream, 0.375), (stream, 0.825))
    _arrow(axes, (stream, 1.575), (stream, 5.125), lw=2)
    _arrow(axes, (stream, 5.975), (stream, 6.675), lw=2)
    axes.text(stream - 0.16, 2.35, "h", ha="right", va="center", fontsize=12, style="italic")
    axes.plot([stream, branch], [2.35, 2.35], color=INK, lw=1.3, solid_capstyle="butt")
    _arrow(axes, (branch, 2.35), (branch, 2.675))
    _arrow(axes, (stream, 4.3), (branch - 1.65, 4.3), linestyle=(0, (3, 2)))
    _arrow(axes, (branch, 3.425), (branch, 3.925))
    _arrow(axes, (branch, 4.675), (branch, 5.125))
    axes.text(branch + 0.14, 3.675, "f", va="center", fontsize=11, style="italic")
    axes.text(branch + 0.14, 4.9, "z", va="center", fontsize=11, style="italic")
    axes.set_title("How an update is computed", loc="left", fontsize=TEXT, weight="bold")


def _geometry(axes: Axes) -> None:
    """The plane of h and z: the circle on which the stream stays."""
    import numpy as np

    axes.set(xlim=(-0.14, 1.52), ylim=(-0.7, 1.36), aspect="equal", anchor="NW")
    axes.axis("off")
    axes.set_title("What it does, in the plane of h and z", loc="left", fontsize=TEXT, weight="bold")
    around = np.linspace(-0.2, math.pi / 2 + 0.12, 200)
    axes.plot(np.cos(around), np.sin(around), color=GRID, lw=2.2, zorder=1)
    # h lies along x, and z along y
    _arrow(axes, (0, 0), (1, 0), lw=2.2)
    axes.text(0.5, -0.045, "h", ha="center", va="top", fontsize=13, style="italic")
    along = 0.42
    _arrow(axes, (1, 0), (1, BETA), color=MUTED, lw=1.6)
    _arrow(axes, (1, 0), (1 + along, BETA), color=MUTED, lw=1.6)
    axes.plot([1, 1 + along], [BETA, BETA], color=MUTED, lw=1, linestyle=(0, (3, 2)))
    axes.text(
        1 + along,
        BETA + 0.035,
        "\u03b1 z, of length \u03b2 |h|",
        va="bottom",
        ha="right",
        fontsize=LETTERS,
        color=MUTED,
    )
    axes.text(1 + along + 0.035, BETA - 0.06, "\u03b1 f", va="center", fontsize=11, style="italic", color=MUTED)
    corner = 0.07
    axes.plot([1 - corner, 1 - corner, 1], [0, corner, corner], color=MUTED, lw=0.9)
    styles = scheme_styles({scheme: scheme for scheme in TURNS}, SCHEMES)
    # projection is the point of the circle on the line to h + alpha z
    axes.plot([0, 1], [0, BETA], color=styles["proj-spheretnorm"][0], lw=1, linestyle=(0, (3, 2)), zorder=2)
    for place, (scheme, angle) in enumerate(angles().items()):
        colour = styles[scheme][0]
        x, y = math.cos(angle), math.sin(angle)
        axes.plot([0, x], [0, y], color=colour, lw=1.8, zorder=3)
        axes.plot([x], [y], "o", color=colour, markersize=8.5, markeredgecolor=PAPER, markeredgewidth=1.3, zorder=5)
        radius = 0.2 + 0.085 * place
        arc = np.linspace(0, angle, 60)
        axes.plot(radius * np.cos(arc), radius * np.sin(arc), color=colour, lw=1.6, zorder=2)
    axes.plot([0], [0], "o", color=INK, markersize=4, zorder=6)
    axes.text(0.125, 0.018, "\u03b8", fontsize=11)
    axes.text(-0.12, 1.05, "the sphere, of radius |h|", fontsize=LETTERS, color=MUTED)
    _key(axes, {scheme: styles[scheme][0] for scheme in TURNS})


def _key(axes: Axes, colours: dict[str, str]) -> None:
    """Which colour is which retraction, the largest angle first."""
    turned = sorted(angles().items(), key=lambda pair: -pair[1])
    left, top = -0.1, -0.42
    axes.text(left, top + 0.1, f"\u03b8 at \u03b2 = {BETA:g}", fontsize=LETTERS, weight="bold")
    for index, (scheme, angle) in enumerate(turned):
        x, y = left + 0.7 * (index // 2), top - 0.11 * (index % 2)
        axes.plot([x + 0.02], [y], "o", color=colours[scheme], markersize=7.5)
        text = f"{TURNS[scheme][0]}, {math.degrees(angle):.0f}\u00b0"
        axes.text(x + 0.07, y, text, va="center", fontsize=LETTERS)


def drawing() -> Drawing:
    with own_style():
        figure, grid = axes_grid(1, 2, size=(WIDE, 4.9), width_ratios=(1, 1))
        _pipeline(grid[0, 0])
        _geometry(grid[0, 1])
        return render(NAME, CAPTION, figure)


def files() -> dict[Path, bytes]:
    """The content of every file that this script writes."""
    drawn = drawing()
    return {HERE / f"{NAME}.svg": themed(drawn.svg, COLOURS).encode() + b"\n", HERE / f"{NAME}.png": drawn.png}


if __name__ == "__main__":
    for path, data in files().items():
        path.write_bytes(data)
