"""The figures of a report: pure functions of a study, the same bytes every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spheret.report.drawing import INK, STYLE, Drawing, axes_grid, saved, style
from spheret.report.results import Result, Study
from spheret.report.verdicts import pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# more points than this on one line cannot be seen
POINTS = 1000


def draw(study: Study) -> list[Drawing]:
    """Every figure that the runs have numbers for."""
    import matplotlib

    drawings = []
    for name, (caption, function) in FIGURES.items():
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
            figure = function(study)
            if figure is not None:
                drawings.append(saved(name, caption, figure))
    return drawings


Curve = tuple[Sequence[float], Sequence[float]]


def _curves(study: Study, axes: Axes, curve: Callable[[Result], Curve], end: str = "diverged") -> int:
    """A line a contestant: the mean over its seeds with the range shaded, a cross where a run diverged."""
    drawn = 0
    for label, (colour, dash) in style(study).items():
        lines = [(result, curve(result)) for result in study.contestants[label]]
        lines = [(result, points) for result, points in lines if points[0]]
        if not lines:
            continue
        drawn += 1
        name = label if all(result.stopped is None for result, _ in lines) else f"{label} (x: {end})"
        xs = lines[0][1][0]
        if len(lines) > 1 and all(list(points[0]) == list(xs) for _, points in lines):
            columns = list(zip(*(points[1] for _, points in lines), strict=True))
            axes.plot(xs, [math.fsum(c) / len(c) for c in columns], color=colour, linestyle=dash, label=name)
            axes.fill_between(xs, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, lw=0)
        else:
            for index, (_, (x, y)) in enumerate(lines):
                axes.plot(x, y, color=colour, linestyle=dash, label=None if index else name)
        for result, (x, y) in lines:
            if result.stopped is not None:
                axes.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=9, markeredgewidth=2.5, zorder=5)
    return drawn


def _finish(axes: Axes, x: str, y: str, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        handles, labels = axes.get_legend_handles_labels()
        columns = 3 if max(map(len, labels)) <= 20 else 2 if max(map(len, labels)) <= 34 else 1
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.2)


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> Curve:
    every = max(1, -(-len(xs) // POINTS))
    # the last point stays
    return xs[::-1][::every][::-1], ys[::-1][::every][::-1]


def _smooth(study: Study) -> int:
    """Over how many steps a training curve is averaged."""
    return max(1, max(result.step for result in study.results) // 50)


def _averaged(result: Result, key: str, window: int) -> Curve:
    """The moving average of a key of every step, over `window` steps up to each."""
    lines = [line for line in result.steps if isinstance(line.get(key), (int, float))]
    sums = [0.0]
    for line in lines:
        sums.append(sums[-1] + line[key])
    size = min(window, len(lines))
    steps = [line["step"] for line in lines][size - 1 :] if lines else []
    return _thinned(steps, [(sums[i] - sums[i - size]) / size for i in range(size, len(sums))] if lines else [])


def _loss_limits(axes: Any) -> None:
    """Show where the losses end up: the first tenth of training, and a run that blew up, may leave the picture."""
    after = [
        value
        for line in axes.lines
        for x, value in zip(*line.get_data(), strict=True)
        if x > max(line.get_xdata()[-1] for line in axes.lines) / 10
    ]
    if len(after) > 1:
        low, high = min(after), sorted(after)[round(0.97 * (len(after) - 1))]
        margin = 0.06 * max(high - low, 0.01)
        axes.set_ylim(low - margin, high + margin)


def _evaluated(result: Result, against: str) -> Curve:
    lines = [line for line in result.evaluations if line.get(against) is not None]
    return [line[against] for line in lines], [line["val_loss"] for line in lines]


def validation(study: Study) -> Figure | None:
    figure, grid = axes_grid()
    axes = grid[0, 0]
    if not _curves(
        study, axes, lambda r: ([e["step"] for e in r.evaluations], [e["val_loss"] for e in r.evaluations])
    ):
        return None
    _loss_limits(axes)
    _finish(axes, "step", "validation loss (nats a token)")
    return figure


def training(study: Study) -> Figure | None:
    window = _smooth(study)
    figure, grid = axes_grid()
    axes = grid[0, 0]
    if not _curves(study, axes, lambda r: _averaged(r, "loss", window)):
        return None
    _loss_limits(axes)
    _finish(axes, "step", f"training loss (nats a token, mean of {window} steps)")
    return figure


def wall_time(study: Study) -> Figure | None:
    figure, grid = axes_grid()
    axes = grid[0, 0]

    if not _curves(study, axes, lambda result: _evaluated(result, "seconds")):
        return None
    _loss_limits(axes)
    _finish(axes, "training time (seconds)", "validation loss (nats a token)")
    return figure


def gradients(study: Study) -> Figure | None:
    window = _smooth(study)
    figure, grid = axes_grid(2, size=(6.4, 6.0), sharex=True)
    upper, lower = grid[:, 0]
    if not _curves(study, upper, lambda r: _averaged(r, "grad_norm", window)):
        return None
    upper.set_yscale("log")
    _plain_log(upper.yaxis)
    _finish(upper, "", f"gradient norm\n(mean of {window} steps)")
    _curves(study, lower, lambda r: _averaged(r, "spikes", 1))
    lower.yaxis.get_major_locator().set_params(integer=True)
    lower.set_ylim(0, max(1, lower.get_ylim()[1]))
    _finish(lower, "step", "loss spikes so far", legend=False)
    return figure


def _plain_log(axis: Any) -> None:
    """Ticks at 1, 2, 5 of each decade in plain digits: powers would need the mathematics that labels may not have."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def differences(study: Study) -> Figure | None:
    """Everyone against one contestant: Pre-LN where it ran, else the first."""
    labels = list(study.contestants)
    finished = [label for label in labels if all(result.finished for result in study.contestants[label])]
    if len(finished) < 2:
        return None
    reference = "pre-ln" if "pre-ln" in finished else finished[0]
    colours = style(study)
    found = []
    for pair in pairs(study):
        if reference in (pair.first, pair.second) and pair.interval is not None:
            sign, other = (1, pair.first) if pair.second == reference else (-1, pair.second)
            i = pair.interval
            found.append((other, sign * i.estimate, sorted((sign * i.low, sign * i.high)), pair.noise))
    if not found:
        return None
    figure, grid = axes_grid(size=(6.4, 1.4 + 0.32 * len(found)))
    axes = grid[0, 0]
    for row, (label, estimate, (low, high), _) in enumerate(found):
        if math.isfinite(high - low):
            axes.hlines([row], [low], [high], color=colours[label][0], lw=2.2)
        axes.plot([estimate], [row], "o", color=colours[label][0])
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(found)), [label for label, *_ in found])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    noise = "; ".join(sorted({noise for *_, noise in found}))
    _finish(
        axes, f"validation loss minus that of {reference} (nats a token)\n95% interval: {noise}", "", legend=False
    )
    return figure


def _heat(key: str, unit: str, logarithmic: bool = False) -> Callable[[Study], Figure | None]:
    """A panel a contestant: a key of every sublayer at every evaluation, of its first seed."""

    def function(study: Study) -> Figure | None:
        import numpy as np
        from matplotlib.colors import LogNorm, Normalize

        panels = []
        for label, results in study.contestants.items():
            lines = [line for line in results[0].evaluations if line.get("sublayers")]
            grid = [[_number(layer.get(key)) for layer in line["sublayers"]] for line in lines]
            if grid and np.isfinite(np.array(grid)).any():
                panels.append((label, [line["step"] for line in lines], np.array(grid).T))
        if not panels:
            return None
        every = np.concatenate([values[np.isfinite(values)] for *_, values in panels])
        positive = every[every > 0]
        low, high = (positive.min(), positive.max()) if logarithmic and len(positive) else (every.min(), every.max())
        scale = LogNorm if logarithmic and len(positive) and low < high else Normalize
        norm = scale(low, high if high > low else low + max(abs(low), 1) * 1e-6)
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = axes_grid(rows, columns, size=(6.4, 0.8 + 1.9 * rows), sharex=True, sharey=True)
        for axis, (label, steps, values) in zip(axes.flat, panels, strict=False):
            edges = [0.0, *steps]
            layers = [layer + 0.5 for layer in range(values.shape[0] + 1)]
            mesh = axis.pcolormesh(edges, layers, values, norm=norm, cmap="cividis", rasterized=True)
            axis.set_title(label, loc="left")
            axis.grid(visible=False)
            axis.yaxis.get_major_locator().set_params(integer=True)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        figure.supxlabel("step (each column: an evaluation)", fontsize=10)
        figure.supylabel("sublayer", fontsize=10)
        bar = figure.colorbar(mesh, ax=axes, label=unit, pad=0.02)
        if scale is LogNorm:
            _plain_log(bar.ax.yaxis)
        return figure

    return function


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# what a file is called: (its caption, how it is drawn)
FIGURES: dict[str, tuple[str, Callable[[Study], Any]]] = {
    "validation": ("Validation loss by step (val_loss)", validation),
    "training": ("Training loss by step (loss, a moving average)", training),
    "time": ("Validation loss by training time (val_loss, seconds)", wall_time),
    "gradients": ("Gradient norm and loss spikes by step (grad_norm, spikes)", gradients),
    "differences": ("Paired differences to one contestant (val_documents, or val_loss by seed)", differences),
    "angle": (
        "Mean angle that each sublayer turns the stream by (layers.angle_mean, first seed)",
        _heat("angle_mean", "angle (radians)"),
    ),
    "alpha": ("Step size of each sublayer (layers.alpha, first seed)", _heat("alpha", "alpha (no unit)")),
    "norm": (
        "Mean norm of the stream after each sublayer (layers.norm, first seed)",
        _heat("norm", "|h| (no unit, log scale)", logarithmic=True),
    ),
    "cosine": (
        "Mean cosine between the states of different tokens (layers.cosine, first seed); 1 is a collapse",
        _heat("cosine", "cosine (no unit)"),
    ),
}
