"""The section on the endpoints of a plan: one sentence each, and tables of every comparison and every count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spheret.lab.endpoints import EndpointAnswer, PairedComparison, Stress
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.rows import FINISHED
from spheret.lab.sections.section import Section
from spheret.lab.words import listed, p_words

NONE = TableCell("-")


def endpoint_sentence(answer: EndpointAnswer) -> str:
    """The answer of an endpoint, as far as it is known."""
    if answer.endpoint.kind == "stress":
        return _stress_sentence(answer)
    if answer.endpoint.kind == "equivalence":
        counts = Counter(each.verdict for each in answer.comparisons)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return (
            f"{listed(answer.endpoint.contestants)}, within {answer.endpoint.margin:g} of each other: of "
            f"{len(answer.comparisons)} pairs and sizes, {verdicts}."
        )
    first, second = answer.endpoint.contestants
    words = [_gap_words(each) for each in answer.comparisons]
    return f"{first} against {second}: {'; '.join(words)}{_slope_words(answer.slope)}."


def _gap_words(each: PairedComparison) -> str:
    if each.verdict in ("not run", "failed") or each.interval is None:
        return f"{each.where}: {_without_verdict(each)}"
    if each.verdict == "no significant difference":
        return f"{each.where}: no significant difference ({each.interval.estimate:+.3f})"
    side = "below" if each.verdict == "lower" else "above"
    return f"{each.where}: {abs(each.interval.estimate):.3f} {side}"


def _slope_words(slope: PairedComparison | None) -> str:
    if slope is None:
        return ""
    if slope.verdict in ("not run", "failed") or slope.interval is None:
        return f"; {slope.where}: {_without_verdict(slope)}"
    change = f"{slope.interval.estimate:+.3f} {slope.where}"
    if slope.verdict == "no significant difference":
        return f"; no significant change with size ({change})"
    return f"; the difference changes by {change} ({p_words(slope.p or 0.0)})"


def _without_verdict(each: PairedComparison) -> str:
    return f"no mean, {each.trouble}" if each.verdict == "failed" else f"not run ({each.trouble})"


def _stress_sentence(answer: EndpointAnswer) -> str:
    begun = [each for each in answer.stresses if each.runs]
    opening = f"At {answer.factor:g} times the best rate"
    if not begun:
        return f"{opening}: not run."
    by_rung: dict[str, list[str]] = {}
    for each in begun:
        some = "" if len(each.runs) == each.planned else f", {each.planned} planned"
        words = f"{each.label} in {len(each.failed)} of {len(each.runs)} seeds{some}"
        by_rung.setdefault(each.where, []).append(words)
    rungs = [f"{where}: {listed(names)}" for where, names in by_rung.items()]
    return f"{opening}, collapsed or diverged: {'; '.join(rungs)}."


def endpoints_section(answers: Sequence[EndpointAnswer]) -> Section | None:
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
                TableCell(p_words(line.p)[2:].removeprefix("= "), line.p, source),
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
