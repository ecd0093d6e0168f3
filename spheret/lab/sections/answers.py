"""The sections that rows alone decide. Every number carries its source: RUN.KEY is a key of that run's row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from spheret.lab.answers import GroupAnswer
from spheret.lab.endpoints import EndpointAnswer, Ladder, PairedComparison, Stress
from spheret.lab.entries import Entry
from spheret.lab.page.section import Section, Table, TableCell, ranked
from spheret.lab.rows import FINAL, FINISHED, STRESS, TUNE, Key, Row
from spheret.lab.runs import Result
from spheret.lab.sections.charts import MOST, answer_chart, bowls_chart, curves_chart, ladder_chart, slug
from spheret.lab.seed_table import Pair, mean_interval
from spheret.lab.stages import stage_of
from spheret.lab.words import answer_sentence, endpoint_sentence, limits, p_words, verdict_words, width_words
from spheret.observe.inspect.failure import failure_of
from spheret.support.charts import Chart

NONE = TableCell("-")
# a page explains so many failed runs in words; the table has them all
MOST_FAILURES = 6
CORRECTED = "p is corrected for the number of pairs (Holm)."
STALLED = (
    "Stalled: a finished run that was at the loss of token frequencies, within 3%, for a fifth of its updates or "
    "more, or at its end."
)


def answer_sections(
    answers: Sequence[GroupAnswer],
    ladders: Iterable[Ladder],
    endpoints: Sequence[EndpointAnswer] = (),
    results: Mapping[Key, Result] | None = None,
) -> list[Section]:
    """The sections of every page, the answer first. results: the runs whose directories are here, by their keys."""
    compared = [answer for answer in answers if answer.group.part.compared_with]
    fresh = [answer for answer in compared if answer.group.part.fresh]
    # what was not run at all has its place at the end
    begun = [each for place, each in enumerate(answers) if each.rows or not place]
    parts = [
        *(_answer_section(each, first=not place) for place, each in enumerate(begun)),
        _endpoints_section(endpoints),
        _losses_section(fresh),
        _curves_section(fresh),
        _bowls_section(compared),
        *(_ladder_section(each) for each in ladders if len(each.answers) > 1 and each.part.compared_with),
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


def _gap_cell(gap: Pair | None, source: str) -> TableCell:
    return NONE if gap is None else TableCell(f"{gap.estimate:+.4f}", gap.estimate, source)


def _p_cell(p: float, source: str) -> TableCell:
    return TableCell(p_words(p)[2:].removeprefix("= "), p, source)


def _interval(low: float, high: float) -> str:
    return f"{low:+.4f} to {high:+.4f}" if math.isfinite(high - low) else "none"


def _layout_source(answer: GroupAnswer) -> str:
    return f"two-way layout of the val_loss of {answer.group.name}"


def _shown(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _answer_section(answer: GroupAnswer, first: bool) -> Section:
    name = slug(answer.group.name)
    paragraphs = [answer_sentence(answer), *(limits(answer) if answer.rows else [])]
    title = f"The answer: {answer.group.title}" if first else answer.group.title
    if answer.group.part.fresh:
        chart = answer_chart(answer) if answer.group.part.compared_with else bowls_chart(answer)
        return Section(f"answer-{name}", title, paragraphs, (), _shown([chart]), opening=first)
    # the whole of a race on one screen
    table = _losses_table(answer).without_empty_columns
    return Section(f"answer-{name}", title, paragraphs, [table], _shown([curves_chart(answer)]), opening=first)


def _curves_section(answers: Sequence[GroupAnswer]) -> Section | None:
    charts = _shown(map(curves_chart, answers))
    return Section("curves", "Curves", charts=charts) if charts else None


def _endpoints_section(answers: Sequence[EndpointAnswer]) -> Section | None:
    """The sentences and the tables. None if the plan has no endpoints."""
    if not answers:
        return None
    lines = [line for answer in answers for line in (*answer.comparisons, answer.slope) if line is not None]
    stressed = [stress for answer in answers for stress in answer.stresses]
    tables = [*([_comparisons_table(lines)] if lines else []), *([_stress_table(stressed)] if stressed else [])]
    sentences = ["The plan fixed these questions before its first run.", *map(endpoint_sentence, answers)]
    return Section("endpoints", "The endpoints of the plan", sentences, tables)


def _comparisons_table(lines: Sequence[PairedComparison]) -> Table:
    rows = []
    for line in lines:
        source = f"val_loss of {line.first} minus {line.second} by seed, {line.where}"
        cells = [NONE, NONE, NONE]
        if line.interval is not None and line.p is not None:
            cells = [
                TableCell(f"{line.interval.estimate:+.4f}", line.interval.estimate, source),
                TableCell(line.interval.text, source=source),
                _p_cell(line.p, source),
            ]
        margin = "" if line.margin is None else f", within {line.margin:g}"
        rows.append(
            [
                TableCell(f"{line.first} - {line.second}{margin}"),
                TableCell(line.where),
                *cells,
                TableCell(f"{line.seeds} of {line.planned}"),
                TableCell(f"{line.verdict}: {line.trouble}" if line.trouble else line.verdict),
            ]
        )
    notes = [
        "Paired by seed: two contestants see the same batches. Below 0 the first is better. The interval is of 95%, "
        "by Student's t over the seeds. The p-values are not corrected: the plan fixed these questions.",
        "Per doubling: for each seed a least-squares slope of the difference over log2 of the size, then their mean.",
    ]
    if any(line.margin is not None for line in lines):
        notes.append(
            "Within a margin: equivalent if two one-sided t-tests at 5% reject a difference as large as the margin "
            "on either side. The interval is then of 90%, and p is the larger of the two. Not shown does not mean "
            "different."
        )
    columns = ["endpoint", "size", "difference", "interval", "p", "seeds", "answer"]
    return Table("endpoints", "Endpoints", columns, rows, notes)


def _stress_table(stresses: Sequence[Stress]) -> Table:
    rows = []
    begun = [each for each in stresses if each.runs or each.trouble]
    for each in begun:
        states = Counter[str](row.state for row in each.runs.values())
        rate = next((f"{row.rate:g}" for row in each.runs.values()), "-")
        counts = [str(states[state]) if each.runs else "-" for state in (FINISHED, "collapsed", "diverged")]
        seeds = ", ".join(str(row.seed) for row in each.failed) or "-"
        count = TableCell(f"{len(each.runs)} of {each.planned}" + (f": {each.trouble}" if each.trouble else ""))
        rows.append([*map(TableCell, (each.label, each.where, rate, *counts, seeds)), count])
    columns = ["contestant", "size", "rate", "finished", "collapsed", "diverged", "failed seeds", "seeds"]
    left = len(stresses) - len(begun)
    notes = [f"Not run: {left} of {len(stresses)} contestants and sizes."] if left else []
    return Table("stress", "Who fails at a multiple of the best rate", columns, rows, notes)


def _losses_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables = [_losses_table(answer) for answer in answers if answer.rows]
    return Section("losses", "Losses", (), tables) if tables else None


def _losses_table(answer: GroupAnswer) -> Table:
    name, source = slug(answer.group.name), _layout_source(answer)
    columns = [
        "contestant", "learning rate", "val loss", "95% interval", f"minus {answer.reference}", "p", "seeds", "state",
    ]  # fmt: skip
    rows, unranked = [], []
    for entry in answer.entries:
        runs = list(entry.finals.values())
        interval, gap = NONE, answer.gap(entry.label, answer.reference)
        if answer.seed_table is not None and entry.label in answer.means:
            runs = [entry.finals[seed] for seed in answer.seed_table.seeds]
            low, high = mean_interval(answer.seed_table, entry.label)
            interval = TableCell(f"{low:.4f} to {high:.4f}" if math.isfinite(high - low) else "none", source=source)
        else:
            unranked.append(entry.label)
        rate = NONE if entry.rate is None else TableCell(f"{entry.rate:g}", entry.rate, "tuning")
        rows.append(
            [
                TableCell(entry.label),
                rate,
                NONE if entry.failed else mean_cell(runs),
                interval,
                _gap_cell(gap, source) if answer.seed_table is not None else _plain_gap(answer, entry),
                NONE if gap is None else _p_cell(gap.adjusted, source),
                TableCell(f"{len(runs)} of {answer.group.part.compared_with}"),
                TableCell("; ".join(filter(None, [entry.reason or "compared", *_remarks(answer, entry)]))),
            ]
        )
    for label, loss in answer.ngrams.items():
        unranked.append(label)
        number = TableCell(f"{loss:.4f}", loss, "counts of the training windows, on the validation windows")
        rows.append([TableCell(label), NONE, number, NONE, NONE, NONE, NONE, TableCell("counts the same tokens")])
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
    return Section("bowls", "Learning rates", paragraphs, tables, _shown(map(bowls_chart, begun)))


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
    gaps = {label: ladder.gaps(label) for label in ladder.schemes}
    if not any(gap for found in gaps.values() for gap in found):
        return None
    columns = ["contestant", *(f"gap, {name}" for name in ladder.rungs)]
    notes = [f"The gap is the loss minus that of {ladder.reference} \u00b1 half its 95% interval. Below 0 is better."]
    rows = [
        [TableCell(label), *(_rung_cell(a, label, gap) for a, gap in zip(ladder.answers, found, strict=True))]
        for label, found in gaps.items()
    ]
    if ladder.sizes:
        columns += ["change per doubling", "p"]
        rows = [[*row, *_slope_cells(ladder, label)] for label, row in zip(gaps, rows, strict=True)]
        notes.append(
            f"The change is that of the gap per doubling of {ladder.key}: for each seed a least-squares slope, then "
            "their mean. p is that of no change, for this contestant only."
        )
    name = f"ladder-{slug(ladder.part.name)}"
    table = Table(name, f"{ladder.title}: gap to {ladder.reference} by size", columns, rows, notes)
    return Section(name, f"Sizes: {ladder.title}", (), [table], _shown([ladder_chart(ladder)]))


def _rung_cell(answer: GroupAnswer, label: str, gap: Pair | None) -> TableCell:
    if gap is None:
        return TableCell("not compared" if answer.rows else "not run", source=answer.by_label[label].reason)
    half = (gap.high - gap.low) / 2
    text = f"{gap.estimate:+.4f}" + (f" \u00b1 {half:.4f}" if math.isfinite(half) else "")
    return TableCell(text, gap.estimate, _layout_source(answer))


def _slope_cells(ladder: Ladder, label: str) -> list[TableCell]:
    found = ladder.slope(label, ladder.reference)
    slope = None if found is None else found.interval
    if slope is None:
        return [NONE, NONE]
    text = f"{slope.estimate:+.4f} \u00b1 {(slope.high - slope.low) / 2:.4f}"
    source = f"mean over the seeds of the least-squares slopes of the gap over log2({ladder.key})"
    return [TableCell(text, slope.estimate, source), TableCell(f"{slope.p:.2g}", slope.p, source)]


def _pairs_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables, charts = [], list[Chart | None]()
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
                        TableCell(f"{gap.adjusted:.2g}", gap.adjusted, source),
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
        charts += [] if answer.group.part.fresh else [answer_chart(answer)]
    return Section("pairs", "Every pair", (), tables, _shown(charts)) if tables else None


def _costs_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables = [table for answer in answers if (table := _costs_table(answer)) is not None]
    return Section("costs", "What a step costs", (), tables) if tables else None


def _costs_table(answer: GroupAnswer) -> Table | None:
    """FLOPs and seconds of one update, relative to the reference or else to the best."""
    shown = answer.compared if answer.group.part.fresh else answer.entries
    first = {entry.label: next(iter(entry.finals.values())) for entry in shown if entry.finals}
    if not first:
        return None
    name = answer.reference if answer.reference in first else next(iter(first))
    base, rows = first[name], []
    for label, row in first.items():
        flops = (row.flops / row.steps) / (base.flops / base.steps)
        cells = [
            TableCell(label),
            TableCell(f"{flops:.3f}", flops, f"{row.run}.flops / {base.run}.flops"),
            NONE,
            NONE,
        ]
        if row.step_seconds is not None and base.step_seconds is not None:
            ratio, source = row.step_seconds / base.step_seconds, f"{row.run}.step_seconds"
            cells[2] = TableCell(f"{1000 * row.step_seconds:.1f}", 1000 * row.step_seconds, f"1000 * {source}")
            cells[3] = TableCell(f"{ratio:.3f}", ratio, f"{source} / {base.run}.step_seconds")
        rows.append(cells)
    notes = [f"FLOPs and seconds of one update, relative to {name}. Seconds were measured side by side."]
    if any(row.step_seconds is None for row in first.values()):
        notes.append(
            "A dash: not measured. It is measured when all runs of a group are done and the machine is quiet."
        )
    columns = ["contestant", "FLOPs", "ms per step", "seconds"]
    return Table(f"costs-{slug(answer.group.name)}", f"{answer.group.title}: cost of a step", columns, rows, notes)


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
    advice = _advice([results[row.key] for _, row in failed if row.key in results])
    return Section("failures", title, [text, *advice], [table])


def _advice(results: Sequence[Result]) -> list[str]:
    """Where the failure of each of the first runs began and what to try; empty if no run failed."""
    found = [(result, failure) for result in results if (failure := failure_of(result.run, result.lines)) is not None]
    texts = [
        f"{result.label}, learning rate {result.rate:g}, seed {result.seed}. {failure.sentence} {failure.what_to_try}"
        for result, failure in found[:MOST_FAILURES]
    ]
    if len(found) > MOST_FAILURES:
        texts.append(f"The table has the other {len(found) - MOST_FAILURES} runs that failed.")
    if texts:
        texts.append(
            "The flags are for a new run. A resumed run would compute the same values again. --set "
            "train.init_from=RUN starts from the weights of a checkpoint that was saved before the step. spheret "
            "inspect shows every sublayer of one."
        )
    return texts


def _missing_section(answers: Sequence[GroupAnswer]) -> Section | None:
    total = sum(sum(answer.missing.values()) for answer in answers)
    if not total and not any(answer.group.part.fresh for answer in answers):
        return None
    if not total:
        return Section("not-run", "What was not run", ["Everything that the plan asks for has been run."])
    rows = []
    names = {TUNE: "learning rates", FINAL: "fresh seeds", STRESS: "stress"}
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
    """Where the numbers are from."""
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
        "Point at a number to see its source. RUN.KEY is the value of KEY in the row of that run in results.jsonl, "
        "which follows from its metrics.jsonl."
    )
    fresh = {answer.group.name: answer.group.part.fresh for answer in answers}
    every = [
        [
            *map(TableCell, (row.run, row.group, row.contestant, f"{row.rate:g}", str(row.seed))),
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
