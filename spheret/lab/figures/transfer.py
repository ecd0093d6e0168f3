"""The picture of a transfer: bowls of the same contestant at several sizes, over each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from spheret.lab.entries import sound
from spheret.lab.figures.parts import MOST, PANEL_LETTERS, panel_title, rate_axis, small_multiples, wrapped
from spheret.lab.transfer import BestRate, Transfer
from spheret.support.figure_style import INK, SHADES, TEXT, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# nats above the lowest loss up to which the axis goes
TOP = 0.3


def transfer_figure(transfer: Transfer) -> Figure | None:
    """Loss above the lowest of its size by learning rate, one panel per contestant."""
    contestants = [
        contestant
        for contestant in transfer.contestants
        if any(each.entry.search.losses for each in contestant.rates)
    ][:MOST]
    rates = sorted(
        {rate for contestant in contestants for each in contestant.rates for rate in each.entry.search.losses}
    )
    if not rates:
        return None
    longest = max(wrapped(contestant.label, PANEL_LETTERS).count("\n") for contestant in contestants)
    figure, panels = small_multiples(len(contestants), 1.75 + 0.12 * longest)
    for axes, contestant in zip(panels, contestants, strict=True):
        base = contestant.rates[0].rate
        if base is not None:
            axes.axvline(base, color=INK, lw=0.9, ls=(0, (1, 2)), zorder=1)
        shades = _shades(len(transfer.sizes))
        for place, (name, found, colour) in enumerate(zip(_names(transfer), contestant.rates, shades, strict=True)):
            # a row of marks for each size
            _bowl(axes, found, colour, name, height=0.94 - 0.07 * place)
        panel_title(axes, contestant.label)
    rate_axis(panels, rates)
    panels[0].set_ylim(-0.02, TOP)
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [name for name in _names(transfer) if name in handles]
    figure.supxlabel("learning rate", fontsize=TEXT)
    figure.supylabel("loss above the lowest", fontsize=TEXT)
    legend_below(figure, [handles[name] for name in names], names)
    return figure


def _names(transfer: Transfer) -> list[str]:
    return [f"{transfer.key} {size:g}" for size in transfer.sizes]


def _shades(count: int) -> list[Any]:
    """So many colours between the first shade and the last."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = [light for light, _ in SHADES]
    colours = LinearSegmentedColormap.from_list("sizes", shades)
    return shades[:count] if count <= len(shades) else [to_hex(colours(i / (count - 1))) for i in range(count)]


def _bowl(axes: Axes, found: BestRate, colour: str, name: str, height: float) -> None:
    if found.rate is None:
        return
    losses = found.entry.search.losses
    # a rate at which a run failed has an infinite loss
    points = [(rate, loss - losses[found.rate]) for rate, loss in losses.items() if math.isfinite(loss)]
    axes.plot(
        [x for x, _ in points], [y for _, y in points], "o-", color=colour, markersize=3.5, label=name, zorder=3
    )
    transform = axes.get_xaxis_transform()
    for rate, state in {row.rate: row.state for row in found.entry.tries if not sound(row)}.items():
        marker = "v" if state == "collapsed" else "x"
        axes.plot(rate, height, marker, color=colour, transform=transform, markersize=5, mew=1.5, zorder=4)
