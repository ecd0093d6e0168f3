"""The sections that rows alone decide. Every number carries its source: RUN.KEY is a key of that run's row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from spheret.lab.answers import Gap, GroupAnswer
from spheret.lab.costs import costs
from spheret.lab.endpoints import EndpointAnswer
from spheret.lab.entries import Entry
from spheret.lab.figures.parts import MOST, slug
from spheret.lab.ladders import Climb, Ladder
from spheret.lab.page.tables import Table, TableCell, ranked
from spheret.lab.rows import FINAL, FINISHED, FLOOR, STRESS, TUNE, Key, Row
from spheret.lab.runs import Result
from spheret.lab.sections.endpoints import endpoints_section
from spheret.lab.sections.failures import advice_words
from spheret.lab.sections.section import Section
from spheret.lab.sections.transfer import transfer_section
from spheret.lab.seed_table import mean_interval
from spheret.lab.stages import stage_of
from spheret.lab.transfer import transfers
from spheret.lab.words import answer_sentence, gain_words, limits, p_words, verdict_words, width_words

NONE = TableCell("-")
CORRECTED = "p is corrected for the number of pairs (Holm)."
STALLED = (
    "Stalled: a finished run that was at the loss of token frequencies, within 3%, for a fifth of its updates or "
    "more, or at its end."
)


def answer_sections(
    answers: Sequence[GroupAnswer],
    ladders: Sequence[Ladder],
    endpoints: Sequence[EndpointAnswer] = (),
    results: Mapping[Key, Result] | None = None,
) -> list[Section]:
    """The sections of every page, the answer first. results: the runs whose directories are here, by their keys."""
    compared = [answer for answer in answers if answer.group.part.compared_with]
    fresh = [answer for answer in compared if answer.group.part.fresh]
    # a study of maps alone is about transfer
    opening = not compared
    moves = [transfer_section(each, first=opening and not place) for place, each in enumerate(transfers(answers))]
    # what was not run at all has its place at the end
    begun = [each for place, each in enumerate(answers) if each.rows or not place]
    parts = [
        *(moves if opening else ()),
        *(_answer_section(each, first=not (opening and moves) and not place) for place, each in enumerate(begun)),
        endpoints_section(endpoints),
        _losses_section(fresh),
        _curves_section(fresh),
        _bowls_section(compared),
        *map(_ladder_section, ladders),
        *(() if opening else moves),
        _pairs_section(compared),
        _costs_section(compared),
        _failures_section(answers, results or {}),
        _missing_section(answers),
    ]
    return [section for section in parts if section is not None]


def mean_cell(rows: Sequence[Row], digits: int = 4) -> TableCell:
    """The mean loss of some runs."""
    if not rows or any(row.val_loss is None for row in rows):
        return NONE
    value = math.fsum(row.loss for row in rows) / len(rows)
    names = ", ".join(f"{row.run}.val_loss" for row in rows)
    return TableCell(f"{value:.{digits}f}", value, f"mean({names})" if len(rows) > 1 else names)


def _gap_cell(gap: Gap | None, source: str) -> TableCell:
    return NONE if gap is None else TableCell(f"{gap.estimate:+.4f}", gap.estimate, source)


def _interval(low: float, high: float) -> str:
    return f"{low:+.4f} to {high:+.4f}" if math.isfinite(high - low) else "none"


def _layout_source(answer: GroupAnswer) -> str:
    return f"two-way layout of the val_loss of {answer.group.name}"


def _answer_section(answer: GroupAnswer, first: bool) -> Section:
    name = slug(answer.group.name)
    figures = [f"{name}-answer"] if answer.group.part.compared_with else [f"{name}-collapse"]
    paragraphs = [answer_sentence(answer), *(limits(answer) if answer.rows else [])]
    title = f"The answer: {answer.group.title}" if first else answer.group.title
    if answer.group.part.fresh:
        return Section(f"answer-{name}", title, paragraphs, (), figures, opening=first)
    # the whole of a race on one screen
    table = _losses_table(answer).without_empty_columns
    return Section(f"answer-{name}", title, paragraphs, [table], [f"{name}-curves"], opening=first)


def _curves_section(answers: Sequence[GroupAnswer]) -> Section | None:
    names = [f"{slug(answer.group.name)}-curves" for answer in answers if any(row.curve for row in answer.rows)]
    return Section("curves", "Curves", (), (), names) if names else None


def _losses_section(answers: Sequence[GroupAnswer]) -> Section | None:
    """The noise floor first: what chance does comes before any difference."""
    tables = [_floors_table(answers), *(_losses_table(answer) for answer in answers if answer.rows)]
    found = [table for table in tables if table is not None]
    return Section("losses", "Losses", (), found) if found else None


def _floors_table(answers: Sequence[GroupAnswer]) -> Table | None:
    rows = []
    for answer in answers:
        floor = answer.floor
        if floor is None:
            continue
        cells = [NONE, NONE]
        if floor.interval is not None:
            runs = ", ".join(f"{row.run}.val_loss" for row in floor.rows)
            own = ", ".join(f"{row.run}.val_loss" for row in answer.by_label[floor.label].finals.values())
            text = TableCell(
                f"{floor.interval.estimate:+.4f}", floor.interval.estimate, f"mean({runs}) - mean({own})"
            )
            cells = [text, TableCell(_interval(floor.interval.low, floor.interval.high))]
        seen = NONE if answer.seen is None else TableCell(f"{answer.seen:.4f}", answer.seen, _layout_source(answer))
        count = TableCell(f"{len(floor.rows)} of {answer.group.part.compared_with}")
        rows.append([TableCell(answer.group.name), TableCell(floor.label), *cells, count, seen])
    if not rows:
        return None
    notes = [
        "A contestant minus itself, on other seeds: what chance alone does. The true difference is 0.",
        "The last column is the smallest true difference between two contestants that would have been seen with a "
        "probability of 80% or more.",
    ]
    columns = ["group", "contestant", "difference", "95% interval", "other seeds", "smallest difference seen"]
    return Table("noise-floor", "The noise floor", columns, rows, notes)


def _losses_table(answer: GroupAnswer) -> Table:
    name, source = slug(answer.group.name), _layout_source(answer)
    columns = [
        "contestant", "learning rate", "val loss", "95% interval", f"minus {answer.reference}", "p", "seeds", "state",
    ]  # fmt: skip
    rows, unranked = [], []
    for entry in answer.entries:
        compared = answer.seed_table is not None and entry.label in answer.seed_table.means
        runs = list(entry.finals.values())
        if compared and answer.seed_table is not None:
            runs = [entry.finals[seed] for seed in answer.seed_table.seeds]
        interval, gap = NONE, answer.gap(entry.label, answer.reference)
        if compared and answer.seed_table is not None:
            low, high = mean_interval(answer.seed_table, entry.label)
            interval = TableCell(f"{low:.4f} to {high:.4f}" if math.isfinite(high - low) else "none", source=source)
        if not compared:
            unranked.append(entry.label)
        rate = NONE if entry.rate is None else TableCell(f"{entry.rate:g}", entry.rate, "tuning")
        rows.append(
            [
                TableCell(entry.label),
                rate,
                NONE if entry.failed else mean_cell(runs),
                interval,
                _gap_cell(gap, source) if answer.seed_table is not None else _plain_gap(answer, entry),
                NONE if gap is None else TableCell(p_words(gap.p)[2:].removeprefix("= "), gap.p, source),
                TableCell(f"{len(runs)} of {answer.group.part.compared_with}"),
                TableCell("; ".join(filter(None, [entry.reason or "compared", *_remarks(answer, entry)]))),
            ]
        )
    seeds = "fresh seeds that all compared contestants have in common"
    if not answer.group.part.fresh:
        seeds = "the seeds that chose it, so that the losses are slightly optimistic"
    notes = [f"Each contestant at its own best learning rate, on {seeds}. Losses are in nats per token."]
    if answer.seed_table is not None:
        notes += [
            f"The intervals are to be compared with each other: they leave out that a seed moves all contestants "
            f"together. {CORRECTED}",
            "Bold is the lowest and underlined the second lowest. This is a ranking: the verdicts are in the table "
            "of pairs.",
        ]
    if any(row.stalled for entry in answer.entries for row in (*entry.finals.values(), *entry.abandoned)):
        notes.append(STALLED)
    table = Table(f"losses-{name}", f"{answer.group.title}: loss", columns, rows, notes)
    return ranked(table, ["val loss"], unranked)


def _plain_gap(answer: GroupAnswer, entry: Entry) -> TableCell:
    """The difference of two losses that have no noise to measure it by, such as those of one seed."""
    other = answer.by_label[answer.reference]
    if not (math.isfinite(entry.mean) and math.isfinite(other.mean)) or entry is other:
        return NONE
    runs = [", ".join(f"{row.run}.val_loss" for row in each.finals.values()) for each in (entry, other)]
    value = entry.mean - other.mean
    return TableCell(f"{value:+.4f}", value, f"mean({runs[0]}) - mean({runs[1]})")


def _remarks(answer: GroupAnswer, entry: Entry) -> list[str]:
    """What a reader must know about the loss of a contestant."""
    remarks = [] if entry.failed else [entry.stalled]
    label, share = answer.dominant or ("", 0.0)
    if label == entry.label and answer.gap(label, answer.reference):
        remarks.append(f"{share:.0%} of the pooled noise, paired p = {answer.paired_p(label, answer.reference):.2g}")
    return [*remarks, entry.step_down]


def _bowls_section(answers: Sequence[GroupAnswer]) -> Section | None:
    begun = [answer for answer in answers if any(len({row.rate for row in e.tries}) > 1 for e in answer.entries)]
    if not begun:
        return None
    columns = ["contestant", "rates tried", "best rate", "val loss there", "low end", "high end", "width", "state"]
    tables = []
    for answer in begun:
        rows = [_bowl_row(entry) for entry in answer.entries if entry.tries]
        tables.append(
            Table(f"bowls-{slug(answer.group.name)}", f"{answer.group.title}: learning rates", columns, rows)
        )
    paragraphs = [
        "How much a contestant depends on its learning rate. The width is the factor between the ends of the range "
        "in which the loss is at most 0.05 above the best. An end is open if it was not found in the range that was "
        "tried."
        + " These runs chose the rate, so that their losses are not those of the verdicts."
        * begun[0].group.part.fresh
    ]
    figures = [f"{slug(answer.group.name)}-bowls" for answer in begun]
    return Section("bowls", "Learning rates", paragraphs, tables, figures)


def _bowl_row(entry: Entry) -> list[TableCell]:
    rates = sorted({row.rate for row in entry.tries})
    tried = TableCell(f"{len(rates)}: {rates[0]:g} to {rates[-1]:g}")
    failed = [f"{row.state} at {row.rate:g}" for row in entry.tries if row.state != "finished"]
    failed += [f"stalled at {row.rate:g}" for row in entry.tries if row.stalled]
    words = {"tuned": "bracketed", "edge": "at an edge", "hopeless": "no loss at any rate"}.get(
        entry.state, entry.reason
    )
    state = TableCell("; ".join(dict.fromkeys([words, *failed])))
    bowl = entry.bowl
    if bowl is None:
        return [TableCell(entry.label), tried, NONE, NONE, NONE, NONE, NONE, state]
    source = ", ".join(f"{row.run}.val_loss" for row in entry.tries)
    ends = [
        TableCell("open") if end is None else TableCell(f"{end:.2g}", end, f"within 0.05 of the best of {source}")
        for end in (bowl.low, bowl.high)
    ]
    at_best = [row for row in entry.tries if row.rate == bowl.best]
    width = TableCell(width_words(bowl), bowl.at_least, "high end / low end")
    best = TableCell(f"{bowl.best:g}", bowl.best, f"argmin({source})")
    return [TableCell(entry.label), tried, best, mean_cell(at_best), *ends, width, state]


def _ladder_section(ladder: Ladder) -> Section | None:
    if not any(step.gap for climb in ladder.climbs for step in climb.steps):
        return None
    names = [f"{ladder.key} {size:g}" for size in ladder.sizes] or [each.group.name for each in ladder.answers]
    columns = ["contestant", *(f"gap, {name}" for name in names)]
    sized = bool(ladder.sizes)
    if sized:
        columns += ["change per doubling", "p", *(f"gain, {name}" for name in names)]
    rows = [_climb_row(ladder, climb, sized) for climb in ladder.climbs]
    notes = [f"The gap is the loss minus that of {ladder.reference} \u00b1 half its 95% interval. Below 0 is better."]
    if sized:
        notes += [
            f"The change is that of the gap per doubling of {ladder.key}: for each seed a least-squares slope, then "
            "their mean. p is that of no change, for this contestant alone.",
            f"The gain is how many times its FLOPs {ladder.reference} would need for the same loss, read between its "
            f"own sizes and not beyond. Few and small sizes are no scaling law.",
        ]
    title = f"Sizes: {ladder.title}"
    name = slug(ladder.part)
    table = Table(f"ladder-{name}", f"{ladder.title}: gap to {ladder.reference} by size", columns, rows, notes)
    return Section(f"ladder-{name}", title, (), [table], [f"{name}-ladder"])


def _climb_row(ladder: Ladder, climb: Climb, sized: bool) -> list[TableCell]:
    cells = [TableCell(climb.label)]
    for step in climb.steps:
        gap = step.gap
        if gap is None:
            reason = step.answer.by_label[climb.label].reason
            cells.append(TableCell("not compared" if step.answer.rows else "not run", source=reason))
        else:
            half = (gap.high - gap.low) / 2
            text = f"{gap.estimate:+.4f}" + (f" \u00b1 {half:.4f}" if math.isfinite(half) else "")
            cells.append(TableCell(text, gap.estimate, _layout_source(step.answer)))
    if sized:
        slope = None if climb.slope is None else climb.slope.interval
        if slope is None:
            cells += [NONE, NONE]
        else:
            text = f"{slope.estimate:+.4f} \u00b1 {(slope.high - slope.low) / 2:.4f}"
            source = f"mean over the seeds of the least-squares slopes of the gap over log2({ladder.key})"
            cells += [TableCell(text, slope.estimate, source), TableCell(f"{slope.p:.2g}", slope.p, source)]
        for step in climb.steps:
            factor = None if step.gain is None else step.gain.factor
            source = f"flops of {ladder.reference} at this loss / flops" if factor is not None else ""
            cells.append(TableCell(gain_words(step.gain), factor, source))
    return cells


def _pairs_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables, figures = [], []
    for answer in answers:
        if answer.seed_table is None:
            continue
        name, shown = slug(answer.group.name), [entry.label for entry in answer.compared][:MOST]
        rows = []
        for index, first in enumerate(shown):
            for second in shown[index + 1 :]:
                gap = answer.gap(first, second)
                assert gap is not None
                source = _layout_source(answer)
                rows.append(
                    [
                        TableCell(f"{first} - {second}"),
                        _gap_cell(gap, source),
                        TableCell(_interval(gap.low, gap.high), source=source),
                        TableCell(f"{gap.p:.2g}", gap.p, source),
                        TableCell(verdict_words(gap, first, second)),
                    ]
                )
        notes = [
            f"Below 0 the first is better. {CORRECTED} The noise is pooled over contestants: "
            f"{answer.seed_table.deviation:.4f} per run, {answer.seed_table.degrees} degrees of freedom, seeds "
            f"{', '.join(map(str, answer.seed_table.seeds))}."
        ]
        if len(answer.compared) > MOST:
            notes.append(
                f"The {MOST} lowest of {len(answer.compared)}; p counts all {len(answer.pairs):,} pairs of them."
            )
        columns = ["pair", "difference", "95% interval", "p", "verdict"]
        tables.append(Table(f"pairs-{name}", f"{answer.group.title}: pairs", columns, rows, notes, folded=True))
        figures += [f"{name}-pairs"] if answer.group.part.fresh else [f"{name}-answer", f"{name}-pairs"]
    return Section("pairs", "Every pair", (), tables, figures) if tables else None


def _costs_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables = []
    for answer in answers:
        base, found = costs(answer)
        if not found:
            continue
        rows = []
        for cost in found:
            cells = [
                (f"{cost.loss:.4f}", cost.loss, _layout_source(answer)),
                (f"{cost.flops:.3f}", cost.flops, f"flops / flops of {base}"),
                ("-" if cost.at_equal_flops is None else f"{cost.at_equal_flops:.4f}", cost.at_equal_flops, "curve"),
                (
                    "-" if cost.seconds is None else f"{cost.seconds:.3f}",
                    cost.seconds,
                    f"step_seconds, over {base}'s",
                ),
                (
                    "-" if cost.at_equal_seconds is None else f"{cost.at_equal_seconds:.4f}",
                    cost.at_equal_seconds,
                    "curve",
                ),
            ]
            rows.append([TableCell(cost.label), *(TableCell(t, v, s if v is not None else "") for t, v, s in cells)])
        columns = [
            "contestant", "loss, equal tokens", "FLOPs", "loss, equal FLOPs", "seconds", "loss, equal seconds",
        ]  # fmt: skip
        notes = [f"FLOPs and seconds of one update, relative to {base}. Seconds were measured side by side."]
        if any(cost.seconds is None for cost in found):
            notes.append(
                "A dash under seconds: not measured yet. They are measured when all runs of a group are done."
            )
        tables.append(Table(f"costs-{slug(answer.group.name)}", f"{answer.group.title}: cost", columns, rows, notes))
    if not tables:
        return None
    paragraphs = [
        "The loss of the tables above is at equal tokens. At equal FLOPs and at equal seconds, the loss is read from "
        "the curve of each run, where the cheapest contestant has ended. The learning rate of such a run was still "
        "high, because its schedule was not made for a shorter run: take these numbers as upper bounds."
    ]
    return Section("costs", "Loss per token, per FLOP and per second", paragraphs, tables)


def _failures_section(answers: Sequence[GroupAnswer], results: Mapping[Key, Result]) -> Section:
    failed = [(each, row) for each in answers for row in each.rows if row.state != FINISHED or row.stalled]
    title = "What collapsed or diverged"
    if not failed:
        return Section("failures", title, ["No run that has ended collapsed or diverged."])
    rows = [
        [
            TableCell(row.run),
            *map(TableCell, (row.group, row.contestant, f"{row.rate:g}", str(row.seed))),
            TableCell(stage_of(row.key, answer.group.part.fresh)),
            TableCell(row.outcome),
            TableCell(row.reason),
        ]
        for answer, row in failed
    ]
    counts = Counter("stalled" if row.stalled else row.state for _, row in failed)
    text = (
        f"{', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}. Collapsed: all tokens had one "
        "direction and the loss stayed that of token frequencies. Diverged: a guard stopped the run or marked it. A "
        f"contestant with such a run among its seeds is not compared. {STALLED}"
    )
    columns = ["run", "group", "contestant", "learning rate", "seed", "stage", "state", "why"]
    table = Table("failures", "Runs that collapsed, diverged or stalled", columns, rows)
    return Section(
        "failures", title, [text, *advice_words([results[r.key] for _, r in failed if r.key in results])], [table]
    )


def _missing_section(answers: Sequence[GroupAnswer]) -> Section | None:
    total = sum(sum(answer.missing.values()) for answer in answers)
    if not total and not any(answer.group.part.fresh for answer in answers):
        return None
    if not total:
        return Section("not-run", "What was not run", ["Everything that the plan asks for has been run."])
    rows = []
    names = {TUNE: "learning rates", FINAL: "fresh seeds", FLOOR: "noise floor", STRESS: "stress"}
    stages = [stage for stage in names if any(answer.missing[stage] for answer in answers)]
    for answer in answers:
        left = sum(answer.missing.values())
        state = "done" if not left else "not run" if not answer.rows else "unfinished"
        counts = [str(answer.missing[stage]) for stage in stages]
        rows.append([*map(TableCell, (answer.group.name, state, str(len(answer.rows)), *counts, str(left)))])
    text = (
        f"About {total} runs are still to come. A grid that has its best rate at an edge grows, and what cannot be "
        "tuned gets no seeds, so that the number is not exact. The same command goes on where it stopped."
    )
    columns = ["group", "state", "ended", *(names[stage] for stage in stages), "to come"]
    return Section("not-run", "What was not run", [text], [Table("not-run", "Runs still to come", columns, rows)])


def receipts(answers: Sequence[GroupAnswer], rows: Mapping[Key, Row]) -> list[Section]:
    asked = {row.key: row for answer in answers for row in answer.rows}
    runs = {row.run: row for row in asked.values()}
    hours = math.fsum(row.seconds * (row.threads or 1) for row in runs.values()) / 3600
    texts = {
        "runs": f"{len(runs)}, in {len(asked)} rows: parts that ask for the same run share it",
        "core-hours of training": f"{hours:.2f}, beside whatever else ran on the machine",
        "seeds": _distinct(str(row.seed) for row in sorted(asked.values(), key=lambda row: row.seed)),
        "commits": _distinct(row.commit for row in asked.values()),
        "torch": _distinct(row.torch for row in asked.values()),
        "processors": _distinct(row.processor for row in asked.values()),
        "threads": _distinct(str(row.threads) for row in asked.values()),
    }
    if len(rows) > len(asked):
        texts["rows that the plan does not ask for"] = f"{len(rows) - len(asked)}, in no table of this page"
    table = Table("receipts", "Receipts", ["what", "value"], [[TableCell(a), TableCell(b)] for a, b in texts.items()])
    text = (
        "Point at a number to see its source. RUN.KEY is the value of KEY in the row of that run in results.jsonl; "
        "tables.csv lists the same sources."
    )
    fresh = {answer.group.name: answer.group.part.fresh for answer in answers}
    every = [
        [
            TableCell(row.run),
            *map(TableCell, (row.group, row.contestant, f"{row.rate:g}", str(row.seed))),
            TableCell(stage_of(row.key, fresh[row.group])),
            mean_cell([row]),
            TableCell(f"{row.seconds:.1f}", row.seconds, f"{row.run}.seconds"),
            TableCell(row.outcome),
        ]
        for row in asked.values()
    ]
    columns = ["run", "group", "contestant", "learning rate", "seed", "stage", "val loss", "seconds", "state"]
    return [
        Section("receipts", "Receipts", [text], [table]),
        Section("runs", "Every run", (), [Table("runs", "Every run", columns, every)], folded=True),
    ]


def _distinct(values: Iterable[str | None]) -> str:
    found = list(dict.fromkeys("unknown" if value is None else value for value in values))
    return ", ".join(found) if found else "none"
