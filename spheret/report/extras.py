"""Sections of runs that were also evaluated or certified; the rooms that did so say what was found, as plain data."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from spheret.analysis import certificate
from spheret.evaluate import eval_json
from spheret.report.results import Number, Result, Study
from spheret.report.sections import Section
from spheret.report.tables import Cell, Table
from spheret.runs.layout import CERTIFICATE, EVAL


def zero_shot_cells(result: Result) -> list[dict[str, Any]]:
    """The paper's twelve metrics of one run, each {"column", "task", "metric", "value", "stderr"}; or none."""
    if not (result.run.path / EVAL).exists():
        return []
    return list(eval_json.table([result.run.path])[0]["cells"])


def zero_shot_number(result: Result, task: str, metric: str) -> Number | None:
    """One metric of eval.json, accuracies in percent as the paper has them."""
    for cell in zero_shot_cells(result):
        if (cell["task"], cell["metric"]) == (task, metric) and cell["value"] is not None:
            return Number(cell["value"], f"{result.name}/{EVAL} tasks.{task}.metrics.{metric}")
    return None


def zero_shot(study: Study) -> Section | None:
    """The zero-shot metrics of every evaluated run, and each pair of one seed document by document."""
    evaluated = [result for result in study.results if (result.run.path / EVAL).exists()]
    if not evaluated:
        return None
    rows, columns = [], ["run"]
    for found, result in zip(eval_json.table([r.run.path for r in evaluated]), evaluated, strict=True):
        columns = ["run", *(f"{cell['column']} {cell['metric']}" for cell in found["cells"]), "average accuracy"]
        cells = [_with_error(cell, f"{result.name}/{EVAL}", cell["task"], cell["metric"]) for cell in found["cells"]]
        average = found["average"] or {"value": None, "stderr": None}
        rows.append([Cell(result.name), *cells, _with_error(average, f"{result.name}/{EVAL}", "all", "accuracies")])
    notes = ["Accuracies in percent, with the standard error of each; average is over the ten accuracies."]
    tables = [Table("zero-shot", "Zero-shot metrics", columns, rows, notes)]
    paragraphs, compared = [], []
    for first, second in combinations(evaluated, 2):
        if first.seed != second.seed:
            continue
        try:
            metrics = eval_json.compare(first.run.path, second.run.path)
        except (ValueError, OSError) as error:
            paragraphs.append(f"{first.name} and {second.name} are not compared: {error}")
            continue
        compared += [_compared(first, second, metric) for metric in metrics]
    if compared:
        notes = [
            "First minus second on the same documents; wins and losses count documents. One training each: what "
            "another seed would change is in no p-value, so no pair has a winner."
        ]
        columns = ["pair", "difference", "wins", "losses", "p"]
        tables.append(Table("zero-shot-pairs", "Zero-shot, pair by pair", columns, compared, notes))
    return Section("zero-shot", "Zero-shot", paragraphs, tables, folded=True)


def _with_error(cell: dict[str, Any], file: str, task: str, metric: str) -> Cell:
    if cell["value"] is None:
        return Cell("not run")
    error = "" if cell["stderr"] is None else f" \u00b1 {cell['stderr']:.2f}"
    return Cell(f"{cell['value']:.2f}{error}", cell["value"], f"{file} tasks.{task}.metrics.{metric}")


def _compared(first: Result, second: Result, metric: dict[str, Any]) -> list[Cell]:
    source = f"compare({first.name}, {second.name}), {metric['task']} {metric['metric']}"
    p = metric["p"]
    return [
        Cell(f"{metric['column']} {metric['metric']}: {first.name} - {second.name}"),
        Cell(f"{metric['difference']:+.2f}", metric["difference"], source),
        Cell(str(metric["wins"]), float(metric["wins"]), source),
        Cell(str(metric["losses"]), float(metric["losses"]), source),
        Cell("-") if p is None or math.isnan(p) else Cell(f"{p:.3g}", p, source),
    ]


def certificates(study: Study) -> Section | None:
    """What is proven of every certified run, layer by layer."""
    paragraphs: list[str] = []
    tables: list[Table] = []
    for result in study.results:
        found = certificate.section(result.run.path)
        if found is None:
            continue
        step = found["checkpoint"]
        who = result.name if step is None else f"{result.name}, step {step}"
        paragraphs += [f"{who}: {text}" for text in [*found["summary"], *found["contradictions"]]]
        source = f"{result.name}/{CERTIFICATE} own_path.sublayers"
        rows = [[Cell(row[0]), *(Cell(text, source=source) for text in row[1:])] for row in found["rows"]]
        notes = [f"From {result.name}/{CERTIFICATE}: {found['scope']}."]
        if step is not None and step != result.step:
            notes.append(f"Of step {step}, while the run's numbers are of step {result.step}.")
        name = f"certificate-{len(tables) + 1}"
        tables.append(Table(name, f"Certificate of {who}", found["columns"], rows, notes))
    return Section("certificates", "Certificates", paragraphs, tables, folded=True) if tables else None
