"""The figures that rows alone decide. Each is a pure function of its answers: the same rows give the same bytes.

A figure shows as many contestants as a reader can tell apart, the best ones, and its caption says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spheret.analysis.line_styles import scheme_styles
from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry, sound
from spheret.lab.figures.lines import line_styles
from spheret.lab.figures.parts import (
    LOSS,
    MOST,
    PANEL_LETTERS,
    capped,
    one_plot,
    panel_title,
    rate_axis,
    rows_height,
    slug,
    small_multiples,
    wrapped,
)
from spheret.lab.figures.runs import curves_figure
from spheret.lab.figures.transfer import transfer_figure
from spheret.lab.ladders import Climb, Ladder
from spheret.lab.seed_table import mean_interval
from spheret.lab.transfer import transfers
from spheret.support.figure_style import (
    COLLAPSED,
    DIVERGED,
    GRID,
    INK,
    LOSS_SHARE,
    MUTED,
    NAMES,
    PAPER,
    SHADES,
    SMALL,
    TEXT,
    WIDTH,
    Drawing,
    own_style,
    render,
    spanned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# the colours of a map that mean better and worse, and how much of one is laid over the paper of either theme, at
# least and at most: letters can be read on all of it
BETTER, WORSE = SHADES[1][0], SHADES[3][0]
FAINTEST, STRONGEST, PLAIN = 0.15, 0.5, 0.35
# nats that an axis of differences spans at least: smaller ones are noise at any number of seeds
LEAST_GAPS = 0.01
# inches of a small letter, and of a letter of a name
SMALL_LETTER, LETTER = 0.055, 0.07


def draw(answers: Sequence[GroupAnswer], ladders: Sequence[Ladder], curves: bool = True) -> list[Drawing]:
    """Every figure that the rows have numbers for, in the order of the plan. curves: whether losses by step too."""
    drawings = []
    for name, caption, function in _figures(answers, ladders):
        if name.endswith("-curves") and not curves:
            continue
        with own_style():
            figure = function()
            if figure is not None:
                drawings.append(render(name, caption, figure))
    return drawings


def _figures(
    answers: Sequence[GroupAnswer], ladders: Sequence[Ladder]
) -> Iterator[tuple[str, str, Callable[[], Figure | None]]]:
    """The name, the caption and the maker of each figure."""
    for transfer in transfers(answers):
        caption = (
            f"{transfer.title}: loss above the lowest of its size, by learning rate, one line per {transfer.key}. "
            f"The dotted line is the best rate of {transfer.key} {transfer.sizes[0]:g}: rules that hold put every "
            f"lowest point on it. Marks above are rates at which a run collapsed (triangle) or diverged "
            f"(cross)"
        )
        yield (
            f"{slug(transfer.part)}-transfer",
            capped(caption, transfer.contestants),
            partial(transfer_figure, transfer),
        )
    for answer in answers:
        name, title = slug(answer.group.name), answer.group.title
        if answer.group.part.compared_with:
            caption = f"{title}: validation loss by step, at the rate that counts"
            yield f"{name}-curves", caption, partial(curves_figure, answer)
        if (answer.group.part.fresh and answer.group.part.compared_with) or answer.group.part.compared_with > 1:
            caption = (
                f"{title}: loss of each contestant at its own best learning rate, the best first. Dots are means "
                f"with 95% intervals, to be compared with each other; faint points are single seeds. A seed moves "
                f"all contestants together, so the points spread wider than the intervals"
            )
            yield f"{name}-answer", capped(caption, answer.entries), partial(_answer, answer)
        caption = (
            f"{title}: loss by learning rate, one panel per contestant, the others in grey. A ring marks the rate "
            f"that counts, faint points are its fresh seeds, a triangle a collapsed run, a cross a diverged one"
        )
        tried = [entry for entry in answer.entries if entry.tries]
        if answer.group.part.compared_with and any(len(entry.search.losses) > 1 for entry in tried):
            yield f"{name}-bowls", capped(caption, tried), partial(_bowls, answer)
        if len(answer.compared) > 1:
            caption = (
                f"{title}: loss of the row minus that of the column, in thousandths of a nat per token. Coloured "
                f"cells are significant (blue: the row is better); grey cells are not"
            )
            yield f"{name}-pairs", capped(caption, answer.compared), partial(_pairs, answer)
        if not answer.group.part.compared_with:
            caption = f"{title}: what became of each contestant at each learning rate; numbers are validation losses"
            yield f"{name}-collapse", capped(caption, tried, 2 * MOST), partial(_collapse, answer)
    for ladder in ladders:
        caption = (
            f"{ladder.title}: loss minus that of {ladder.reference} by {ladder.key or 'rung'}, with 95% intervals. "
            f"Below the line a contestant is better than {ladder.reference}"
        )
        shown = [climb for climb in ladder.climbs if any(step.gap for step in climb.steps)]
        yield f"{slug(ladder.part)}-ladder", capped(caption, shown), partial(_ladder, ladder)


def _answer(answer: GroupAnswer) -> Figure | None:
    entries = answer.entries[:MOST]
    if sum(bool(entry.finals) for entry in entries) < 2:
        return None
    styles, wide, seed_table = line_styles(answer), 40, answer.seed_table
    names = {entry.label: wrapped(entry.label, wide) for entry in entries}
    longest = max(len(line) for name in names.values() for line in name.split("\n"))
    room = max(10, int((WIDTH - 0.5 - LETTER * longest) / SMALL_LETTER))
    reasons = {entry.label: wrapped(entry.reason, room) for entry in entries}
    figure, axes = one_plot(WIDTH, 1.0 + rows_height(len(entries), [*names.values(), *reasons.values()]))
    shown = {entry.label for entry in entries}
    means = {} if seed_table is None else {label: mean for label, mean in seed_table.means.items() if label in shown}
    if answer.reference in means:
        axes.axvline(means[answer.reference], color=INK, lw=0.9, ls=(0, (4, 3)), zorder=1)
    ends: list[float] = []
    for y, entry in enumerate(entries):
        colour = styles[entry.label][0]
        losses = [row.loss for row in entry.finals.values() if sound(row)]
        ends += losses
        # below the interval, which would hide them
        axes.plot(losses, [y + 0.22] * len(losses), "o", color=colour, alpha=0.4, markersize=4, mew=0, zorder=2)
        if seed_table is not None and entry.label in means:
            low, high = mean_interval(seed_table, entry.label)
            if math.isfinite(high - low):
                axes.hlines([y], [low], [high], color=colour, lw=2.4, zorder=3)
                ends += [low, high]
            axes.plot(means[entry.label], y, "o", color=colour, markersize=7.5, zorder=4)
        else:
            # on the right, where no good loss is, and above the points of the row
            axes.annotate(
                reasons[entry.label], (1, y + 0.08 * bool(losses)), xycoords=("axes fraction", "data"), ha="right",
                va="bottom" if losses else "center", fontsize=SMALL, style="italic", zorder=1.5,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
            ).set_in_layout(False)  # fmt: skip
    _loss_range(axes, ends, means.values())
    axes.set_yticks(range(len(entries)), list(names.values()), fontsize=NAMES)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    line = f"\ndashed: {answer.reference}" if answer.reference in means else ""
    axes.set_xlabel(f"{LOSS}{line}")
    return figure


def _loss_range(axes: Axes, ends: Sequence[float], means: Iterable[float]) -> None:
    """Limits that show all losses near the good ones. What lies far off would press the others together."""
    if not ends:
        return
    ordered = sorted(ends)
    low, middle = ordered[0], ordered[len(ordered) // 2]
    high = max([min(ordered[-1], low + 4 * max(middle - low, 0.01)), *means])
    low, high = spanned(low, high, LOSS_SHARE)
    margin = 0.04 * (high - low)
    axes.set_xlim(low - margin, high + margin)


def _bowls(answer: GroupAnswer) -> Figure | None:
    entries = [entry for entry in answer.entries if entry.tries][:MOST]
    if not entries:
        return None
    styles = line_styles(answer)
    longest = max(wrapped(entry.label, PANEL_LETTERS).count("\n") for entry in entries)
    figure, panels = small_multiples(len(entries), 1.75 + 0.12 * longest)
    curves = {entry.label: _curve(entry) for entry in entries}
    lowest = min((loss for _, losses in curves.values() for loss in losses), default=None)
    for axes, entry in zip(panels, entries, strict=True):
        colour = styles[entry.label][0]
        for label, (rates, losses) in curves.items():
            if label != entry.label:
                axes.plot(rates, losses, color=GRID, lw=0.9, zorder=1)
        axes.plot(*curves[entry.label], "o-", color=colour, markersize=3.5, zorder=3)
        chosen = _chosen(entry)
        if chosen is not None:
            axes.plot(*chosen, "o", mfc="none", mec=colour, markersize=10, mew=1.6, zorder=4)
        fresh = [row for row in entry.finals.values() if sound(row)]
        rates, losses = [row.rate for row in fresh], [row.loss for row in fresh]
        axes.plot(rates, losses, "o", color=colour, alpha=0.3, markersize=4, mew=0, zorder=2)
        _mark_failures(axes, entry, colour)
        panel_title(axes, entry.label)
    tried = sorted({row.rate for entry in entries for row in (*entry.tries, *entry.finals.values())})
    _bowl_axes(panels, curves.values(), lowest, tried)
    figure.supxlabel("learning rate", fontsize=TEXT)
    figure.supylabel(LOSS, fontsize=TEXT)
    return figure


def _curve(entry: Entry) -> tuple[list[float], list[float]]:
    """The losses of the rates none of whose runs failed."""
    points = [(rate, loss) for rate, loss in entry.search.losses.items() if loss < math.inf]
    return [rate for rate, _ in points], [loss for _, loss in points]


def _chosen(entry: Entry) -> tuple[float, float] | None:
    """The rate that counts and its loss: that of the search, or else of the fresh seeds."""
    if entry.rate is None:
        return None
    loss = entry.search.losses.get(entry.rate, entry.mean)
    return (entry.rate, loss) if loss < math.inf else None


def _mark_failures(axes: Axes, entry: Entry, colour: str) -> None:
    """A mark at the upper edge for every rate at which a run failed, in the search or with a fresh seed."""
    # the height is a share of the axes, the rate is not
    transform = axes.get_xaxis_transform()
    for state, marker in (("collapsed", "v"), ("diverged", "x")):
        rates = sorted(
            {row.rate for row in (*entry.tries, *entry.abandoned, *entry.finals.values()) if row.state == state}
        )
        height = [0.93 if state == "collapsed" else 0.82] * len(rates)
        axes.plot(rates, height, marker, color=colour, transform=transform, markersize=6, mew=1.8, zorder=5)


def _bowl_axes(panels: Sequence[Axes], curves: Any, lowest: float | None, rates: Sequence[float]) -> None:
    axes = panels[0]
    rate_axis(panels, rates)
    if lowest is None:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    # a rate that is far too high is not on the scale of the others
    ordered = sorted(loss for _, losses in curves for loss in losses)
    top = min(ordered[-1], max(ordered[round(0.9 * (len(ordered) - 1))], lowest + 0.05))
    lowest, top = spanned(lowest, top, LOSS_SHARE)
    margin = 0.08 * (top - lowest)
    # room above for the marks of what failed
    axes.set_ylim(lowest - margin, top + 3.5 * margin)


def _ladder(ladder: Ladder) -> Figure | None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    climbs = [climb for climb in ladder.climbs if any(step.gap for step in climb.steps)]
    # one rung shows no change
    if not any(sum(step.gap is not None for step in climb.steps) > 1 for climb in climbs):
        return None
    climbs = sorted(climbs, key=_last_gap)[:MOST]
    xs = list(ladder.sizes) or list(map(float, range(len(ladder.answers))))
    names = [f"{size:g}" for size in ladder.sizes] or [slug(each.group.name) for each in ladder.answers]
    styles = scheme_styles({climb.label: climb.scheme for climb in ladder.climbs})
    longest = max(wrapped(climb.label, PANEL_LETTERS).count("\n") for climb in climbs)
    figure, panels = small_multiples(len(climbs), 1.75 + 0.12 * longest)
    for axes, climb in zip(panels, climbs, strict=True):
        axes.axhline(0, color=INK, lw=0.9, zorder=1)
        for other in climbs:
            if other is not climb:
                at, gaps = _known(xs, other)
                axes.plot(at, [gap.estimate for gap in gaps], color=GRID, lw=0.9, zorder=1)
        colour = styles[climb.label][0]
        at, gaps = _known(xs, climb)
        axes.plot(at, [gap.estimate for gap in gaps], "o-", color=colour, markersize=5, zorder=3)
        bounded = [(x, gap) for x, gap in zip(at, gaps, strict=True) if math.isfinite(gap.high)]
        axes.vlines(
            [x for x, _ in bounded], [gap.low for _, gap in bounded], [gap.high for _, gap in bounded], color=colour,
            lw=2.2, zorder=3,
        )  # fmt: skip
        panel_title(axes, climb.label)
    first = panels[0]
    low, high = first.get_ylim()
    missing = max(0.0, LEAST_GAPS - (high - low)) / 2
    first.set_ylim(low - missing, high + missing)
    if ladder.sizes:
        first.set_xscale("log")
        first.set_xlim(min(xs) / 1.25, max(xs) * 1.25)
    else:
        first.set_xlim(-0.5, len(xs) - 0.5)
    first.xaxis.set_major_locator(FixedLocator(xs))
    first.xaxis.set_minor_locator(NullLocator())
    shown = dict(zip(xs, names, strict=True))
    first.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown.get(value, "")))
    figure.supxlabel(ladder.key or "rung", fontsize=TEXT)
    figure.supylabel(f"loss minus {ladder.reference}", fontsize=TEXT)
    return figure


def _known(xs: Sequence[float], climb: Climb) -> tuple[list[float], list[Any]]:
    pairs = [(x, step.gap) for x, step in zip(xs, climb.steps, strict=True) if step.gap is not None]
    return [x for x, _ in pairs], [gap for _, gap in pairs]


def _last_gap(climb: Climb) -> float:
    """The gap on the highest rung that has one."""
    return [step.gap.estimate for step in climb.steps if step.gap is not None][-1]


def _pairs(answer: GroupAnswer) -> Figure | None:
    labels = [entry.label for entry in answer.compared][:MOST]
    count = len(labels)
    gaps = {(a, b): answer.gap(a, b) for a in labels for b in labels if a != b}
    largest = max((abs(gap.estimate) for gap in gaps.values() if gap is not None), default=0) or 1.0
    names = [f"{i + 1}  {wrapped(label, 40)}" for i, label in enumerate(labels)]
    longest = max(len(line) for name in names for line in name.split("\n"))
    # inches of a cell
    cell = 0.42
    figure, axes = one_plot(0.5 + LETTER * longest + cell * count, 0.5 + cell * count)
    for i, first in enumerate(labels):
        for j, second in enumerate(labels):
            gap = gaps.get((first, second))
            if gap is None or not gap.significant:
                _fill(axes, j, i)
            else:
                _fill(axes, j, i, BETTER if gap.estimate < 0 else WORSE, _strength(abs(gap.estimate) / largest))
            if gap is None:
                continue
            colour = INK if gap.significant else MUTED
            axes.text(j, i, f"{1000 * gap.estimate:+.0f}", ha="center", va="center", fontsize=SMALL, color=colour)
    _map_axes(axes, names, [str(i + 1) for i in range(count)])
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.xaxis.tick_top()
    return figure


def _strength(share: float) -> float:
    """How much of its colour a cell has, from the least for 0 to the most for 1."""
    return FAINTEST + (STRONGEST - FAINTEST) * min(1.0, max(0.0, share))


def _fill(axes: Axes, x: float, y: float, colour: str = GRID, strength: float = PLAIN) -> None:
    """Fill a cell of a map. A colour over the paper follows the theme, which an image does not."""
    axes.fill_between([x - 0.5, x + 0.5], y - 0.5, y + 0.5, lw=0, color=colour, alpha=strength, zorder=2)


def _map_axes(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """The axes of a map: its first row is on top, and lines of paper separate its cells."""
    axes.grid(visible=False)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for edge in range(1, len(rows)):
        axes.axhline(edge - 0.5, color=PAPER, lw=1, zorder=4)
    for edge in range(1, len(columns)):
        axes.axvline(edge - 0.5, color=PAPER, lw=1, zorder=4)
    axes.set_yticks(range(len(rows)), rows, fontsize=SMALL)
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _collapse(answer: GroupAnswer) -> Figure | None:
    order = [each.label for each in answer.group.contestants if answer.by_label[each.label].tries]
    entries = [answer.by_label[label] for label in order][: 2 * MOST]
    rates = sorted({row.rate for entry in entries for row in entry.tries})
    if not entries:
        return None
    wide = 44
    centred: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL, "zorder": 3}
    names = [wrapped(entry.label, wide) for entry in entries]
    losses: dict[tuple[int, int], float] = {}
    # inches of a cell: some say how many of several runs failed
    cell = 0.75 if all(len({row.rate for row in entry.tries}) == len(entry.tries) for entry in entries) else 1.0
    figure, axes = one_plot(3.9 + cell * max(len(rates), 3), 1.0 + rows_height(len(names), names))
    for i, entry in enumerate(entries):
        for x, rate in enumerate(rates):
            runs = [row for row in entry.tries if row.rate == rate]
            failed = [row for row in runs if not sound(row)]
            if runs and not failed:
                losses[x, i] = math.fsum(row.loss for row in runs) / len(runs)
                axes.text(x, i, f"{losses[x, i]:.2f}", **centred)
            elif failed:
                state = "no loss" if failed[0].state == "finished" else failed[0].state
                colour = COLLAPSED if state == "collapsed" else DIVERGED
                _fill(axes, x, i, colour, 1)
                share = f" {len(failed)}/{len(runs)}" if len(runs) > 1 else ""
                axes.text(x, i, state + share, color=PAPER, weight="bold", **centred)
            else:
                _fill(axes, x, i)
    if losses:
        # the lowest is the strongest. The highest tenth has one colour: a bad run does not make all others look alike
        ordered = sorted(losses.values())
        low, high = spanned(ordered[0], ordered[round(0.9 * (len(ordered) - 1))], LOSS_SHARE)
        for (x, i), loss in losses.items():
            _fill(axes, x, i, BETTER, _strength((high - loss) / (high - low)))
    _map_axes(axes, names, [f"{rate:.3g}" for rate in rates])
    axes.set_xlabel("learning rate")
    return figure
