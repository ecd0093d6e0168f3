"""Figures of certificates and of the stream's dynamics; each public function returns the bytes of a PNG.

Every panel has a title in plain words, and below it one sentence that says what to look for.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spheret.connections.line_styles import scheme_styles
from spheret.support.figure_style import INK, MUTED, PALETTE, axes_grid, own_style, plain_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what a logarithmic axis shows in place of 0
_FLOOR = 1e-16
# letters of a sentence that are as wide as a panel
_WIDTH = 62
_UPPER, _LOWER = {"color": PALETTE[6][0]}, {"color": PALETTE[0][0]}
_FIRST, _SECOND = {"color": PALETTE[5][0]}, {"color": PALETTE[7][0]}

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


def _grid(count: int, title: str, legend_rows: int = 0) -> tuple[Figure, list[Axes]]:
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


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None], label: str | None, **style: Any) -> None:
    """Draw a line, with a gap wherever y is None."""
    style = {"marker": "o", "markersize": 3.5, **style}
    axes.plot(x, [float("nan") if value is None else value for value in y], label=label, **style)


def _describe(axes: Axes, title: str, x: str, y: str, look_for: str) -> None:
    """The title, the names of the axes, and the sentence below the panel."""
    axes.set_title("\n".join(textwrap.wrap(title, 42)), loc="left", fontsize=11, weight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.annotate(
        "\n".join(textwrap.wrap(f"Look for: {look_for}", _WIDTH)), (0, 0), (-30, -36), xycoords="axes fraction",
        textcoords="offset points", va="top", fontsize=8.5, color=MUTED, annotation_clip=False,
    )  # fmt: skip


def _count_ticks(axes: Axes) -> None:
    """Whole numbers, evenly spaced: half a sublayer is none."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    lines: Sequence[Any] = axes.lines
    if min(place for line in lines for place in line.get_xdata()) >= 1:
        # there is no sublayer 0
        axes.set_xlim(left=max(axes.get_xlim()[0], 0.5))


def _doubling_ticks(axes: Axes, places: Sequence[float]) -> None:
    """A tick at every place, in plain digits, on an axis on which doubling is one step."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(places))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _log_scale(axes: Axes) -> None:
    """A logarithmic vertical axis, if there is something to show on it."""
    lines: Sequence[Any] = axes.lines
    if any(value > 0 for line in lines for value in line.get_ydata()):
        axes.set_yscale("log")
        plain_log(axes.yaxis)


def _shade(axes: Axes, rows: Sequence[dict[str, Any]], name: str, style: dict[str, Any]) -> None:
    """The proven intervals of a quantity, as a band."""
    proven = [(row["sublayer"], *row["proven"][name]) for row in rows if row.get("proven") is not None]
    bands = [(x, max(low, _FLOOR), high) for x, low, high in proven if high is not None]
    if bands:
        x, low, high = zip(*bands, strict=True)
        axes.fill_between(x, low, high, alpha=0.3, lw=0, **style)


def certificate(document: dict[str, Any]) -> bytes:
    """Singular values per sublayer and of the products along depth; the paper's bounds on them, and its sums S and A.

    A scheme without the paper's bounds shows its largest angles and |B| in place of the sums. A proven interval is
    shaded; most are narrower than a line. An inactive sublayer is marked.
    """
    achieved = document["achieves"]
    known = achieved["unigram_entropy"]
    compared = "" if known is None else f" (token frequencies alone: {known:.3g})"
    loss = "not finite" if achieved["loss"] is None else f"{achieved['loss']:.3g}"
    title = f"{document['scheme']}: how small changes pass through the model"
    with own_style():
        tokens = f"{document['tokens']} tokens, each on its own path"
        figure, (single, product, third, fourth) = _grid(4, f"{title}\nloss {loss}{compared}, {tokens}")
        part = document["own_path"]
        _stretches(single, product, part)
        if "Delta_max" in part["sublayers"][0]:
            _sums(third, fourth, part)
        else:
            _angles(third, fourth, part)
        for axes in (single, product, third, fourth):
            # a line may pass behind the legend
            axes.legend(fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")
        return _png(figure)


def _stretches(single: Axes, product: Axes, part: dict[str, Any]) -> None:
    """Singular values of each sublayer, and of all sublayers up to it, with the paper's bounds."""
    rows, depth = part["sublayers"], part["depth"]
    numbers = [row["sublayer"] for row in rows]
    _line(single, numbers, [row["sigma_max"] for row in rows], "most: sigma_max(J)", **_UPPER)
    _line(single, numbers, [row["sigma_min"] for row in rows], "least: sigma_min(J)", **_LOWER)
    dead = [row["sublayer"] for row in rows if row["inactive"]]
    if dead:
        single.plot(dead, [1.0] * len(dead), "x", color=INK, markersize=8, label="inactive")
    for axes, proven in ((single, rows), (product, depth)):
        _shade(axes, proven, "sigma_max", _UPPER)
        _shade(axes, proven, "sigma_min", _LOWER)
    known = [row for row in depth if row.get("sigma_max") is not None]
    depths = [row["sublayer"] for row in known]
    _line(product, depths, [row["sigma_max"] for row in known], "most: sigma_max(G)", **_UPPER)
    _line(product, depths, [row["sigma_min"] or _FLOOR for row in known], "least: sigma_min(G)", **_LOWER)
    if "Delta_max" in rows[0]:
        bound = {"linestyle": (0, (5, 2)), "marker": ""}
        lower = {"linestyle": (0, (5, 2)), "marker": "x"}
        _line(single, numbers, [1 + row["Delta_max"] for row in rows], "paper: 1 + Delta", **_UPPER, **bound)
        _line(single, numbers, [row["m_min"] or None for row in rows], "paper: m (absent: 0)", **_LOWER, **lower)
        largest = [math.exp(row["S_max"]) if row["S_max"] < 700 else None for row in depth]
        _line(product, numbers, largest, "paper: exp(S)", **_UPPER, **bound)
        products = [row["product_m_min"] or None for row in depth]
        _line(product, numbers, products, "paper: prod m (absent: 0)", **_LOWER, **lower)
    _describe(
        single, "How much each sublayer stretches a change", "sublayer", "factor",
        "both lines near 1. Above 1 a sublayer makes small changes larger, near 0 it forgets them.",
    )  # fmt: skip
    _describe(
        product, "The same for all sublayers so far", "sublayer", "factor",
        "flat lines. A steady rise or fall means that gradients explode or vanish with depth.",
    )  # fmt: skip
    for axes in (single, product):
        _log_scale(axes)
        _count_ticks(axes)


def _sums(sums: Axes, last: Axes, part: dict[str, Any]) -> None:
    """The paper's sums over depth, and what stretches of sublayers add to them."""
    depth, growth, dyadic = part["depth"], part["growth"], part["dyadic"]
    numbers = [row["sublayer"] for row in depth]
    _line(sums, numbers, [row["S_mean"] for row in depth], "S = sum of Delta", **_FIRST)
    _line(sums, numbers, [row["A_mean"] for row in depth], "A = sum of theta^2", **_SECOND)
    S_order = growth["fits"][growth["S_grows_as"]]["S_order"]
    A_order = growth["fits"][growth["A_grows_as"]]["A_order"]
    _describe(
        sums, "How the bounds add up over depth", "sublayer", "sum so far",
        f"curves that flatten: a deeper model then stays as well behaved. With the {growth['schedule']} schedule S "
        f"grows as {S_order} and A as {A_order} here.",
    )  # fmt: skip
    _count_ticks(sums)
    starts = [row["m"] for row in dyadic]
    _line(last, starts, [row["squared_angle"] or None for row in dyadic], "theta^2 from m to 2m", **_FIRST)
    lambdas = [row["lambda_squared"] or None for row in dyadic]
    _line(last, starts, lambdas, "lambda^2 from m to 2m", **_SECOND, linestyle=(0, (5, 2)))
    _describe(
        last, "How much the stream turns deeper down", "m (sublayers m to 2m are added up)", "sum",
        "a fall: later sublayers turn the stream less, so that the sum A stays finite at any depth.",
    )  # fmt: skip
    _doubling_ticks(last, starts)
    _log_scale(last)


def _angles(turned: Axes, branch: Axes, part: dict[str, Any]) -> None:
    rows = part["sublayers"]
    numbers = [row["sublayer"] for row in rows]
    _line(turned, numbers, [row["angle_max"] for row in rows], "largest angle", **_FIRST)
    _describe(
        turned, "How far each sublayer turns the stream", "sublayer", "angle (radians)",
        "single sublayers that turn the stream far more than the others.",
    )  # fmt: skip
    _line(branch, numbers, [row["B_max"] for row in rows], "|B|", **_FIRST)
    _describe(
        branch, "How sensitive each attention or MLP is by itself", "sublayer", "|B|",
        "large values: there the connection has to keep small changes small.",
    )  # fmt: skip
    for axes in (turned, branch):
        _count_ticks(axes)


def lines(title: str, panels: Sequence[Panel], schemes: Mapping[str, str]) -> bytes:
    """One panel per quantity, with one line per name. Panels without a number are left out.

    schemes: the scheme of every name, which gives the line its colour.
    """
    with own_style():
        return _png(lines_figure(title, panels, schemes))


def lines_figure(title: str, panels: Sequence[Panel], schemes: Mapping[str, str]) -> Figure:
    """The figure of `lines`, in the style that is set."""
    shown = [panel for panel in panels if any(value is not None for _, y in panel.series.values() for value in y)]
    styles = scheme_styles(schemes)
    columns = min(6, max(1, 120 // (6 + max(map(len, schemes)))))
    figure, grid = _grid(len(shown), title, -(-len(schemes) // columns) if len(schemes) > 1 else 0)
    for axes, panel in zip(grid, shown, strict=True):
        for name, (x, y) in panel.series.items():
            colour, dash = styles[name]
            _line(axes, x, y, name, color=colour, linestyle=dash)
        _describe(axes, panel.title, panel.x, panel.y, panel.look_for)
        if panel.doubling:
            _doubling_ticks(axes, [place for x, _ in panel.series.values() for place in x])
        else:
            _count_ticks(axes)
        if panel.log:
            _log_scale(axes)
    if len(schemes) > 1:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", ncols=columns, handlelength=2.6)
    return figure
