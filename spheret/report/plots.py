"""The figures of a report. Each is a pure function of a group: the same runs give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spheret.report.figure_style import line_styles
from spheret.report.results import Result, RunGroup
from spheret.report.verdicts import comparisons
from spheret.runs.metrics import MetricsRecord
from spheret.support.figure_style import INK, Drawing, axes_grid, own_style, plain_log, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# nobody can see more points than this on one line
POINTS = 1000
SHARED_MACHINE = "as each run took it: runs that shared a machine slowed each other"


def draw(group: RunGroup) -> list[Drawing]:
    """Every figure that the runs have numbers for."""
    drawings = []
    for name, (caption, function) in FIGURES.items():
        with own_style():
            figure = function(group)
            if figure is not None:
                drawings.append(render(name, caption, figure, pgf=True))
    return drawings


Curve = tuple[Sequence[float], Sequence[float]]


def _draw_curves(group: RunGroup, axes: Axes, curve: Callable[[Result], Curve]) -> list[Curve]:
    """Draw one line per contestant: the mean over its seeds, with the range shaded and a cross where a run diverged.

    Returns what was drawn: the curves of runs that did not diverge, or all if every run did.
    """
    normal: list[Curve] = []
    diverged: list[Curve] = []
    styles = line_styles(group)
    # the first is the best: it is drawn last, above the others
    for order, label in enumerate(group.contestants):
        colour, dash = styles[label]
        above = 3 - order / len(styles)
        lines = [(result, curve(result)) for result in group.contestants[label]]
        lines = [(result, points) for result, points in lines if points[0]]
        if not lines:
            continue
        for result, points in lines:
            (normal if result.diverged is None else diverged).append(points)
        name = label if all(result.diverged is None for result, _ in lines) else f"{label} (x: diverged)"
        xs = lines[0][1][0]
        style: Any = {"color": colour, "linestyle": dash, "zorder": above}
        if len(lines) > 1 and all(list(points[0]) == list(xs) for _, points in lines):
            columns = list(zip(*(points[1] for _, points in lines), strict=True))
            axes.plot(xs, [math.fsum(c) / len(c) for c in columns], label=name, **style)
            axes.fill_between(xs, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, lw=0)
        else:
            for index, (_, (x, y)) in enumerate(lines):
                axes.plot(x, y, label=None if index else name, **style)
        for result, (x, y) in lines:
            if result.diverged is not None:
                axes.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=9, markeredgewidth=2.5, zorder=5)
    return normal or diverged


def _until_divergence(result: Result, lines: Sequence[MetricsRecord]) -> list[MetricsRecord]:
    """The lines up to the step at which the run diverged: what comes after is not on the scale of the others."""
    return [line for line in lines if result.diverged is None or line.step <= result.diverged[0]]


def _finish(axes: Axes, x: str, y: str, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        handles, labels = axes.get_legend_handles_labels()
        columns = 3 if max(map(len, labels)) <= 20 else 2 if max(map(len, labels)) <= 34 else 1
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.2)


def _name_lines(axes: Axes, x: str, y: str) -> None:
    """Label the axes, and write the names beside the ends of the lines; below the plot if they are many or long.

    A thin line leads from the end of a curve to its name. The names of curves that end early are at the top.
    """
    from matplotlib.lines import Line2D

    labels = axes.get_legend_handles_labels()[1]
    handles: Sequence[Any] = axes.get_legend_handles_labels()[0]
    # the share of the height that a name needs
    gap = 0.052
    few = len(labels) * gap <= 1 and max(map(len, labels)) <= 34
    _finish(axes, x, y, legend=not few)
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
        axes.text(1.12, place, line.get_label(), transform=axes.transAxes, va="center", fontsize=9)


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


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> Curve:
    stride = max(1, -(-len(xs) // POINTS))
    # counted from the end, so that the last point stays
    return xs[::-1][::stride][::-1], ys[::-1][::stride][::-1]


def _smoothing_window(group: RunGroup) -> int:
    """The number of steps over which a training curve is averaged."""
    return max(1, max(result.step for result in group.results) // 50)


def _mean_of(window: int, separator: str) -> str:
    return f"{separator}mean of {window} steps" if window > 1 else ""


def _averaged(result: Result, key: str, window: int) -> Curve:
    """The moving average of a key: at each step, the mean over the last `window` steps."""
    lines = [line for line in _until_divergence(result, result.steps) if getattr(line, key) is not None]
    sums = [0.0]
    for line in lines:
        sums.append(sums[-1] + getattr(line, key))
    size = min(window, len(lines))
    steps = [line.step for line in lines][size - 1 :] if lines else []
    return _thinned(steps, [(sums[i] - sums[i - size]) / size for i in range(size, len(sums))] if lines else [])


def _loss_limits(axes: Any, curves: Sequence[Curve]) -> None:
    """Set the limits to the range of later losses. They may cut the first tenth of training and a diverged run."""
    first = max(xs[-1] for xs, _ in curves) / 10
    after = [value for curve in curves for x, value in zip(*curve, strict=True) if x > first]
    if len(after) > 1:
        low, high = min(after), sorted(after)[round(0.97 * (len(after) - 1))]
        margin = 0.06 * max(high - low, 0.01)
        axes.set_ylim(low - margin, high + margin)


def _validation_curve(result: Result, x: Callable[[MetricsRecord], float | None]) -> Curve:
    """The validation loss over x, a function of a line of the metrics."""
    points = [(x(line), line.val_loss) for line in _until_divergence(result, result.evaluations)]
    known = [(at, loss) for at, loss in points if at is not None and loss is not None]
    return [at for at, _ in known], [loss for _, loss in known]


def validation(group: RunGroup) -> Figure | None:
    figure, grid = axes_grid()
    axes = grid[0, 0]
    curves = _draw_curves(group, axes, lambda result: _validation_curve(result, lambda line: line.step))
    if not curves:
        return None
    _loss_limits(axes, curves)
    _name_lines(axes, "step", "validation loss (nats per token)")
    return figure


def training(group: RunGroup) -> Figure | None:
    window = _smoothing_window(group)
    figure, grid = axes_grid()
    axes = grid[0, 0]
    curves = _draw_curves(group, axes, lambda r: _averaged(r, "loss", window))
    if not curves:
        return None
    _loss_limits(axes, curves)
    _name_lines(axes, "step", f"training loss (nats per token{_mean_of(window, ', ')})")
    return figure


def _seconds_curve(result: Result, side_by_side: bool) -> Curve:
    """The validation loss over the time of training, without that of evaluations."""
    if side_by_side and result.step_cost is not None:
        seconds = result.step_cost.seconds
        return _validation_curve(result, lambda line: line.step * seconds)
    return _validation_curve(result, lambda line: line.seconds)


def wall_time(group: RunGroup) -> Figure | None:
    figure, grid = axes_grid()
    axes = grid[0, 0]
    curves = _draw_curves(group, axes, lambda result: _seconds_curve(result, group.side_by_side))
    if not curves:
        return None
    _loss_limits(axes, curves)
    measured = "steps x seconds per step, measured side by side" if group.side_by_side else SHARED_MACHINE
    _name_lines(axes, f"training time (seconds)\n{measured}", "validation loss (nats per token)")
    return figure


def gradients(group: RunGroup) -> Figure | None:
    window = _smoothing_window(group)
    # without a spike there is nothing to show below the norm
    spikes = any(line.spikes for result in group.results for line in result.steps)
    figure, grid = axes_grid(2 if spikes else 1, size=(6.4, 6.0 if spikes else 4.8), sharex=True)
    upper, lower = grid[0, 0], grid[-1, 0]
    if not _draw_curves(group, upper, lambda r: _averaged(r, "grad_norm", window)):
        return None
    upper.set_yscale("log")
    plain_log(upper.yaxis)
    _finish(upper, "", "gradient norm" + _mean_of(window, "\n"))
    if spikes:
        _draw_curves(group, lower, lambda r: _averaged(r, "spikes", 1))
        lower.yaxis.get_major_locator().set_params(integer=True)
        lower.set_ylim(0, lower.get_ylim()[1])
        lower.set_ylabel("loss spikes so far")
    lower.set_xlabel("step")
    return figure


def differences(group: RunGroup) -> Figure | None:
    """Every contestant minus a reference: Pre-LN if it finished, else the first that did."""
    labels = list(group.contestants)
    finished = [label for label in labels if all(result.finished for result in group.contestants[label])]
    if len(finished) < 2:
        return None
    reference = "pre-ln" if "pre-ln" in finished else finished[0]
    styles = line_styles(group)
    rows = []
    for comparison in comparisons(group):
        interval = comparison.interval
        if reference in (comparison.first, comparison.second) and interval is not None:
            sign, label = (1, comparison.first) if comparison.second == reference else (-1, comparison.second)
            ends = sorted((sign * interval.low, sign * interval.high))
            rows.append((label, sign * interval.estimate, ends, comparison.noise))
    if not rows:
        return None
    rows.sort(key=lambda row: row[1])
    figure, grid = axes_grid(size=(6.4, 1.4 + 0.32 * len(rows)))
    axes = grid[0, 0]
    for y, (label, estimate, (low, high), _) in enumerate(rows):
        if math.isfinite(high - low):
            axes.hlines([y], [low], [high], color=styles[label][0], lw=2.2)
        axes.plot([estimate], [y], "o", color=styles[label][0])
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    noise = "; ".join(sorted({noise for *_, noise in rows}))
    _finish(
        axes, f"validation loss minus that of {reference} (nats per token)\n95% interval, {noise}", "", legend=False
    )
    return figure


def bowls(group: RunGroup) -> Figure | None:
    """The loss of every contestant over the learning rate. Rates that failed are marked in a panel above it."""
    if all(bowl.best is None for bowl in group.bowls.values()):
        return None
    from matplotlib.lines import Line2D

    failed = [label for label, bowl in group.bowls.items() if any(map(_failure, bowl.runs.values()))]
    height = 0.3 + 0.16 * len(failed) if failed else 0.0
    ratios = (height, 4.4) if failed else (1,)
    figure, grid = axes_grid(
        len(ratios), size=(6.4, 4.8 + height), sharex=True, height_ratios=ratios, gridspec_kw={"hspace": 0.02}
    )
    upper, lower = grid[0, 0], grid[-1, 0]
    # a loss after a collapse is far above the others: its line leaves the panel
    in_scale: list[float] = []
    styles = line_styles(group)
    for label in group.contestants:
        (colour, dash), bowl = styles[label], group.bowls[label]
        for rate, runs in bowl.runs.items():
            if failure := _failure(runs):
                upper.plot([rate], [failed.index(label)], marker=failure[0], color=colour, linestyle="", markersize=6)
        points = {rate: loss for rate in bowl.runs if (loss := bowl.loss(rate)) is not None}
        lower.plot(list(points), list(points.values()), color=colour, linestyle=dash, marker=".")
        in_scale += [loss for rate, loss in points.items() if rate == bowl.best or not _failure(bowl.runs[rate])]
        if bowl.best is not None:
            lower.plot([bowl.best], [bowl.loss(bowl.best)], color=colour, marker="o", markersize=8, linestyle="")
        lower.plot([], [], color=colour, linestyle=dash, label=label)
    for marker, text in (("o", "chosen rate"), *FAILURES):
        lower.add_line(Line2D([], [], color=INK, marker=marker, linestyle="", label=text))
    margin = 0.06 * max(max(in_scale) - min(in_scale), 0.01)
    lower.set_ylim(min(in_scale) - margin, max(in_scale) + margin)
    lower.set_xscale("log")
    lower.set_xticks(group.rates, [f"{rate:g}" for rate in group.rates])
    lower.set_xticks([], minor=True)
    if failed:
        upper.set_ylim(len(failed), -1)
        upper.set_yticks([])
        upper.grid(axis="y", visible=False)
        upper.set_ylabel("failed")
    _finish(lower, "learning rate (log scale)", "validation loss (nats per token)")
    return figure


# marker and name of what can become of a rate
FAILURES = (("^", "collapsed"), ("x", "diverged"))


def _failure(runs: Sequence[Result]) -> tuple[str, str] | None:
    """The row of FAILURES for the runs at one learning rate; None if no run failed."""
    collapsed, diverged = FAILURES
    if any(run.diverged is not None for run in runs):
        return diverged
    return collapsed if any(run.collapsed for run in runs) else None


def _heat_map(key: str, unit: str, logarithmic: bool = False) -> Callable[[RunGroup], Figure | None]:
    """One panel per contestant: a key of every sublayer at every evaluation, of its first seed."""

    def function(group: RunGroup) -> Figure | None:
        import numpy as np
        from matplotlib.colors import LogNorm, Normalize

        panels = []
        for label in group.contestants:
            lines = group.contestants[label][0].evaluations
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
        scale = LogNorm if logarithmic and len(positive) and low < high else Normalize
        norm = scale(low, high if high > low else low + max(abs(low), 1) * 1e-6)
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = axes_grid(rows, columns, size=(6.4, 0.8 + 1.9 * rows), sharex=True, sharey=True)
        for axis, (label, steps, values) in zip(axes.flat, panels, strict=False):
            step_edges = [0.0, *steps]
            sublayer_edges = [index + 0.5 for index in range(values.shape[0] + 1)]
            mesh = axis.pcolormesh(step_edges, sublayer_edges, values, norm=norm, cmap="cividis", rasterized=True)
            axis.set_title(label, loc="left")
            axis.grid(visible=False)
            axis.yaxis.get_major_locator().set_params(integer=True)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        figure.supxlabel("step (one column per evaluation)", fontsize=10)
        figure.supylabel("sublayer", fontsize=10)
        bar = figure.colorbar(mesh, ax=axes, label=unit, pad=0.02, extend="max" if cut else "neither")
        if scale is LogNorm:
            plain_log(bar.ax.yaxis)
        return figure

    return function


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# name of the file: (caption, function that draws it)
FIGURES: dict[str, tuple[str, Callable[[RunGroup], Any]]] = {
    "validation": ("Validation loss by step (val_loss)", validation),
    "training": ("Training loss by step (loss; the axis says if it is a mean of several steps)", training),
    "time": ("Validation loss by training time (val_loss; the axis names the source of the time)", wall_time),
    "bowls": ("Validation loss by learning rate (val_loss of the last step, mean over seeds)", bowls),
    "gradients": ("Gradient norm by step, and loss spikes if there were any (grad_norm, spikes)", gradients),
    "differences": (
        "Validation loss of each contestant minus that of a reference (val_documents, or val_loss by seed)",
        differences,
    ),
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
