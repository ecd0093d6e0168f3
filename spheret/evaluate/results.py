"""The results in eval.json and eval_samples.jsonl: the paper's table, and two runs compared on the same documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spheret.evaluate.eval_json import AGAIN, EVALS, SAMPLES, EvalRecord, MetricRecord, SampleRecord
from spheret.evaluate.tasks import ACCURACIES, PAPER_COLUMNS, Column
from spheret.runs.layout import EVAL, EVAL_FEWSHOT, EVAL_SAMPLES


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stderr(values: Sequence[float]) -> float | None:
    """The standard error of the mean by the sample standard deviation, as in lm_eval; None for a single value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def _mean_with_error(values: Sequence[Any]) -> tuple[float, float | None]:
    return _mean(values), _stderr(values)


def _perplexity(values: Sequence[Any]) -> tuple[float, float | None]:
    """exp(-mean log-likelihood), with its error by the delta method: the slope of exp is the value itself."""
    value, error = math.exp(-_mean(values)), _stderr(values)
    return value, None if error is None else value * error


def _per_unit(values: Sequence[Any]) -> tuple[float, float | None]:
    """Log-likelihood per unit with the error of a ratio of means. A value is (log-likelihood, words or bytes)."""
    total, units = math.fsum(v for v, _ in values), sum(n for _, n in values)
    rate = total / units
    error = _stderr([v - rate * n for v, n in values])
    return rate, None if error is None else error * len(values) / units


def _unit_perplexity(values: Sequence[Any]) -> tuple[float, float | None]:
    rate, error = _per_unit(values)
    return math.exp(-rate), None if error is None else math.exp(-rate) * error


def _bits(values: Sequence[Any]) -> tuple[float, float | None]:
    rate, error = _per_unit(values)
    return -rate / math.log(2), None if error is None else error / math.log(2)


# functions from a metric's values per document to its value and standard error; every other metric is a mean
METRICS: dict[str, Callable[[Sequence[Any]], tuple[float, float | None]]] = {
    "perplexity": _perplexity,
    "word_perplexity": _unit_perplexity,
    "byte_perplexity": _unit_perplexity,
    "bits_per_byte": _bits,
}


def summary(metric: str, values: Sequence[Any]) -> MetricRecord:
    """The value of a metric and its standard error, from its values per document."""
    return MetricRecord(*METRICS.get(metric, _mean_with_error)(values))


def read(run: str | Path, fewshot: bool = False) -> EvalRecord:
    """The eval.json of a run directory, or its eval_fewshot.json."""
    try:
        return EVALS.read(Path(run) / (EVAL_FEWSHOT if fewshot else EVAL))
    except FileNotFoundError:
        flag = " --num-fewshot N" if fewshot else ""
        raise FileNotFoundError(f"{run} has not been evaluated: run spheret eval {run}{flag}.") from None


def samples(run: str | Path) -> dict[str, dict[str, SampleRecord]]:
    """The line of every document: task, then document."""
    path = Path(run) / EVAL_SAMPLES
    by_task: dict[str, dict[str, SampleRecord]] = {}
    try:
        for row, _ in SAMPLES.read(path):
            by_task.setdefault(row.task, {})[f"{row.document} {row.hash}"] = row
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {AGAIN}.") from None
    return by_task


# the type of a metric's value at one document; every other metric is a number
VALUES: dict[str, Any] = {
    name: tuple[float, Annotated[float, msgspec.Meta(gt=0)]]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
}


def _values(run: str | Path, documents: dict[str, SampleRecord], metric: str) -> list[Any]:
    """The metric at every document of a task, in the order of the documents' names."""
    values = []
    for _, row in sorted(documents.items()):
        try:
            values.append(msgspec.convert(row.metrics.get(metric), VALUES.get(metric, float)))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{Path(run) / EVAL_SAMPLES} is damaged ({metric} of document {row.document} of {row.task}: {error}):"
                f" {AGAIN}."
            ) from None
    return values


@dataclass(frozen=True)
class EvalCell:
    """A number of the paper's tables: an accuracy in percent, or a perplexity. value: None if it was not measured."""

    column: Column
    value: float | None
    stderr: float | None


@dataclass(frozen=True)
class EvalRow:
    """A run in the paper's layout: one cell per column of PAPER_COLUMNS, and the average accuracy."""

    run: str
    cells: tuple[EvalCell, ...]
    average: MetricRecord | None


@dataclass(frozen=True)
class PairedMetric:
    """A metric of two runs on the same documents.

    difference: first minus second, in percentage points of accuracy or in perplexity.
    stderr: of the difference; for a perplexity, of `log_ratio`.
    wins, losses: documents on which the first run is better, and on which it is worse.
    p: McNemar's exact test for accuracies, a normal test of the mean log-likelihood difference for perplexities.
    log_ratio: for perplexities only, log(first / second).
    """

    column: Column
    documents: int
    difference: float
    stderr: float | None
    wins: int
    losses: int
    p: float | None
    log_ratio: float | None = None


def average(results: EvalRecord) -> MetricRecord | None:
    """The mean of the paper's ten accuracies in percent with its standard error, or None if one is missing."""
    cells = [_cell(results, column) for column in PAPER_COLUMNS if column.higher_is_better]
    values = [cell.value for cell in cells if cell.value is not None]
    errors = [cell.stderr for cell in cells if cell.stderr is not None]
    if len(values) < len(cells):
        return None
    together = math.sqrt(math.fsum(e * e for e in errors)) / len(cells) if len(errors) == len(cells) else None
    return MetricRecord(_mean(values), together)


def is_accuracy(metric: str) -> bool:
    return metric in ACCURACIES


def _cell(results: EvalRecord, column: Column) -> EvalCell:
    task = results.tasks.get(column.task)
    found = None if task is None else task.metrics.get(column.metric)
    if found is None:
        return EvalCell(column, None, None)
    factor = 100.0 if column.higher_is_better else 1.0
    value, error = (None if x is None else factor * x for x in (found.value, found.stderr))
    return EvalCell(column, value, error)


def table(runs: Iterable[str | Path]) -> list[EvalRow]:
    """The paper's layout: one row per run."""
    rows = []
    for run in runs:
        results = read(run)
        cells = tuple(_cell(results, column) for column in PAPER_COLUMNS)
        rows.append(EvalRow(Path(run).resolve().name, cells, average(results)))
    return rows


def _exact_test(wins: int, losses: int) -> float:
    """McNemar's exact two-sided test: the probability of a split at least this uneven if both are equally likely."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _normal_test(difference: float, error: float | None) -> float | None:
    return None if not error else math.erfc(abs(difference) / error / math.sqrt(2))


def _paired(column: Column, first: list[Any], second: list[Any]) -> PairedMetric:
    if column.higher_is_better:
        changes = [100.0 * (a - b) for a, b in zip(first, second, strict=True)]
        wins, losses = sum(x > 0 for x in changes), sum(x < 0 for x in changes)
        p = _exact_test(wins, losses)
        return PairedMetric(column, len(first), _mean(changes), _stderr(changes), wins, losses, p)
    # perplexities are compared as log-likelihoods per token or per word
    pairs = [(a, b) if isinstance(a, tuple) else ((a, 1), (b, 1)) for a, b in zip(first, second, strict=True)]
    rate, error = _per_unit([(a[0] - b[0], a[1]) for a, b in pairs])
    wins, losses = sum(a[0] > b[0] for a, b in pairs), sum(a[0] < b[0] for a, b in pairs)
    difference = METRICS[column.metric](first)[0] - METRICS[column.metric](second)[0]
    return PairedMetric(column, len(first), difference, error, wins, losses, _normal_test(rate, error), -rate)


def compare(first: str | Path, second: str | Path) -> list[PairedMetric]:
    """Compare two runs on the same documents: one row per column of the paper that both runs have."""
    both = samples(first), samples(second)
    rows = []
    for column in PAPER_COLUMNS:
        if not all(column.task in by_task for by_task in both):
            continue
        ours, theirs = (by_task[column.task] for by_task in both)
        if ours.keys() != theirs.keys():
            raise ValueError(
                f"{first} and {second} were evaluated on different documents of {column.task}: evaluate both with "
                "the same --data and --limit."
            )
        values = [_values(run, documents, column.metric) for run, documents in ((first, ours), (second, theirs))]
        rows.append(_paired(column, *values))
    return rows
