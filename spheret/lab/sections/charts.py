"""The charts that depend only on rows, and the lines that all charts of runs are made of.

A chart shows as many contestants as a reader can tell apart, the best ones, and its caption says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spheret.connections import SCHEMES
from spheret.lab.answers import GroupAnswer
from spheret.lab.endpoints import Ladder
from spheret.lab.entries import Entry
from spheret.lab.rows import sound
from spheret.lab.seed_table import mean_interval
from spheret.support.charts import (
    DASHES,
    LOSS_SHARE,
    PALETTE,
    Chart,
    Line,
    Panel,
    Style,
    plain_tick,
    scheme_styles,
    spanned,
)

LOSS = "loss (nats per token)"
# nobody can tell more contestants apart in one chart
MOST = 20
# nats that an axis of differences spans at least: smaller ones are noise at any number of seeds
LEAST_GAPS = 0.01
FAILURES = {"collapsed": "v", "diverged": "x"}
Points = Sequence[tuple[float, float]]


def slug(name: str) -> str:
    """The name of a group or part as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def capped(caption: str, shown: Sequence[Any]) -> str:
    return f"{caption}. The first {MOST} of {len(shown)}" if len(shown) > MOST else caption


def line_styles(answer: GroupAnswer) -> dict[str, Style]:
    """The colour and dashes of each contestant."""
    schemes = {entry.label: entry.scheme for entry in answer.entries}
    return scheme_styles({each.label: schemes[each.label] for each in answer.group.contestants}, SCHEMES)


def contestant_lines(label: str, style: Style, curves: Iterable[Points], failed: bool) -> list[Line]:
    """The mean over the seeds with their range, or one line per seed if the seeds have different places."""
    pairs = [list(zip(*curve, strict=True)) for curve in curves if curve]
    if len({places for places, _ in pairs}) != 1 or len(pairs) < 2:
        return [Line(label, places, values, style, failed=failed) for places, values in pairs]
    columns = list(zip(*(values for _, values in pairs), strict=True))
    means = [math.fsum(column) / len(column) for column in columns]
    return [Line(label, pairs[0][0], means, style, list(map(min, columns)), list(map(max, columns)), failed=failed)]


def validation_lines(answer: GroupAnswer) -> list[Line]:
    """The validation losses of each contestant by step, at the reported rate, the best contestant first."""
    styles, lines = line_styles(answer), list[Line]()
    for entry in answer.entries:
        # where no rate gave a loss, the lowest one shows what happened
        lowest = min((row.rate for row in entry.tries), default=0.0)
        rows = list(entry.finals.values()) or [row for row in entry.tries if row.rate == lowest]
        known = [[(step, loss) for step, loss in row.curve if loss is not None] for row in rows]
        failed = any(row.state == "diverged" for row in rows)
        curves = [curve for curve in known if len(curve) > 1]
        lines += contestant_lines(entry.label, styles[entry.label], curves, failed)
    return lines


def loss_range(losses: Iterable[float], keep: Iterable[float] = ()) -> tuple[float, float] | None:
    """Limits that show the good losses and those to keep: a few far off would press the others together."""
    ordered = sorted(losses)
    if not ordered:
        return None
    low, high = spanned(ordered[0], max([ordered[round(0.95 * (len(ordered) - 1))], *keep]), LOSS_SHARE)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def later_range(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The range of later losses. It may cut the first tenth of the training and a few high ones."""
    healthy = [line for line in lines if not line.failed] or lines
    start = max((line.x[-1] for line in healthy), default=0.0) / 10
    ends = [(line.x, values) for line in healthy for values in (line.y, line.low, line.high) if values]
    later = [y for xs, ys in ends for x, y in zip(xs, ys, strict=True) if x > start]
    return loss_range(later) if len(later) > 1 else None


def on_scale(answer: GroupAnswer, panel: Panel) -> Panel:
    """The panel with a dotted line for each n-gram model near its losses, from one end to the other.

    The next one below is near if the panel becomes at most twice as high by it.
    """
    places = [*panel.ticks, *(place for line in panel.lines for place in line.x)]
    if panel.limits is None or not places:
        return panel
    (low, high), losses = panel.limits, answer.ngrams.values()
    below = max((loss for loss in losses if loss < low), default=-math.inf)
    if below > low - (high - low):
        low = below - 0.03 * (high - below)
    shown = {name: loss for name, loss in answer.ngrams.items() if low < loss < high}
    ends = [min(places), max(places)]
    lines = [Line(name, ends, [loss, loss], (PALETTE[7][0], DASHES[3])) for name, loss in shown.items()]
    # only other panels have a legend
    words = f"\ndotted: {', '.join(shown)}" if shown and (panel.rows or panel.title) else ""
    return replace(panel, lines=[*panel.lines, *lines], limits=(low, high), x=panel.x + words)


def curves_chart(answer: GroupAnswer) -> Chart | None:
    lines = validation_lines(answer) if answer.group.part.compared_with else []
    caption = f"{answer.group.title}: validation loss by step, at the reported rate"
    panel = on_scale(answer, Panel(lines, "step", f"validation {LOSS}", limits=later_range(lines)))
    return Chart(f"{slug(answer.group.name)}-curves", caption, [panel], window=1) if lines else None


def answer_chart(answer: GroupAnswer) -> Chart | None:
    part, entries, styles = answer.group.part, answer.entries[:MOST], line_styles(answer)
    several = (part.fresh and part.compared_with) or part.compared_with > 1
    if not several or sum(bool(entry.finals) for entry in entries) < 2:
        return None
    means, seed_table = answer.means, answer.seed_table
    lines, names, losses, ends = list[Line](), dict[float, str](), list[float](), list[float]()
    for place, entry in enumerate(entries):
        label, style = entry.label, styles[entry.label]
        seeds = [row.loss for row in entry.finals.values() if sound(row)]
        losses += seeds
        # below the interval, which would hide them
        lines.append(Line("", [place + 0.22] * len(seeds), seeds, style, mark="o", joined=False, faint=True))
        names[place] = label if label in means else f"{label}: {entry.reason}"
        if seed_table is not None and label in means:
            low, high = mean_interval(seed_table, label)
            low, high = (low, high) if math.isfinite(high - low) else (means[label], means[label])
            lines.append(Line(label, [place], [means[label]], style, [low], [high], mark="o", joined=False))
            ends += [low, high]
    caption = (
        f"{answer.group.title}: loss of each contestant at its own best learning rate, the best first. Dots are "
        f"means with 95% intervals, to be compared with each other; faint points are single seeds. A seed moves all "
        f"contestants together, so the points spread wider than the intervals"
    )
    level = (means[answer.reference], answer.reference) if answer.reference in means else None
    panel = Panel(
        lines,
        f"validation {LOSS}" + (f"\ndashed: {answer.reference}" if level else ""),
        "",
        limits=loss_range([*losses, *ends], means.values()),
        ticks=names,
        rows=True,
        level=level,
    )
    return Chart(f"{slug(answer.group.name)}-answer", capped(caption, answer.entries), [on_scale(answer, panel)])


def bowls_chart(answer: GroupAnswer) -> Chart | None:
    tried = [entry for entry in answer.entries if entry.tries]
    compared = answer.group.part.compared_with
    if not tried or (compared and not any(len(entry.search.losses) > 1 for entry in tried)):
        return None
    entries, styles = tried[:MOST], line_styles(answer)
    rates = sorted({row.rate for entry in entries for row in (*entry.tries, *entry.finals.values())})
    shown = sorted({rates[0], rates[len(rates) // 2], rates[-1]})
    limits = loss_range(loss for entry in entries for loss in entry.search.losses.values() if loss < math.inf)
    # room above for the marks of what failed
    limits = limits and (limits[0], limits[1] + 0.2 * (limits[1] - limits[0]))
    panels = [
        on_scale(
            answer,
            Panel(
                _bowl_lines(entry, styles[entry.label]),
                "learning rate",
                f"validation {LOSS}",
                title=entry.label,
                log_x=True,
                limits=limits,
                ticks={rate: plain_tick(float(f"{rate:.2g}")) for rate in shown},
                failures=_failures(entry),
            ),
        )
        for entry in entries
    ]
    caption = (
        f"{answer.group.title}: loss by learning rate, one panel per contestant, the others in grey. A ring marks "
        f"the reported rate, faint points are its fresh seeds, a triangle a collapsed run, a cross a diverged one"
    )
    return Chart(f"{slug(answer.group.name)}-bowls", capped(caption, tried), panels, shared=True)


def _bowl_lines(entry: Entry, style: Style) -> list[Line]:
    style = (style[0], "-")
    # a rate at which a run failed has an infinite loss
    points = [(rate, loss) for rate, loss in entry.search.losses.items() if loss < math.inf]
    lines = [Line(entry.label, [x for x, _ in points], [y for _, y in points], style, mark="o")]
    if entry.rate is not None:
        loss = entry.search.losses.get(entry.rate, entry.mean)
        lines += [Line("", [entry.rate], [loss], style, mark="ring", joined=False)] if loss < math.inf else []
    fresh = [row for row in entry.finals.values() if sound(row)]
    seeds = [row.rate for row in fresh], [row.loss for row in fresh]
    return [*lines, Line("", *seeds, style, mark="o", joined=False, faint=True)]


def _failures(entry: Entry) -> list[tuple[float, str]]:
    """The rates at which a run failed, in the search or with a fresh seed."""
    rows = (*entry.tries, *entry.abandoned, *entry.finals.values())
    return sorted({(row.rate, FAILURES[row.state]) for row in rows if row.state in FAILURES})


def ladder_chart(ladder: Ladder) -> Chart | None:
    xs = list(ladder.sizes) or list(map(float, range(len(ladder.answers))))
    names = [f"{size:g}" for size in ladder.sizes] or [slug(each.group.name) for each in ladder.answers]
    styles, lines = scheme_styles(ladder.schemes, SCHEMES), []
    for label in ladder.schemes:
        known = [(x, gap) for x, gap in zip(xs, ladder.gaps(label), strict=True) if gap is not None]
        if known:
            places, gaps = zip(*known, strict=True)
            bounded = all(math.isfinite(gap.high) for gap in gaps)
            low, high = ([gap.low for gap in gaps], [gap.high for gap in gaps]) if bounded else ((), ())
            lines.append(
                Line(label, places, [gap.estimate for gap in gaps], (styles[label][0], "-"), low, high, mark="o")
            )
    # one rung shows no change
    if not any(len(line.x) > 1 for line in lines):
        return None
    shown = sorted(lines, key=lambda line: line.y[-1])[:MOST]
    ends = [0.0, *(value for line in shown for values in (line.y, line.low, line.high) for value in values)]
    margin = max(0.05 * (max(ends) - min(ends)), LEAST_GAPS / 2)
    panels = [
        Panel(
            [line],
            ladder.key or "rung",
            f"loss minus {ladder.reference}",
            title=line.label,
            log_x=bool(ladder.sizes),
            limits=(min(ends) - margin, max(ends) + margin),
            ticks=dict(zip(xs, names, strict=True)),
            level=(0.0, ""),
        )
        for line in shown
    ]
    caption = (
        f"{ladder.title}: loss minus the loss of {ladder.reference} by {ladder.key or 'rung'}, with 95% intervals. "
        f"Below the line a contestant is better than {ladder.reference}"
    )
    return Chart(f"{slug(ladder.part.name)}-ladder", capped(caption, lines), panels, shared=True)
