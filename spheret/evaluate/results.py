"""The results in eval.json: metrics with their errors, as the paper prints them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spheret.evaluate.eval_json import EVALS, EvalRecord, MetricRecord
from spheret.evaluate.tasks import PAPER_COLUMNS, Column
from spheret.runs.layout import EVAL


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stderr(values: Sequence[float]) -> float | None:
    """The standard error of the mean by the sample standard deviation, as in lm_eval; None for a single value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


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
    return (
        MetricRecord(*METRICS[metric](values)) if metric in METRICS else MetricRecord(_mean(values), _stderr(values))
    )


def read(run: str | Path) -> EvalRecord:
    """The eval.json of a run directory."""
    try:
        return EVALS.read(Path(run) / EVAL)
    except FileNotFoundError:
        raise FileNotFoundError(f"{run} has not been evaluated: run spheret eval {run}.") from None


def number(results: EvalRecord, column: Column) -> MetricRecord:
    """A number of the paper's tables, an accuracy in percent or a perplexity. None if it was not measured."""
    task = results.tasks.get(column.task)
    found = None if task is None else task.metrics.get(column.metric)
    if found is None:
        return MetricRecord(None, None)
    factor = 100.0 if column.higher_is_better else 1.0
    return MetricRecord(*(None if x is None else factor * x for x in (found.value, found.stderr)))


def average(results: EvalRecord) -> MetricRecord | None:
    """The mean of the paper's ten accuracies in percent with its standard error, or None if one is missing."""
    numbers = [number(results, column) for column in PAPER_COLUMNS if column.higher_is_better]
    values = [each.value for each in numbers if each.value is not None]
    errors = [each.stderr for each in numbers if each.stderr is not None]
    if len(values) < len(numbers):
        return None
    together = math.sqrt(math.fsum(e * e for e in errors)) / len(numbers) if len(errors) == len(numbers) else None
    return MetricRecord(_mean(values), together)
