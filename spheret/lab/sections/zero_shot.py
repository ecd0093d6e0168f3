"""The section on zero-shot evaluations: the eval.json of each evaluated run."""

from __future__ import annotations

import math
from itertools import combinations

from spheret.evaluate.eval_json import MetricRecord
from spheret.evaluate.results import EvalCell, PairedMetric, average, compare, read, table
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import Result, RunGroup, SourcedNumber
from spheret.lab.sections.section import Section
from spheret.runs.layout import EVAL

MARKS = (
    '"Limit N" means that only the first N documents of each task were evaluated, "step N" that the checkpoint of '
    "step N was, which is not the last."
)


def zero_shot_number(result: Result, task: str, metric: str) -> SourcedNumber | None:
    """One metric of a run's eval.json, accuracies in percent as in the paper; None if it was not measured."""
    if not _is_evaluated(result):
        return None
    for cell in table([result.run.path])[0].cells:
        if (cell.column.task, cell.column.metric) == (task, metric) and cell.value is not None:
            return SourcedNumber(cell.value, f"{result.name}/{EVAL} tasks.{task}.metrics.{metric}")
    return None


def average_accuracy(result: Result) -> SourcedNumber | None:
    """The mean of the ten accuracies of a run's eval.json in percent; None if one of them was not measured."""
    mean = average(read(result.run.path)) if _is_evaluated(result) else None
    if mean is None or mean.value is None:
        return None
    return SourcedNumber(mean.value, f"{result.name}/{EVAL} mean of the ten accuracies")


def evaluation_marks(result: Result) -> list[str]:
    """What makes an evaluation less than the paper's: a limit of documents, or a step that is not the last."""
    if not _is_evaluated(result):
        return []
    evaluation = read(result.run.path)
    marks = [] if evaluation.limit is None else [f"limit {evaluation.limit}"]
    return [*marks, *([] if evaluation.step == result.run.steps else [f"step {evaluation.step}"])]


def zero_shot_section(group: RunGroup) -> Section | None:
    """The zero-shot metrics of every evaluated run, and comparisons of runs that have the same seed."""
    evaluated = [result for result in group.results if _is_evaluated(result)]
    if not evaluated:
        return None
    tables, paragraphs, comparison_rows = [_metrics_table(evaluated)], [], []
    for first, second in combinations(evaluated, 2):
        if first.seed != second.seed:
            continue
        try:
            metrics = compare(first.run.path, second.run.path)
        except (ValueError, OSError) as error:
            paragraphs.append(f"{first.name} and {second.name} are not compared: {error}")
            continue
        comparison_rows += [_comparison_row(first, second, metric) for metric in metrics]
    if comparison_rows:
        notes = [
            "The difference is the first run minus the second, on the same documents.",
            "Wins and losses count documents.",
            "Each side is one training run. The p-values do not include what another seed would change, so no "
            "comparison has a winner.",
        ]
        columns = ["metric and pair", "difference", "wins", "losses", "p"]
        tables.append(
            Table("zero-shot-comparisons", "Zero-shot metrics, pair by pair", columns, comparison_rows, notes)
        )
    return Section("zero-shot", "Zero-shot", paragraphs, tables, folded=True)


def _is_evaluated(result: Result) -> bool:
    return (result.run.path / EVAL).exists()


def _metrics_table(evaluated: list[Result]) -> Table:
    evaluations = table([result.run.path for result in evaluated])
    headings = [f"{column.name} {column.metric}" for column in PAPER_COLUMNS]
    rows = []
    for result, evaluation in zip(evaluated, evaluations, strict=True):
        file = f"{result.name}/{EVAL}"
        cells = [_metric_cell(cell, file, cell.column.task, cell.column.metric) for cell in evaluation.cells]
        rows.append([TableCell(result.name), *cells, _metric_cell(evaluation.average, file, "all", "accuracies")])
    notes = [
        "Accuracies are in percent. Each number is followed by its standard error. The average is over the ten "
        "accuracies."
    ]
    for result in evaluated:
        marks = evaluation_marks(result)
        if marks:
            notes.append(f"{result.name} was evaluated with {', '.join(marks)}. {MARKS}")
    return Table("zero-shot", "Zero-shot metrics", ["run", *headings, "average accuracy"], rows, notes)


def _metric_cell(cell: EvalCell | MetricRecord | None, file: str, task: str, metric: str) -> TableCell:
    if cell is None or cell.value is None:
        return TableCell("not run")
    error = "" if cell.stderr is None else f" \u00b1 {cell.stderr:.2f}"
    return TableCell(f"{cell.value:.2f}{error}", cell.value, f"{file} tasks.{task}.metrics.{metric}")


def _comparison_row(first: Result, second: Result, paired: PairedMetric) -> list[TableCell]:
    column, p = paired.column, paired.p
    source = f"compare({first.name}, {second.name}), {column.task} {column.metric}"
    return [
        TableCell(f"{column.name} {column.metric}: {first.name} - {second.name}"),
        TableCell(f"{paired.difference:+.2f}", paired.difference, source),
        TableCell(str(paired.wins), float(paired.wins), source),
        TableCell(str(paired.losses), float(paired.losses), source),
        TableCell("-") if p is None or math.isnan(p) else TableCell(f"{p:.3g}", p, source),
    ]
