"""Figures of certificates and of the stream's dynamics; each public function returns the bytes of a PNG."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what a logarithmic axis shows in place of 0
_FLOOR = 1e-16


def _in_own_style(draw: Callable[..., bytes]) -> Callable[..., bytes]:
    """Draw as matplotlib does by itself. A matplotlibrc in the current directory could start LaTeX."""

    @functools.wraps(draw)
    def drawn(*arguments: Any, **options: Any) -> bytes:
        import matplotlib

        with matplotlib.rc_context(matplotlib.rcParamsDefault):
            return draw(*arguments, **options)

    return drawn


def _panels(rows: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _line(
    axes: Axes, x: Sequence[float], y: Sequence[float | None], label: str | None, style: str = "-", **more: Any
) -> None:
    """Draw a line, with a gap wherever y is None."""
    axes.plot(x, [float("nan") if value is None else value for value in y], style, label=label, **more)


def _shade(axes: Axes, rows: Sequence[dict[str, Any]], name: str, style: dict[str, Any]) -> None:
    """The proven intervals of a quantity, as a band."""
    proven = [(row["sublayer"], *row["proven"][name]) for row in rows if row.get("proven") is not None]
    bands = [(x, max(low, _FLOOR), high) for x, low, high in proven if high is not None]
    if bands:
        x, low, high = zip(*bands, strict=True)
        axes.fill_between(x, low, high, alpha=0.3, lw=0, **style)


@_in_own_style
def certificate(document: dict[str, Any]) -> bytes:
    """Singular values per sublayer and of the products along depth; the paper's bounds on them, and its sums S and A.

    A scheme without the paper's bounds shows its largest angles and |B| in place of the sums. A proven interval is
    shaded; most are narrower than a line. An inactive sublayer is marked.
    """
    part = document["own_path"]
    rows, depth = part["sublayers"], part["depth"]
    achieved = document["achieves"]
    known = achieved["unigram_entropy"]
    compared = "" if known is None else f" (token frequencies alone: {known:.3g})"
    loss = "not finite" if achieved["loss"] is None else f"{achieved['loss']:.3g}"
    title = f"{document['scheme']}, loss {loss}{compared}, {document['tokens']} tokens on their own paths"
    figure, (single, product, sums, last) = _panels(2, 2, title)
    numbers = [row["sublayer"] for row in rows]
    upper, lower = {"color": "tab:red"}, {"color": "tab:blue"}
    _line(single, numbers, [row["sigma_max"] for row in rows], "sigma_max(J)", "o-", ms=3, **upper)
    _line(single, numbers, [row["sigma_min"] for row in rows], "sigma_min(J)", "o-", ms=3, **lower)
    dead = [row for row in rows if row["inactive"]]
    if dead:
        at = [row["sublayer"] for row in dead]
        single.plot(at, [1.0] * len(at), "kx", ms=8, label="inactive")
    for axes, proven in ((single, rows), (product, depth)):
        _shade(axes, proven, "sigma_max", upper)
        _shade(axes, proven, "sigma_min", lower)
    measured = [row for row in depth if row.get("sigma_max") is not None]
    depths = [row["sublayer"] for row in measured]
    _line(product, depths, [row["sigma_max"] for row in measured], "sigma_max(G)", "o-", ms=3, **upper)
    _line(product, depths, [row["sigma_min"] or _FLOOR for row in measured], "sigma_min(G)", "o-", ms=3, **lower)
    if "Delta_max" in rows[0]:
        _line(single, numbers, [1 + row["Delta_max"] for row in rows], "paper: 1 + Delta", "--", **upper)
        _line(single, numbers, [row["m_min"] or None for row in rows], "paper: m (absent: 0)", "x--", ms=4, **lower)
        bound = [math.exp(row["S_max"]) if row["S_max"] < 700 else None for row in depth]
        _line(product, numbers, bound, "paper: exp(S)", "--", **upper)
        products = [row["product_m_min"] or None for row in depth]
        _line(product, numbers, products, "paper: prod m (absent: 0)", "x--", ms=4, **lower)
        _line(sums, numbers, [row["S_mean"] for row in depth], "S = sum Delta", "o-", ms=3)
        _line(sums, numbers, [row["A_mean"] for row in depth], "A = sum theta^2", "o-", ms=3)
        growth = part["growth"]
        S_order = growth["fits"][growth["S_grows_as"]]["S_order"]
        A_order = growth["fits"][growth["A_grows_as"]]["A_order"]
        sums.set_title(f"{growth['schedule']} schedule; best fit: S grows as {S_order}, A as {A_order}")
        starts = [row["m"] for row in part["dyadic"]]
        _line(last, starts, [row["squared_angle"] or None for row in part["dyadic"]], "theta^2 in [m, 2m)", "o-")
        _line(last, starts, [row["lambda_squared"] or None for row in part["dyadic"]], "lambda^2 in [m, 2m)", "--")
        last.set_xscale("log", base=2)
        last.set_yscale("log")
        last.set_xlabel("m")
    else:
        _line(sums, numbers, [row["angle_max"] for row in rows], "largest angle", "o-", ms=3)
        _line(last, numbers, [row["B_max"] for row in rows], "|B|", "o-", ms=3)
        last.set_xlabel("sublayer")
    for axes in (single, product):
        axes.set_yscale("log")
    for axes in (single, product, sums):
        axes.set_xlabel("sublayer")
    for axes in (single, product, sums, last):
        axes.legend(fontsize=8)
    return _png(figure)


Series = tuple[Sequence[float], Sequence[float | None]]


@_in_own_style
def lines(
    title: str, panels: dict[str, dict[str, Series]], xlabel: str, log: Sequence[str] = (), logx: bool = False
) -> bytes:
    """One panel per quantity, with one line per name; `log` lists the panels with a logarithmic vertical axis.

    A quantity such as "norm, by step" has its own label for the horizontal axis: the words after ", by ".
    """
    columns = min(3, len(panels))
    figure, grid = _panels(-(-len(panels) // columns), columns, title)
    for axes, (quantity, series) in zip(grid, panels.items(), strict=False):
        for number, (name, (x, y)) in enumerate(series.items()):
            # after ten colours the style changes
            _line(axes, x, y, name, "o-" if number < 10 else "s--", color=f"C{number % 10}", ms=3)
        axes.set_title(quantity)
        axes.set_xlabel(quantity.partition(", by ")[2] or xlabel)
        if logx:
            axes.set_xscale("log", base=2)
        if quantity in log and any(
            value for _, y in series.values() for value in y if value is not None and value > 0
        ):
            axes.set_yscale("log")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(labels))), fontsize=8)
    return _png(figure)
