"""The sections that depend only on rows. Every number carries its source: RUN.KEY is a key of that run's row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from spheret.lab.answers import GroupAnswer
from spheret.lab.endpoints import EndpointAnswer, Ladder, PairedComparison, Stress
from spheret.lab.entries import Entry
from spheret.lab.page.section import Section, Table, TableCell
from spheret.lab.rows import FINISHED, Key, Row
from spheret.lab.sections.charts import MOST, answer_chart, bowls_chart, curves_chart, ladder_chart, slug
from spheret.lab.seed_table import Pair, mean_interval
from spheret.lab.stages import stage_of
from spheret.lab.statistics import ends
from spheret.lab.words import answer_sentence, limits, p_words, verdict_words
from spheret.support.charts import Chart

NONE = TableCell("-")
CORRECTED = "p is corrected for the number of pairs (Holm)."


def answer_sections(
    answers: Sequence[GroupAnswer],
    ladders: Iterable[Ladder],
    endpoints: Sequence[EndpointAnswer] = (),
) -> list[Section]:
    """The sections of every page, the answer first."""
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
        _failures_section(answers),
        _missing_section(answers),
    ]
    return [section for section in parts if section is not None]


def mean_cell(rows: Sequence[Row]) -> TableCell:
    """The mean loss of some runs."""
    if not rows or any(row.val_loss is None for row in rows):
        return NONE
    value = math.fsum(row.loss for row in rows) / len(rows)
    names = ", ".join(f"{row.run}.val_loss" for row in rows)
    return TableCell(f"{value:.4f}", value, f"mean({names})" if len(rows) > 1 else names)


def _gap_cell(gap: Pair | None, source: str) -> TableCell:
    return NONE if gap is None else TableCell(f"{gap.estimate:+.4f}", gap.estimate, source)


def _p_cell(p: float, source: str) -> TableCell:
    return TableCell(p_words(p)[2:].removeprefix("= "), p, source)


def _layout_source(answer: GroupAnswer) -> str:
    return f"two-way layout of the val_loss of {answer.group.name}"


def _texts(*words: str) -> list[TableCell]:
    return list(map(TableCell, words))


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
    """The tables. None if the plan has no endpoints."""
    if not answers:
        return None
    lines = [line for answer in answers for line in (*answer.comparisons, answer.slope) if line is not None]
    stressed = [stress for answer in answers for stress in answer.stresses]
    tables = [*([_comparisons_table(lines)] if lines else []), *([_stress_table(stressed)] if stressed else [])]
    text = "The plan fixed these questions before its first run."
    return Section("endpoints", "The endpoints of the plan", [text], tables)


def _comparisons_table(lines: Sequence[PairedComparison]) -> Table:
    rows = []
    for line in lines:
        source = f"val_loss of {line.first} minus {line.second} by seed, {line.where}"
        cells = [NONE, NONE, NONE]
        if line.interval is not None and line.p is not None:
            cells = [
                TableCell(f"{line.interval.estimate:+.4f}", line.interval.estimate, source),
                TableCell(ends(line.interval.low, line.interval.high), source=source),
                _p_cell(line.p, source),
            ]
        margin = "" if line.margin is None else f", within {line.margin:g}"
        pair, verdict = f"{line.first} - {line.second}{margin}", ": ".join(filter(None, [line.verdict, line.trouble]))
        rows.append([*_texts(pair, line.where), *cells, *_texts(f"{line.seeds} of {line.planned}", verdict)])
    notes = [
        "Paired by seed: two contestants see the same batches. Below 0 the first is better. The interval is of 95%, "
        "by Student's t over the seeds. The p-values are not corrected: the plan fixed these questions.",
        "Per doubling: for each seed a least-squares slope of the difference over log2 of the size, then their mean.",
    ]
    if any(line.margin is not None for line in lines):
        notes.append(
            "Within a margin: equivalent if two one-sided t-tests at 5% reject a difference as large as the margin "
            "on either side. The interval is then of 90%, and p is the larger of the two. Failing to show "
            "equivalence does not show a difference."
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
        count = ": ".join(filter(None, [f"{len(each.runs)} of {each.planned}", each.trouble]))
        rows.append(_texts(each.label, each.where, rate, *counts, seeds, count))
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
    rows = []
    for entry in answer.entries:
        runs = list(entry.finals.values())
        interval, gap = NONE, answer.gap(entry.label, answer.reference)
        if answer.seed_table is not None and entry.label in answer.means:
            runs = [entry.finals[seed] for seed in answer.seed_table.seeds]
            low, high = mean_interval(answer.seed_table, entry.label)
            interval = TableCell(f"{low:.4f} to {high:.4f}" if math.isfinite(high - low) else "none", source=source)
        rate = NONE if entry.rate is None else TableCell(f"{entry.rate:g}", entry.rate, "tuning")
        loss = NONE if entry.failed else mean_cell(runs)
        below = _gap_cell(gap, source) if answer.seed_table is not None else _plain_gap(answer, entry)
        p = NONE if gap is None else _p_cell(gap.adjusted, source)
        state = "; ".join(filter(None, [entry.reason or "compared", entry.step_down]))
        seeds = f"{len(runs)} of {answer.group.part.compared_with}"
        rows.append([TableCell(entry.label), rate, loss, interval, below, p, *_texts(seeds, state)])
    for label, counted in answer.ngrams.items():
        number = TableCell(f"{counted:.4f}", counted, "counts of the training windows, on the validation windows")
        rows.append([TableCell(label), NONE, number, NONE, NONE, NONE, NONE, TableCell("counts the same tokens")])
    seeds = "fresh seeds that all compared contestants have in common"
    if not answer.group.part.fresh:
        seeds = "the seeds that chose it, so that the losses are slightly optimistic"
    notes = [f"Each contestant at its own best learning rate, on {seeds}. Losses are in nats per token."]
    if answer.seed_table is not None:
        notes += [
            f"The intervals are to be compared with each other: they leave out that a seed moves all contestants "
            f"together. {CORRECTED}",
        ]
    return Table(f"losses-{name}", f"{answer.group.title}: loss", columns, rows, notes)


def _plain_gap(answer: GroupAnswer, entry: Entry) -> TableCell:
    """The difference of two losses without a noise to measure it by, such as two losses of one seed."""
    other = answer.by_label[answer.reference]
    if not (math.isfinite(entry.mean) and math.isfinite(other.mean)) or entry is other:
        return NONE
    value = entry.mean - other.mean
    return TableCell(f"{value:+.4f}", value, f"val loss of {entry.label} minus val loss of {other.label}")


def _bowls_section(answers: Sequence[GroupAnswer]) -> Section | None:
    begun = [answer for answer in answers if any(len({row.rate for row in e.tries}) > 1 for e in answer.entries)]
    if not begun:
        return None
    columns = ["contestant", "rates tried", "best rate", "val loss there", "state"]
    tables = []
    for answer in begun:
        rows = [_bowl_row(entry) for entry in answer.entries if entry.tries]
        name = f"bowls-{slug(answer.group.name)}"
        tables.append(Table(name, f"{answer.group.title}: learning rates", columns, rows))
    words = ["How the loss of a contestant depends on its learning rate."]
    if begun[0].group.part.fresh:
        words.append("These runs chose the rate, so no verdict uses their losses.")
    return Section("bowls", "Learning rates", [" ".join(words)], tables, _shown(map(bowls_chart, begun)))


def _bowl_row(entry: Entry) -> list[TableCell]:
    rates, chosen = sorted({row.rate for row in entry.tries}), entry.search.best
    failed = [f"{row.state} at {row.rate:g}" for row in entry.tries if row.state != FINISHED]
    words = {"tuned": "bracketed", "edge": "at an edge", "hopeless": "no loss at any rate"}
    source = ", ".join(f"{row.run}.val_loss" for row in entry.tries)
    return [
        TableCell(entry.label),
        TableCell(f"{len(rates)}: {rates[0]:g} to {rates[-1]:g}"),
        NONE if chosen is None else TableCell(f"{chosen:g}", chosen, f"argmin({source})"),
        mean_cell([row for row in entry.tries if row.rate == chosen]),
        TableCell("; ".join(dict.fromkeys([words.get(entry.state, entry.reason), *failed]))),
    ]


def _ladder_section(ladder: Ladder) -> Section | None:
    gaps = {label: ladder.gaps(label) for label in ladder.schemes}
    if not any(gap for found in gaps.values() for gap in found):
        return None
    columns = ["contestant", *(f"gap, {name}" for name in ladder.rungs)]
    notes = [f"The gap is the loss minus {ladder.reference}'s \u00b1 half its 95% interval. Below 0 is better."]
    rows = [
        [TableCell(label), *(_rung_cell(a, label, gap) for a, gap in zip(ladder.answers, found, strict=True))]
        for label, found in gaps.items()
    ]
    name = f"ladder-{slug(ladder.part.name)}"
    table = Table(name, f"{ladder.title}: gap to {ladder.reference} by size", columns, rows, notes)
    return Section(name, f"Sizes: {ladder.title}", (), [table], _shown([ladder_chart(ladder)]))


def _rung_cell(answer: GroupAnswer, label: str, gap: Pair | None) -> TableCell:
    if gap is None:
        return TableCell("not compared" if answer.rows else "not run", source=answer.by_label[label].reason)
    half = (gap.high - gap.low) / 2
    text = f"{gap.estimate:+.4f}" + (f" \u00b1 {half:.4f}" if math.isfinite(half) else "")
    return TableCell(text, gap.estimate, _layout_source(answer))


def _pairs_section(answers: Sequence[GroupAnswer]) -> Section | None:
    tables, charts = [], list[Chart | None]()
    for answer in answers:
        if answer.seed_table is None:
            continue
        name, shown = slug(answer.group.name), [entry.label for entry in answer.compared][:MOST]
        rows = []
        source = _layout_source(answer)
        for first, second in combinations(shown, 2):
            gap = answer.gap(first, second)
            assert gap is not None
            interval = TableCell(ends(gap.low, gap.high), source=source)
            p = TableCell(f"{gap.adjusted:.2g}", gap.adjusted, source)
            verdict = TableCell(verdict_words(gap, first, second))
            rows.append([TableCell(f"{first} - {second}"), _gap_cell(gap, source), interval, p, verdict])
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
    shown = {entry.label: entry for entry in answer.entries if entry.finals}
    if not shown:
        return None
    base = shown.get(answer.reference, next(iter(shown.values())))
    rows, base_flops = [], _step_flops(base)
    for label, entry in shown.items():
        flops, seconds = _step_flops(entry) / base_flops, entry.step_seconds or math.nan
        ratio, runs = seconds / (base.step_seconds or math.nan), ", ".join(row.run for row in entry.finals.values())
        cost = TableCell(f"{flops:.3f}", flops, "flops / steps of a run")
        time = TableCell(f"{1000 * seconds:.1f}", 1000 * seconds, f"least seconds / steps of {runs}")
        rows.append(
            [TableCell(label), cost, time, TableCell(f"{ratio:.3f}", ratio, f"that over the one of {base.label}")]
        )
    notes = [
        f"FLOPs and seconds of one update, relative to {base.label}. The seconds are from the fastest run of "
        "each contestant, beside whatever else ran."
    ]
    columns = ["contestant", "FLOPs", "ms per step", "seconds"]
    return Table(f"costs-{slug(answer.group.name)}", f"{answer.group.title}: cost of a step", columns, rows, notes)


def _step_flops(entry: Entry) -> float:
    row = next(iter(entry.finals.values()))
    return row.flops / row.steps


def _failures_section(answers: Sequence[GroupAnswer]) -> Section:
    failed = [row for each in answers for row in each.rows if row.state != FINISHED]
    title = "What collapsed or diverged"
    if not failed:
        return Section("failures", title, ["No run that has ended collapsed or diverged."])
    rows = [_texts(row.run, row.group, row.contestant, row.state, row.reason) for row in failed]
    counts = Counter[str](row.state for row in failed)
    text = (
        f"{', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}. Collapsed: all tokens had one "
        "direction and the loss stayed at the unigram entropy. Diverged: a guard stopped the run or marked it. A "
        "contestant with such a run among its seeds is not compared. `spheret inspect RUN` says where it began and "
        "what to try."
    )
    columns = ["run", "group", "contestant", "state", "why"]
    return Section("failures", title, [text], [Table("failures", "Runs that collapsed or diverged", columns, rows)])


def _missing_section(answers: Sequence[GroupAnswer]) -> Section | None:
    left = {answer.group.name: answer.missing for answer in answers}
    if not any(left.values()) and not any(answer.group.part.fresh for answer in answers):
        return None
    words = [f"{name} about {count}" for name, count in left.items() if count]
    text = f"Runs still to come: {', '.join(words)}. The same command continues."
    return Section(
        "not-run", "What was not run", [text if words else "Everything that the plan asks for has been run."]
    )


def receipts(answers: Sequence[GroupAnswer], rows: Mapping[Key, Row]) -> list[Section]:
    """Where the numbers are from."""
    asked = {row.key: row for answer in answers for row in answer.rows}
    runs = {row.run: row for row in asked.values()}
    hours = math.fsum(row.seconds * (row.threads or 1) for row in runs.values()) / 3600
    left = len(rows) - len(asked)
    others = f" {left} further rows are not asked for by the plan, and are in no table." if left > 0 else ""
    texts = [
        f"{len(runs)} runs in {len(asked)} rows: parts that ask for the same run share it.{others} {hours:.2f} "
        "core-hours of training, beside whatever else ran on the machine.",
        f"Commits: {_distinct(row.commit for row in asked.values())}. torch: "
        f"{_distinct(row.torch for row in asked.values())}. Processors: "
        f"{_distinct(row.processor for row in asked.values())}.",
        "Point at a number to see its source. RUN.KEY is the value of KEY in the row of that run in results.jsonl, "
        "which follows from its metrics.jsonl.",
    ]
    fresh = {answer.group.name: answer.group.part.fresh for answer in answers}
    every = [
        [
            *_texts(row.run, row.group, row.contestant, f"{row.rate:g}", str(row.seed)),
            TableCell(stage_of(row.key, fresh[row.group])),
            mean_cell([row]),
            TableCell(f"{row.seconds:.1f}", row.seconds, f"{row.run}.seconds"),
            TableCell(row.state),
        ]
        for row in asked.values()
    ]
    columns = ["run", "group", "contestant", "learning rate", "seed", "stage", "val loss", "seconds", "state"]
    return [
        Section("receipts", "Receipts", texts),
        Section("runs", "Every run", (), [Table("runs", "Every run", columns, every)], folded=True),
    ]


def _distinct(values: Iterable[str | None]) -> str:
    found = list(dict.fromkeys("unknown" if value is None else value for value in values))
    return ", ".join(found) if found else "none"
