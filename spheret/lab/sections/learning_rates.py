"""The section on learning rates: the loss of every contestant at each of its rates, and which one is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spheret.lab.page.tables import BEST, Table, TableCell
from spheret.lab.runs import Bowl, Result, RunGroup
from spheret.lab.sections.sections import Section, format_loss, number_cell, rate_cell


def learning_rates_section(group: RunGroup) -> Section | None:
    """Loss by learning rate, and a warning for every contestant whose best rate is not bracketed."""
    if not group.bowls:
        return None
    rows = []
    for label, bowl in group.bowls.items():
        cells = [_cell(bowl, rate) for rate in group.rates]
        chosen = TableCell("none") if bowl.best is None else replace(rate_cell(bowl), text=f"{bowl.best:g}")
        rows.append([TableCell(label), *cells, chosen, TableCell(_place(bowl))])
    notes = [
        "Val loss at the end of each run, in nats per token, or its mean over the finished seeds. Bold is the chosen "
        "rate: the lowest loss among rates that did not diverge.",
        "Collapsed: the run raised the alarm of token collapse. It may have recovered; the loss is that of its end.",
        "A best rate is inside if a lower and a higher one were tried.",
    ]
    columns = ["contestant", *(f"lr {rate:g}" for rate in group.rates), "chosen rate", "place in the grid"]
    table = Table("learning-rates", "Val loss by learning rate", columns, rows, notes)
    warnings = [text for label, bowl in group.bowls.items() if (text := _warning(label, bowl))]
    return Section("learning-rates", "Learning rates", warnings, [table], ["bowls"])


def _cell(bowl: Bowl, rate: float) -> TableCell:
    runs = bowl.runs.get(rate)
    if runs is None:
        return TableCell("not run")
    diverged = [run for run in runs if run.diverged is not None]
    if diverged:
        return TableCell(f"diverged{_share(diverged, runs)}")
    finished = [run for run in runs if run.finished]
    cell = number_cell([run.val_loss for run in finished], format_loss, missing="not finished")
    collapsed = [run for run in runs if run.collapsed]
    if collapsed:
        cell = replace(cell, text=f"{cell.text} (collapsed{_share(collapsed, runs)})")
    return replace(cell, rank=BEST) if rate == bowl.best else cell


def _share(some: Sequence[Result], runs: Sequence[Result]) -> str:
    return f" in {len(some)} of {len(runs)} seeds" if len(runs) > 1 else ""


def _place(bowl: Bowl) -> str:
    if bowl.best is None:
        return "-"
    if not bowl.edges:
        return "inside"
    return "the only rate" if len(bowl.edges) > 1 else f"at the {bowl.edges[0]} edge"


def _warning(label: str, bowl: Bowl) -> str | None:
    """What a reader must know if a lower or a higher rate could be better."""
    if bowl.best is None:
        return f"{label}: no rate has a result yet, or all diverged. It is shown at {bowl.reported:g}: no verdict."
    if not bowl.edges:
        return None
    where = "the only rate with a result" if len(bowl.edges) > 1 else f"at the {bowl.edges[0]} edge of the grid"
    return f"{label}: the best rate {bowl.best:g} is {where}. Its best may lie beyond: no verdict."
