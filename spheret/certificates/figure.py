"""The figure of a certificate, as the bytes of a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spheret.analysis.figures import (
    PLOT_WIDTH,
    count_ticks,
    describe,
    doubling_ticks,
    draw_line,
    log_scale,
    panel_grid,
)
from spheret.certificates.certificate_json import (
    CertificateRecord,
    CertifiedSublayer,
    DepthRecord,
    DyadicRecord,
    GrowthRecord,
    PartRecord,
)
from spheret.support.documents import known
from spheret.support.figure_style import INK, PALETTE, legend_above, own_style, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# what a logarithmic axis shows in place of 0
_FLOOR = 1e-16
_UPPER, _LOWER = {"color": PALETTE[6][0]}, {"color": PALETTE[0][0]}
_FIRST, _SECOND = {"color": PALETTE[5][0]}, {"color": PALETTE[7][0]}


def _shade(
    axes: Axes, rows: Sequence[CertifiedSublayer] | Sequence[DepthRecord], name: str, style: dict[str, Any]
) -> None:
    """The proven intervals of a quantity, as a band."""
    proven = [(row.sublayer, *getattr(row.proven, name)) for row in rows if known(row.proven) is not None]
    bands = [(x, max(low, _FLOOR), high) for x, low, high in proven if high is not None]
    if bands:
        x, low, high = zip(*bands, strict=True)
        axes.fill_between(x, low, high, alpha=0.3, lw=0, **style)


def certificate_figure(document: CertificateRecord) -> bytes:
    """Singular values per sublayer and of the products along depth; the paper's bounds on them, and its sums S and A.

    A scheme without the paper's bounds shows its largest angles and |B| in place of the sums. A proven interval is
    shaded; most are narrower than a line. An inactive sublayer is marked.
    """
    achieved = document.achieves
    entropy = achieved.unigram_entropy
    compared = "" if entropy is None else f" (token frequencies alone: {entropy:.3g})"
    loss = "not finite" if achieved.loss is None else f"{achieved.loss:.3g}"
    title = f"{document.scheme}: how small changes pass through the model"
    with own_style():
        tokens = f"{document.tokens} tokens, each on its own path"
        whole_title = f"{title}\nloss {loss}{compared}, {tokens}"
        part = document.own_path
        # two names beside each other, of four lines or of five
        head_rows = 3 if any(row.inactive for row in part.sublayers) else 2
        figure, (single, product, third, fourth) = panel_grid(4, whole_title, head_rows=head_rows)
        _stretches(single, product, part)
        if part.growth is not None and part.dyadic is not None:
            _sums(third, fourth, part.depth, part.growth, part.dyadic)
        else:
            _angles(third, fourth, part)
        for axes in (single, product, third, fourth):
            # a little wider than the plot
            legend_above(axes, PLOT_WIDTH + 0.5)
        return png(figure)


def _stretches(single: Axes, product: Axes, part: PartRecord) -> None:
    """Singular values of each sublayer, and of all sublayers up to it, with the paper's bounds."""
    rows, depth = part.sublayers, part.depth
    numbers = [row.sublayer for row in rows]
    draw_line(single, numbers, [row.sigma_max for row in rows], "most: sigma_max(J)", **_UPPER)
    draw_line(single, numbers, [row.sigma_min for row in rows], "least: sigma_min(J)", **_LOWER)
    dead = [row.sublayer for row in rows if row.inactive]
    if dead:
        single.plot(dead, [1.0] * len(dead), "x", color=INK, markersize=8, label="inactive")
    for axes, proven in ((single, rows), (product, depth)):
        _shade(axes, proven, "sigma_max", _UPPER)
        _shade(axes, proven, "sigma_min", _LOWER)
    measured = [row for row in depth if known(row.sigma_max) is not None]
    depths = [row.sublayer for row in measured]
    draw_line(product, depths, [known(row.sigma_max) for row in measured], "most: sigma_max(G)", **_UPPER)
    draw_line(product, depths, [known(row.sigma_min) or _FLOOR for row in measured], "least: sigma_min(G)", **_LOWER)
    if part.growth is not None:
        bound = {"linestyle": (0, (5, 2)), "marker": ""}
        lower = {"linestyle": (0, (5, 2)), "marker": "x"}
        draw_line(
            single, numbers, [1 + (row.Delta_max or 0.0) for row in rows], "paper: 1 + Delta", **_UPPER, **bound
        )
        draw_line(single, numbers, [row.m_min or None for row in rows], "paper: m (absent: 0)", **_LOWER, **lower)
        largest = [None if row.S_max is None or row.S_max >= 700 else math.exp(row.S_max) for row in depth]
        draw_line(product, numbers, largest, "paper: exp(S)", **_UPPER, **bound)
        products = [row.product_m_min or None for row in depth]
        draw_line(product, numbers, products, "paper: prod m (absent: 0)", **_LOWER, **lower)
    describe(
        single, "How much each sublayer stretches a change", "sublayer", "factor",
        "both lines near 1. Above 1 a sublayer makes small changes larger, near 0 it forgets them.",
    )  # fmt: skip
    describe(
        product, "The same for all sublayers so far", "sublayer", "factor",
        "flat lines. A steady rise or fall means that gradients explode or vanish with depth.",
    )  # fmt: skip
    for axes in (single, product):
        log_scale(axes)
        count_ticks(axes)


def _sums(sums: Axes, last: Axes, depth: list[DepthRecord], growth: GrowthRecord, dyadic: list[DyadicRecord]) -> None:
    """The paper's sums over depth, and what stretches of sublayers add to them."""
    numbers = [row.sublayer for row in depth]
    draw_line(sums, numbers, [row.S_mean for row in depth], "S = sum of Delta", **_FIRST)
    draw_line(sums, numbers, [row.A_mean for row in depth], "A = sum of theta^2", **_SECOND)
    S_order = growth.fits[growth.S_grows_as].S_order
    A_order = growth.fits[growth.A_grows_as].A_order
    describe(
        sums, "How the bounds add up over depth", "sublayer", "sum so far",
        f"curves that flatten: a deeper model then stays as well behaved. With the {growth.schedule} schedule S "
        f"grows as {S_order} and A as {A_order} here.",
    )  # fmt: skip
    count_ticks(sums)
    starts = [row.m for row in dyadic]
    draw_line(last, starts, [row.squared_angle or None for row in dyadic], "theta^2 from m to 2m", **_FIRST)
    lambdas = [row.lambda_squared or None for row in dyadic]
    draw_line(last, starts, lambdas, "lambda^2 from m to 2m", **_SECOND, linestyle=(0, (5, 2)))
    describe(
        last, "How much the stream turns deeper down", "m (sublayers m to 2m are added up)", "sum",
        "a fall: later sublayers turn the stream less, so that the sum A stays finite at any depth.",
    )  # fmt: skip
    doubling_ticks(last, starts)
    log_scale(last)


def _angles(turned: Axes, branch: Axes, part: PartRecord) -> None:
    rows = part.sublayers
    numbers = [row.sublayer for row in rows]
    draw_line(turned, numbers, [row.angle_max for row in rows], "largest angle", **_FIRST)
    describe(
        turned, "How far each sublayer turns the stream", "sublayer", "angle (radians)",
        "single sublayers that turn the stream far more than the others.",
    )  # fmt: skip
    draw_line(branch, numbers, [row.B_max for row in rows], "|B|", **_FIRST)
    describe(
        branch, "How sensitive each attention or MLP is by itself", "sublayer", "|B|",
        "large values: there the connection has to keep small changes small.",
    )  # fmt: skip
    for axes in (turned, branch):
        count_ticks(axes)
