"""The figures of curves and of the stream. Each is a pure function: the same runs give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spheret.lab.answers import GroupAnswer
from spheret.lab.figures.lines import (
    Points,
    Series,
    averages,
    later_range,
    run_series,
    steps_per_point,
    validation_by_seconds,
    validation_series,
)
from spheret.lab.runs import RunGroup
from spheret.support.figure_style import (
    NAMES,
    TEXT,
    WIDTH,
    Drawing,
    axes_grid,
    legend_below,
    own_style,
    plain_log,
    render,
    spanned,
    spanned_log,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARED_MACHINE = "as each run took it: runs that shared a machine slowed each other"
LOSS = "loss (nats per token)"


def draw(group: RunGroup) -> list[Drawing]:
    """Every figure that the runs have numbers for."""
    drawings = []
    for name, (caption, function) in FIGURES.items():
        with own_style():
            figure = function(group)
            if figure is not None:
                drawings.append(render(name, caption, figure, pgf=True))
    return drawings


def _draw_series(every: Sequence[Series], axes: Axes) -> list[Points]:
    """Draw one line per contestant: the mean over its seeds, with the range shaded and a cross where a run diverged.

    Returns what was drawn: the curves of runs that did not diverge, or all if every run did.
    """
    normal: list[Points] = []
    diverged: list[Points] = []
    # the first is the best: it is drawn last, above the others
    for order, series in enumerate(every):
        (colour, dash), columns = series.style, series.columns
        style: Any = {"color": colour, "linestyle": dash, "zorder": 3 - order / len(every)}
        name = f"{series.label} (x: diverged)" if series.diverged else series.label
        if columns is not None:
            xs = series.curves[0][0][0]
            axes.plot(xs, [math.fsum(c) / len(c) for c in columns], label=name, **style)
            axes.fill_between(xs, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, lw=0)
        for index, (points, failed) in enumerate(series.curves):
            (diverged if failed else normal).append(points)
            if columns is None:
                axes.plot(*points, label=None if index else name, **style)
            if failed:
                at = points[0][-1:], points[1][-1:]
                axes.plot(*at, color=colour, marker="x", markersize=9, markeredgewidth=2.5, zorder=5)
    return normal or diverged


def curves_figure(answer: GroupAnswer) -> Figure | None:
    """The validation loss of every contestant by step."""
    return _loss_figure(validation_series(answer), "step", f"validation {LOSS}")


def _loss_figure(every: Sequence[Series], x: str, y: str) -> Figure | None:
    figure, grid = axes_grid()
    axes = grid[0, 0]
    curves = _draw_series(every, axes)
    if not curves:
        return None
    limits = later_range(curves)
    if limits is not None:
        axes.set_ylim(*limits)
    _name_lines(figure, axes, x, y)
    return figure


def _finish(figure: Figure, axes: Axes, x: str, y: str, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        handles, labels = axes.get_legend_handles_labels()
        legend_below(figure, handles, labels)


def _name_lines(figure: Figure, axes: Axes, x: str, y: str) -> None:
    """Label the axes, and write the names beside the ends of the lines; below the plot if they are many or long.

    A thin line leads from the end of a curve to its name. The names of curves that end early are at the top.
    """
    from matplotlib.lines import Line2D

    labels = axes.get_legend_handles_labels()[1]
    handles: Sequence[Any] = axes.get_legend_handles_labels()[0]
    # the share of the height that a name needs
    gap = 0.052
    few = len(labels) * gap <= 1 and max(map(len, labels)) <= 34
    _finish(figure, axes, x, y, legend=not few)
    if not few:
        return
    axes.set_xlim(right=max(line.get_xdata()[-1] for line in handles))
    # where each curve ends, as shares of the width and height
    to_share = axes.transData + axes.transAxes.inverted()
    ends = {line: to_share.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in handles}
    led = {line: x > 0.7 and -0.01 <= y <= 1.01 for line, (x, y) in ends.items()}
    order = sorted(handles, key=lambda line: (not led[line], ends[line][1] if led[line] else 0))
    wanted = [min(max(ends[line][1], 0.0), 1.0) if led[line] else 1.0 for line in order]
    for line, place in zip(order, spread(wanted, gap), strict=True):
        pieces = [Line2D([1.04, 1.105], [place, place])]
        pieces[0].update_from(line)
        if led[line]:
            x_end, y_end = ends[line]
            pieces.append(Line2D([x_end, 1.04], [y_end, place], color=line.get_color(), linewidth=0.7))
        for piece in pieces:
            piece.set(transform=axes.transAxes, clip_on=False, label="")
            axes.add_artist(piece)
        axes.text(1.12, place, line.get_label(), transform=axes.transAxes, va="center", fontsize=NAMES)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places near the wanted ones, which ascend, at least a gap apart and from 0 to 1."""
    places = list(wanted)
    # groups of neighbours that are too close spread around their mean
    for _ in range(len(places)):
        blocks: list[list[float]] = []
        for place in places:
            if blocks and place < blocks[-1][-1] + gap - 1e-9:
                blocks[-1].append(place)
            else:
                blocks.append([place])
        places = []
        for block in blocks:
            half = gap * (len(block) - 1) / 2
            middle = min(max(math.fsum(block) / len(block), half), 1 - half)
            places += [middle - half + gap * index for index in range(len(block))]
    return places


def _mean_of(window: int, separator: str) -> str:
    return f"{separator}mean of {window} steps" if window > 1 else ""


def training(group: RunGroup) -> Figure | None:
    window = steps_per_point(group)
    series = run_series(group, lambda run: averages(run, "loss", window))
    return _loss_figure(series, "step", f"training loss (nats per token{_mean_of(window, ', ')})")


def wall_time(group: RunGroup) -> Figure | None:
    measured = "steps x seconds per step, measured side by side" if group.side_by_side else SHARED_MACHINE
    series = run_series(group, validation_by_seconds)
    return _loss_figure(series, f"training time (seconds)\n{measured}", f"validation {LOSS}")


def gradients(group: RunGroup) -> Figure | None:
    window = steps_per_point(group)
    # without a spike there is nothing to show below the norm
    spikes = any(line.spikes for run in group.results for line in run.steps)
    figure, grid = axes_grid(2 if spikes else 1, size=(WIDTH, 6.0 if spikes else 4.8), sharex=True)
    upper, lower = grid[0, 0], grid[-1, 0]
    if not _draw_series(run_series(group, lambda run: averages(run, "grad_norm", window)), upper):
        return None
    upper.set_yscale("log")
    _finish(figure, upper, "", "gradient norm" + _mean_of(window, "\n"))
    if spikes:
        _draw_series(run_series(group, lambda run: averages(run, "spikes", 1)), lower)
        lower.yaxis.get_major_locator().set_params(integer=True)
        lower.set_ylim(0, lower.get_ylim()[1])
        lower.set_ylabel("loss spikes so far")
    lower.set_xlabel("step")
    return figure


def _heat_map(key: str, unit: str, logarithmic: bool = False) -> Callable[[RunGroup], Figure | None]:
    """One panel per contestant: a key of every sublayer at every evaluation, of its first seed."""

    def function(group: RunGroup) -> Figure | None:
        import numpy as np
        from matplotlib.colors import LogNorm, Normalize

        panels = []
        for label in group.contestants:
            lines = [line for line in group.contestants[label][0].evaluations if line.sublayers]
            grid = [[_number(getattr(sublayer, key)) for sublayer in line.sublayers or ()] for line in lines]
            if grid and np.isfinite(np.array(grid)).any():
                panels.append((label, [line.step for line in lines], np.array(grid).T))
        if not panels:
            return None
        finite = np.concatenate([values[np.isfinite(values)] for *_, values in panels])
        positive = finite[finite > 0]
        in_range = positive if logarithmic and len(positive) else finite
        low, high = in_range.min(), in_range.max()
        # a few values far above the others would make all others look alike
        most = np.quantile(in_range, 0.98)
        cut = not logarithmic and high > low + 1.5 * (most - low) > low
        high = most if cut else high
        in_decades = logarithmic and len(positive) > 0
        # colours have a least span as axes have: rounding errors of a constant are one colour
        norm = LogNorm(*spanned_log(low, high)) if in_decades else Normalize(*spanned(low, high))
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = axes_grid(rows, columns, size=(WIDTH, 0.8 + 1.9 * rows), sharex=True, sharey=True)
        for axis, (label, steps, values) in zip(axes.flat, panels, strict=False):
            step_edges = [0.0, *steps]
            sublayer_edges = [index + 0.5 for index in range(values.shape[0] + 1)]
            mesh = axis.pcolormesh(step_edges, sublayer_edges, values, norm=norm, cmap="cividis", rasterized=True)
            axis.set_title(label, loc="left")
            axis.grid(visible=False)
            axis.yaxis.get_major_locator().set_params(integer=True)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        figure.supxlabel("step (one column per evaluation)", fontsize=TEXT)
        figure.supylabel("sublayer", fontsize=TEXT)
        bar = figure.colorbar(mesh, ax=axes, label=unit, pad=0.02, extend="max" if cut else "neither")
        if in_decades:
            plain_log(bar.ax.yaxis)
        return figure

    return function


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# name of the file: (caption, function that draws it)
FIGURES: dict[str, tuple[str, Callable[[RunGroup], Any]]] = {
    "training": ("Training loss by step (loss; the axis says if it is a mean of several steps)", training),
    "time": ("Validation loss by training time (val_loss; the axis names the source of the time)", wall_time),
    "gradients": ("Gradient norm by step, and loss spikes if there were any (grad_norm, spikes)", gradients),
    "angle": (
        "Mean angle by which each sublayer turns the stream (sublayers.angle_mean, first seed)",
        _heat_map("angle_mean", "angle (radians)"),
    ),
    "alpha": ("Step size of each sublayer (sublayers.alpha, first seed)", _heat_map("alpha", "alpha (no unit)")),
    "norm": (
        "Mean norm of the stream after each sublayer (sublayers.norm, first seed)",
        _heat_map("norm", "|h| (no unit, log scale)", logarithmic=True),
    ),
    "cosine": (
        "Mean cosine between the states of different tokens (sublayers.cosine, first seed). At 1 all are alike",
        _heat_map("cosine", "cosine (no unit)"),
    ),
}
