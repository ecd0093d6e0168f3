"""The section on runs that diverged or collapsed: the step, the sublayer, and what to try."""

from __future__ import annotations

from spheret.analysis.failure import failure_of
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import RunGroup
from spheret.lab.sections.sections import Section

# a page explains so many runs in words; the table has them all
MOST = 6


def failures_section(group: RunGroup) -> Section | None:
    """What went wrong; None if no run failed."""
    rows, paragraphs = [], []
    for result in group.results:
        failure = failure_of(result.run, result.lines)
        if failure is None:
            continue
        name = f"{result.label}, seed {result.seed}"
        lowest = TableCell("-")
        if failure.lowest is not None:
            step, loss = failure.lowest
            lowest = TableCell(f"{loss:.3f} at step {step}", loss, f"{result.name}[{step}].loss")
        rows.append(
            [
                TableCell(name),
                TableCell(failure.what),
                TableCell(str(failure.step), float(failure.step), f"{result.name}[{failure.step}].step"),
                TableCell(failure.place),
                lowest,
                TableCell(f"{result.rate:g}", result.rate, result.rate_source),
            ]
        )
        if len(rows) <= MOST:
            paragraphs.append(f"{name}. {failure.sentence} {failure.what_to_try}")
    if not rows:
        return None
    if len(rows) > MOST:
        paragraphs.append(f"The table has the other {len(rows) - MOST} runs that failed.")
    paragraphs.append(
        "The flags are for a new run. A resumed run would compute the same values again. --init-from starts from "
        "the weights of a checkpoint that was saved before the step. spheret inspect shows every sublayer of one."
    )
    columns = ["run", "what happened", "step", "where", "lowest loss before", "lr"]
    table = Table("failures", "Runs that diverged or collapsed", columns, rows)
    return Section("failures", "What went wrong, and what to try", paragraphs, [table])
