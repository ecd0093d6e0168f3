"""The first screen of a report: who has the lowest loss, what follows from that, one picture, and the ranking."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.lab.page.tables import Table, TableCell, ranked
from spheret.lab.runs import RunGroup, final_loss
from spheret.lab.sections.sections import Section, format_loss, number_cell, rate_cell
from spheret.lab.verdicts import Comparison, between, comparisons

NEXT = "`spheret study PLAN.toml` tunes every rate, adds seeds and gives verdicts (docs/lab.md)"
NO_LOSS = "No contestant finished with a finite loss, so nothing can be concluded: take lower rates with --lr."


def headline(group: RunGroup) -> str:
    """Who has the lowest loss, and who follows; "" if nobody finished."""
    losses = {label: loss for label, runs in group.contestants.items() if (loss := final_loss(runs)) is not None}
    if not losses:
        return ""
    (best, lowest), *others = losses.items()
    rate = f" at learning rate {group.bowls[best].reported:g}" if group.bowls else ""
    opening = f"{best} has the lowest validation loss, {format_loss(lowest)}{rate}."
    if not others:
        return opening
    (second, loss), *rest = others
    last = f", and the last, {rest[-1][0]}, {format_loss(rest[-1][1] - lowest)}" if rest else ""
    return f"{opening} The next, {second}, is {format_loss(loss - lowest)} behind{last}."


def conclusion(group: RunGroup, compared: Sequence[Comparison]) -> str:
    """One sentence: what can and cannot be concluded, and what to run next."""
    best = next(iter(group.contestants))
    if final_loss(group.contestants[best]) is None:
        return NO_LOSS
    if not compared:
        return f"There is one contestant, so nothing is compared: give more --schemes; {NEXT}."
    if group.one_seed:
        return (
            f"One seed shows a collapse, a divergence or a large gap, and cannot tell which of two close losses is "
            "lower: no pair has a winner, and the intervals hold the noise of the validation text alone; repeat "
            f"with --seeds 5, or {NEXT}."
        )
    edges = group.edge_contestants
    untuned = f", and the best rate of {', '.join(edges)} may lie beyond those tried" if edges else ""
    beaten = [each for each in compared if each.verdict == f"{best} is better"]
    decided = sum(each.verdict.endswith(" is better") for each in compared)
    if len(beaten) == len(group.contestants) - 1:
        answer = f"{best} is better than every other contestant on these seeds, this data and this size alone"
    elif decided:
        answer = f"{decided} of {len(compared)} pairs have a winner, and {best} has not beaten all others"
    else:
        answer = f"No pair has a winner on {len(group.seeds)} seeds, which does not mean that they are equal"
    return f"{answer}{untuned}; {NEXT}."


def ranking_table(group: RunGroup, compared: Sequence[Comparison]) -> Table:
    """The contestants, the lowest loss first: what a race prints at its end too."""
    best = next(iter(group.contestants))
    columns = ["contestant", *(["lr"] if group.bowls else []), "val loss", "behind the best", "95% interval"]
    rows = []
    for label, runs in group.contestants.items():
        diverged = any(run.diverged is not None for run in runs)
        difference, interval = _behind(between(compared, label, best))
        cells = [
            TableCell(label),
            *([rate_cell(group.bowls[label])] if group.bowls else []),
            number_cell(
                [] if diverged else [run.val_loss for run in runs], format_loss, "diverged" if diverged else "-"
            ),
            difference,
            interval,
        ]
        if group.side_by_side:
            cells.append(number_cell([runs[0].milliseconds_per_step], lambda x: f"{x:.1f}"))
        rows.append(cells)
    if group.side_by_side:
        columns.append("ms per step")
    unranked = [label for label, runs in group.contestants.items() if final_loss(runs) is None]
    notes = ["Val loss is in nats per token; below is better. The interval is that of the difference to the best."]
    if group.one_seed:
        notes.append("With one seed an interval holds the noise of the validation text alone, not that of the seed.")
    table = Table("ranking", "The ranking", columns, rows, notes).without_empty_columns
    return ranked(table, [column for column in table.columns if column == "val loss"], unranked)


def _behind(comparison: Comparison | None) -> tuple[TableCell, TableCell]:
    """How much higher a loss is than that of the best, and the interval."""
    if comparison is None or comparison.interval is None:
        return TableCell("-"), TableCell("-")
    interval = comparison.interval
    return (
        TableCell(f"{interval.estimate:+.4f}", interval.estimate, f"estimate of {comparison.source}"),
        TableCell(interval.text, source=comparison.source),
    )


def answer_section(group: RunGroup) -> Section:
    compared = comparisons(group)
    paragraphs = [text for text in (headline(group), conclusion(group, compared)) if text]
    return Section("answer", "The answer", paragraphs, [ranking_table(group, compared)], ["validation"], opening=True)
