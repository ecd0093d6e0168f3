"""Figures of certificates and dynamics; each function returns the bytes of a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# below it a logarithmic axis shows nothing
_FLOOR = 1e-16


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
    """A line through what there is; a gap where there is nothing."""
    axes.plot(x, [float("nan") if value is None else value for value in y], style, label=label, **more)


def certificate(c: dict[str, Any]) -> bytes:
    """Singular values layer by layer and along depth beside their bounds, and the budgets beside the schedule."""
    part = c["own_path"]
    figure, (single, product, sums, verdicts) = _panels(
        2, 2, f"{c['scheme']}, {c['tokens']} tokens on their own paths"
    )
    layers = [row["sublayer"] for row in part["sublayers"]]
    bounded = "Delta_max" in part["sublayers"][0]
    _line(
        single, layers, [row["sigma_max"] for row in part["sublayers"]], "sigma_max(J)", "o-", color="tab:red", ms=3
    )
    _line(
        single, layers, [row["sigma_min"] for row in part["sublayers"]], "sigma_min(J)", "o-", color="tab:blue", ms=3
    )
    if bounded:
        _line(single, layers, [1 + row["Delta_max"] for row in part["sublayers"]], "1 + Delta", "--", color="tab:red")
        _line(
            single,
            layers,
            [row["m_min"] or None for row in part["sublayers"]],
            "m (absent: 0)",
            "x--",
            color="tab:blue",
            ms=4,
        )
    depth = part["depth"]
    measured = [row for row in depth if row.get("sigma_max") is not None]
    where = [row["sublayer"] for row in measured]
    _line(product, where, [row["sigma_max"] for row in measured], "sigma_max(G)", "o-", color="tab:red", ms=3)
    _line(
        product, where, [row["sigma_min"] or _FLOOR for row in measured], "sigma_min(G)", "o-", color="tab:blue", ms=3
    )
    if bounded:
        import math

        bound = [math.exp(row["S_max"]) if row["S_max"] < 700 else None for row in depth]
        _line(product, layers, bound, "exp(S)", "--", color="tab:red")
        _line(
            product,
            layers,
            [row["product_m_min"] or None for row in depth],
            "prod m (absent: 0)",
            "x--",
            color="tab:blue",
            ms=4,
        )
        _line(sums, layers, [row["S_mean"] for row in depth], "S = sum Delta", "o-", ms=3)
        _line(sums, layers, [row["A_mean"] for row in depth], "A = sum theta^2", "o-", ms=3)
        growth = part["growth"]
        sums.set_title(
            f"S grows as {growth['S_grows_as']}, A as {growth['A_grows_as']} ({growth['schedule']} schedule)"
        )
        _line(
            verdicts,
            [row["m"] for row in part["dyadic"]],
            [row["squared_angle"] or None for row in part["dyadic"]],
            "theta^2 in [m, 2m)",
            "o-",
        )
        _line(
            verdicts,
            [row["m"] for row in part["dyadic"]],
            [row["lambda_squared"] or None for row in part["dyadic"]],
            "lambda^2 in [m, 2m)",
            "--",
        )
        verdicts.set_xscale("log", base=2)
        verdicts.set_yscale("log")
        verdicts.set_xlabel("m")
    else:
        _line(sums, layers, [row["angle_max"] for row in part["sublayers"]], "largest angle", "o-", ms=3)
        _line(verdicts, layers, [row["B_max"] for row in part["sublayers"]], "|B|", "o-", ms=3)
    for axes in (single, product):
        axes.set_yscale("log")
    for axes in (single, product, sums):
        axes.set_xlabel("sublayer")
    for axes in (single, product, sums, verdicts):
        axes.legend(fontsize=8)
    return _png(figure)


Series = tuple[Sequence[float], Sequence[float | None]]


def lines(
    title: str, panels: dict[str, dict[str, Series]], xlabel: str, log: Sequence[str] = (), logx: bool = False
) -> bytes:
    """A panel a quantity and a line a name; `log` names the panels whose vertical axis is logarithmic.

    What comes after a comma and "by" in a panel's name is its own horizontal axis.
    """
    columns = min(3, len(panels))
    figure, every = _panels(-(-len(panels) // columns), columns, title)
    for axes, (quantity, named) in zip(every, panels.items(), strict=False):
        for number, (name, (x, y)) in enumerate(named.items()):
            # a second style where ten colours are used up
            _line(axes, x, y, name, "o-" if number < 10 else "s--", color=f"C{number % 10}", ms=3)
        axes.set_title(quantity)
        axes.set_xlabel(quantity.partition(", by ")[2] or xlabel)
        if logx:
            axes.set_xscale("log", base=2)
        if quantity in log and any(
            value for _, y in named.values() for value in y if value is not None and value > 0
        ):
            axes.set_yscale("log")
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(labels))), fontsize=8)
    return _png(figure)
