"""The results in eval.json and eval_samples.jsonl: the paper's table, and two runs compared on the same documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spheret.evaluate.records import AGAIN, EVALS, SAMPLES, EvalRecord
from spheret.evaluate.tasks import ACCURACIES, PAPER_COLUMNS
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


def summary(metric: str, values: Sequence[Any]) -> dict[str, float | None]:
    """The value of a metric and its standard error, from its values per document."""
    value, error = METRICS.get(metric, _mean_with_error)(values)
    return {"value": value, "stderr": error}


def read(run: str | Path, fewshot: bool = False) -> EvalRecord:
    """The eval.json of a run directory, or its eval_fewshot.json."""
    try:
        return EVALS.read(Path(run) / (EVAL_FEWSHOT if fewshot else EVAL))
    except FileNotFoundError:
        flag = " --num-fewshot N" if fewshot else ""
        raise FileNotFoundError(f"{run} has not been evaluated: run spheret eval {run}{flag}.") from None


def samples(run: str | Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The metrics of every document: task, then document, then metric."""
    path = Path(run) / EVAL_SAMPLES
    by_task: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for row, _ in SAMPLES.read(path):
            by_task.setdefault(row.task, {})[f"{row.document} {row.hash}"] = row.metrics
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {AGAIN}.") from None
    return by_task


# the type of a metric's value at one document; every other metric is a number
VALUES: dict[str, Any] = {
    name: tuple[float, Annotated[float, msgspec.Meta(gt=0)]]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
}


def _values(run: str | Path, documents: dict[str, dict[str, Any]], task: str, metric: str) -> list[Any]:
    """The metric at every document of a task, in the order of the documents' names."""
    values = []
    for name in sorted(documents):
        try:
            values.append(msgspec.convert(documents[name].get(metric), VALUES.get(metric, float)))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{Path(run) / EVAL_SAMPLES} is damaged ({metric} of document {name.split()[0]} of {task}: {error}): "
                f"{AGAIN}."
            ) from None
    return values


def average(results: EvalRecord) -> dict[str, float | None] | None:
    """The mean of the paper's ten accuracies in percent with its standard error, or None if one is missing."""
    cells = [_cell(results, column.task, column.metric) for column in PAPER_COLUMNS if is_accuracy(column.metric)]
    if any(cell["value"] is None for cell in cells):
        return None
    errors = [cell["stderr"] for cell in cells]
    together = None if None in errors else math.sqrt(math.fsum(e * e for e in errors)) / len(cells)
    return {"value": _mean([cell["value"] for cell in cells]), "stderr": together}


def is_accuracy(metric: str) -> bool:
    return metric in ACCURACIES


def _cell(results: EvalRecord, task: str, metric: str) -> dict[str, Any]:
    """Value and standard error, accuracies in percent; both None if the task was not run."""
    entry = results.tasks.get(task)
    cell = None if entry is None else entry.metrics.get(metric)
    if cell is None:
        return {"value": None, "stderr": None}
    factor = 100.0 if is_accuracy(metric) else 1.0
    return {
        "value": None if cell.value is None else factor * cell.value,
        "stderr": None if cell.stderr is None else factor * cell.stderr,
    }


def table(runs: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The paper's layout: one row per run, one cell per column of PAPER_COLUMNS, and the average accuracy.

    {"run", "step", "limit", "cells": [{"column", "task", "metric", "value", "stderr"}, ...], "average": {...} | None}
    """
    rows = []
    for run in runs:
        results = read(run)
        cells = [
            {"column": name, "task": task, "metric": metric, **_cell(results, task, metric)}
            for name, task, metric in PAPER_COLUMNS
        ]
        rows.append(
            {
                "run": Path(run).resolve().name,
                "step": results.step,
                "limit": results.limit,
                "cells": cells,
                "average": average(results),
            }
        )
    return rows


def _exact_test(wins: int, losses: int) -> float:
    """McNemar's exact two-sided test: the probability of a split at least this uneven if both are equally likely."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _normal_test(difference: float, error: float | None) -> float | None:
    return None if not error else math.erfc(abs(difference) / error / math.sqrt(2))


def _paired(metric: str, first: list[Any], second: list[Any]) -> dict[str, Any]:
    if is_accuracy(metric):
        changes = [100.0 * (a - b) for a, b in zip(first, second, strict=True)]
        wins, losses = sum(x > 0 for x in changes), sum(x < 0 for x in changes)
        counts = {"wins": wins, "losses": losses, "p": _exact_test(wins, losses)}
        return {"difference": _mean(changes), "stderr": _stderr(changes), **counts}
    # perplexities are compared as log-likelihoods per token or per word
    pairs = [(a, b) if isinstance(a, tuple) else ([a, 1], [b, 1]) for a, b in zip(first, second, strict=True)]
    rate, error = _per_unit([(a[0] - b[0], a[1]) for a, b in pairs])
    wins, losses = sum(a[0] > b[0] for a, b in pairs), sum(a[0] < b[0] for a, b in pairs)
    return {
        "difference": METRICS[metric](first)[0] - METRICS[metric](second)[0],
        "log_ratio": -rate,
        "stderr": error,
        "wins": wins,
        "losses": losses,
        "p": _normal_test(rate, error),
    }


def compare(first: str | Path, second: str | Path) -> list[dict[str, Any]]:
    """Compare two runs on the same documents: one row per column of the paper that both runs have.

    {"column", "task", "metric", "documents", "difference", "stderr", "wins", "losses", "p"}

    difference: first minus second, in percentage points of accuracy or in perplexity.
    log_ratio: for perplexities only, log(first / second). `stderr` is then the standard error of `log_ratio`.
    wins, losses: documents on which the first run is better, and on which it is worse.
    p: McNemar's exact test for accuracies, a normal test of the mean log-likelihood difference for perplexities.
    """
    both = samples(first), samples(second)
    rows = []
    for column, task, metric in PAPER_COLUMNS:
        if not all(task in by_task for by_task in both):
            continue
        documents = sorted(both[0][task])
        if documents != sorted(both[1][task]):
            raise ValueError(
                f"{first} and {second} were evaluated on different documents of {task}: evaluate both with the same "
                "--data and --limit."
            )
        values = [
            _values(run, by_task[task], task, metric) for run, by_task in zip((first, second), both, strict=True)
        ]
        rows.append(
            {
                "column": column,
                "task": task,
                "metric": metric,
                "documents": len(documents),
                **_paired(metric, *values),
            }
        )
    return rows
