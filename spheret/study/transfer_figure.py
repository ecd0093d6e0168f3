"""The picture of a transfer: bowls of the same contestant at several sizes, over each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from spheret.study.figure_parts import MOST, panel_title, rate_axis, small_multiples, wrapped
from spheret.study.transfer import Found, Transfer
from spheret.support.figure_style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# from the smallest size to the largest; more sizes than colours are not drawn
SHADES = ("#8fc1e8", "#4a90c9", "#7d5ba6", "#c2410c", "#7f1d1d")
# nats above the lowest loss up to which the axis goes
TOP = 0.3


def transfer_figure(transfer: Transfer) -> Figure | None:
    """Loss above the lowest of its size by learning rate, one panel per contestant."""
    courses = [course for course in transfer.courses if any(each.entry.search.losses for each in course.found)][:MOST]
    rates = sorted({rate for course in courses for each in course.found for rate in each.entry.search.losses})
    if not rates:
        return None
    longest = max(wrapped(course.label, 26).count("\n") for course in courses)
    figure, panels = small_multiples(len(courses), 1.75 + 0.12 * longest)
    for axes, course in zip(panels, courses, strict=True):
        base = course.found[0].rate
        if base is not None:
            axes.axvline(base, color=INK, lw=0.9, ls=(0, (1, 2)), zorder=1)
        for size, found, colour in zip(transfer.sizes, course.found, SHADES, strict=False):
            _bowl(axes, found, colour, f"{transfer.key} {size:g}")
        panel_title(axes, course.label)
    rate_axis(panels, rates)
    panels[0].set_ylim(-0.02, TOP)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.supxlabel("learning rate", fontsize=10)
    figure.supylabel("loss above the lowest", fontsize=10)
    return figure


def _bowl(axes: Axes, found: Found, colour: str, name: str) -> None:
    if found.rate is None:
        return
    failed = {row.rate: row.state for row in found.entry.tries if row.state != "finished"}
    losses = found.entry.search.losses
    points = [
        (rate, loss - found.lowest) for rate, loss in losses.items() if rate not in failed and math.isfinite(loss)
    ]
    axes.plot(
        [x for x, _ in points], [y for _, y in points], "o-", color=colour, markersize=3.5, label=name, zorder=3
    )
    transform = axes.get_xaxis_transform()
    for rate, state in failed.items():
        marker, at = ("v", 0.93) if state == "collapsed" else ("x", 0.84)
        axes.plot(rate, at, marker, color=colour, transform=transform, markersize=5, mew=1.5, zorder=4)
