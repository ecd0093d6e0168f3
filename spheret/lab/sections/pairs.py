"""The comparisons of a report: one matrix of all pairs, and the list of their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import RunGroup
from spheret.lab.sections.sections import Section
from spheret.lab.verdicts import EVALUATION_NOISE, FALSE_WINNER, Comparison, between, comparisons

BETTER, WORSE = "better", "worse"


def comparisons_section(group: RunGroup) -> Section:
    compared = comparisons(group)
    if not compared:
        return Section("comparisons", "Comparisons", ["There is one contestant, so there is nothing to compare."])
    tables = [_matrix(group, compared), _verdicts(compared)]
    return Section(
        "comparisons", "Comparisons", _words(group, compared), [t for t in tables if t is not None], ["differences"]
    )


def _words(group: RunGroup, compared: Sequence[Comparison]) -> list[str]:
    """What the matrix can tell, and what it leaves out."""
    paragraphs = []
    seen = [comparison.smallest for comparison in compared if comparison.smallest is not None]
    if group.one_seed:
        paragraphs.append(
            "One seed: these are plain differences, and no pair has a winner. Another seed would change each of them "
            "by an unknown amount. The interval of a pair, which the cell shows when you point at it, covers "
            f"{EVALUATION_NOISE}."
        )
    elif seen:
        low, high = min(seen), max(seen)
        span = f"{median(seen):.3f} for the median pair" + (
            f", {low:.3f} to {high:.3f} over all" if f"{low:.3f}" != f"{high:.3f}" else ""
        )
        paragraphs.append(
            f"The smallest true difference that {len(group.seeds)} seeds would have shown with a probability of 80%: "
            f"{span}. A smaller one may be there and not be seen."
        )
    left_out = {
        each: comparison.verdict
        for comparison in compared
        if comparison.interval is None
        for each in (comparison.first, comparison.second)
        if each not in _compared_labels(group, compared)
    }
    if left_out:
        paragraphs.append(f"Without a comparison, and not in the matrix: {', '.join(left_out)}.")
    return paragraphs


def _compared_labels(group: RunGroup, compared: Sequence[Comparison]) -> list[str]:
    with_interval = {label for each in compared if each.interval is not None for label in (each.first, each.second)}
    return [label for label in group.contestants if label in with_interval]


def _matrix(group: RunGroup, compared: Sequence[Comparison]) -> Table | None:
    """Every contestant minus every other one."""
    labels = _compared_labels(group, compared)
    if not labels:
        return None
    rows = [[TableCell(first), *(_cell(between(compared, first, second)) for second in labels)] for first in labels]
    notes = [
        "The validation loss of the row minus that of the column, in nats per token: below 0 the row is better. "
        "Point at a cell for its 95% interval and its source.",
        *_noise_notes({comparison.noise for comparison in compared}),
    ]
    if not group.one_seed:
        notes.append(
            f"p is after Holm's correction for all {len(compared)} pairs. A coloured cell has a winner: p below "
            f"{FALSE_WINNER}, and both best learning rates inside the grid."
        )
    return Table("matrix", "Every pair: row minus column", ["contestant", *labels], rows, notes, kind="matrix")


def _cell(comparison: Comparison | None) -> TableCell:
    if comparison is None or comparison.interval is None:
        return TableCell("-", hint="" if comparison is None else comparison.verdict)
    interval = comparison.interval
    hints = [f"95% interval {interval.text}"]
    if comparison.noise == EVALUATION_NOISE:
        hints.append(EVALUATION_NOISE)
    if comparison.smallest is not None:
        hints.append(f"a true difference of {comparison.smallest:.3f} would have been seen")
    hints.append(comparison.verdict)
    tones = {f"{comparison.first} is better": BETTER, f"{comparison.second} is better": WORSE}
    return TableCell(
        f"{interval.estimate:+.4f}",
        interval.estimate,
        f"estimate of {comparison.source}",
        note="" if comparison.p is None else f"p {_p_text(comparison.p)}",
        hint="; ".join(hints),
        tone=tones.get(comparison.verdict, ""),
    )


def _p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def _verdicts(compared: Sequence[Comparison]) -> Table:
    """One row per pair, for papers."""
    rows = []
    for comparison in compared:
        interval = comparison.interval
        difference = interval_cell = p = TableCell("-")
        if interval is not None:
            interval_cell = TableCell(interval.text, source=comparison.source)
            difference = TableCell(f"{interval.estimate:+.4f}", interval.estimate, f"estimate of {comparison.source}")
        if comparison.p is not None:
            p = TableCell(_p_text(comparison.p), source=f"holm of the p-values of all pairs: {comparison.source}")
        rows.append(
            [
                TableCell(f"{comparison.first} - {comparison.second}"),
                difference,
                interval_cell,
                p,
                TableCell(comparison.noise or "-"),
                TableCell(comparison.verdict),
            ]
        )
    notes = [
        "The difference is the validation loss of the first contestant minus that of the second, in nats per token. "
        "Below 0 the first is better. Differences are paired over the same validation documents or the same seeds.",
        *_noise_notes({comparison.noise for comparison in compared}),
        f"A contestant wins only with several seeds and a p-value below {FALSE_WINNER} after Holm's correction for "
        f"all {len(compared)} comparisons.",
    ]
    columns = ["pair", "difference", "95% interval", "p", "interval covers", "verdict"]
    return Table("comparisons", "One verdict per pair of contestants", columns, rows, notes, folded=True)


def _noise_notes(noises: set[str]) -> list[str]:
    notes = []
    if EVALUATION_NOISE in noises:
        notes.append(
            f"{EVALUATION_NOISE.capitalize()}: the interval covers how the difference would change with other "
            "documents of the same kind. It does not cover what another seed would change."
        )
    if noises - {EVALUATION_NOISE, ""}:
        notes.append(
            "Seeds: the interval covers how the difference would change with other seeds, on the same validation "
            "documents."
        )
    return notes
