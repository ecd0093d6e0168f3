"""What evaluations found, read back from run directories: the paper's table, and two runs document by document."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spheret.evaluate.tasks import PAPER_TASKS
from spheret.runs.layout import EVAL, EVAL_SAMPLES

FORMAT, VERSION = "spheret-eval", 1


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stderr(values: Sequence[float]) -> float | None:
    """Of the mean, by the sample's own deviation, as lm_eval has it; None for a single value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def _of_mean(values: Sequence[Any]) -> tuple[float, float | None]:
    return _mean(values), _stderr(values)


def _of_perplexity(values: Sequence[Any]) -> tuple[float, float | None]:
    """exp(-mean log-likelihood); the error by its slope, the value itself."""
    value, error = math.exp(-_mean(values)), _stderr(values)
    return value, None if error is None else value * error


def _per_unit(values: Sequence[Any]) -> tuple[float, float | None]:
    """sum of log-likelihoods over sum of words (or bytes), with the error of a ratio of means."""
    total, units = math.fsum(v for v, _ in values), sum(n for _, n in values)
    rate = total / units
    error = _stderr([v - rate * n for v, n in values])
    return rate, None if error is None else error * len(values) / units


def _of_unit_perplexity(values: Sequence[Any]) -> tuple[float, float | None]:
    rate, error = _per_unit(values)
    return math.exp(-rate), None if error is None else math.exp(-rate) * error


def _of_bits(values: Sequence[Any]) -> tuple[float, float | None]:
    rate, error = _per_unit(values)
    return -rate / math.log(2), None if error is None else error / math.log(2)


# a metric's value and standard error from what it is of every document; any other metric is a mean
METRICS: dict[str, Callable[[Sequence[Any]], tuple[float, float | None]]] = {
    "perplexity": _of_perplexity,
    "word_perplexity": _of_unit_perplexity,
    "byte_perplexity": _of_unit_perplexity,
    "bits_per_byte": _of_bits,
}


def summary(metric: str, values: Sequence[Any]) -> dict[str, float | None]:
    """The value of a metric and its standard error."""
    value, error = METRICS.get(metric, _of_mean)(values)
    return {"value": value, "stderr": error}


def read(run: str | Path) -> dict[str, Any]:
    """The eval.json of a run directory."""
    path = Path(run) / EVAL
    if not path.exists():
        raise FileNotFoundError(f"{run} has not been evaluated: run spheret eval {run}.")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): evaluate the run again.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ValueError(f"{path} is not what spheret eval writes here: evaluate the run again.")
    return found


def samples(run: str | Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Task, then document, then metric: what each document contributed."""
    path = Path(run) / EVAL_SAMPLES
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: evaluate the run again.")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        found.setdefault(row["task"], {})[f"{row['document']} {row['hash']}"] = row["metrics"]
    return found


def average(found: dict[str, Any]) -> dict[str, float | None] | None:
    """The mean of the paper's ten accuracies in percent, and its error; None unless all ten are there."""
    cells = [_cell(found, task, metric) for _, task, metric in PAPER_TASKS if is_accuracy(metric)]
    if any(cell["value"] is None for cell in cells):
        return None
    errors = [cell["stderr"] for cell in cells]
    together = None if None in errors else math.sqrt(math.fsum(e * e for e in errors)) / len(cells)
    return {"value": _mean([cell["value"] for cell in cells]), "stderr": together}


def is_accuracy(metric: str) -> bool:
    return metric in ("acc", "acc_norm")


def _cell(found: dict[str, Any], task: str, metric: str) -> dict[str, Any]:
    """Value and error, accuracies in percent; None where the task was not run."""
    cell = found["tasks"].get(task, {}).get("metrics", {}).get(metric, {"value": None, "stderr": None})
    factor = 100.0 if is_accuracy(metric) else 1.0
    return {key: None if cell[key] is None else factor * cell[key] for key in ("value", "stderr")}


def table(runs: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The paper's layout: a row a run, a cell a column of PAPER_TASKS, and the average zero-shot accuracy.

    {"run", "step", "limit", "cells": [{"column", "task", "metric", "value", "stderr"}, ...], "average": {...} | None}
    """
    rows = []
    for run in runs:
        found = read(run)
        cells = [
            {"column": column, "task": task, "metric": metric, **_cell(found, task, metric)}
            for column, task, metric in PAPER_TASKS
        ]
        rows.append(
            {
                "run": Path(run).resolve().name,
                "step": found["step"],
                "limit": found["limit"],
                "cells": cells,
                "average": average(found),
            }
        )
    return rows


def _sign_test(wins: int, losses: int) -> float:
    """How likely a split at least this uneven is by chance alone: McNemar's test, two-sided and exact."""
    n, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return 1.0 if n == 0 else min(1.0, 2 * tail / 2**n)


def _normal_test(difference: float, error: float | None) -> float | None:
    return None if not error else math.erfc(abs(difference) / error / math.sqrt(2))


def _paired(metric: str, ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    if is_accuracy(metric):
        change = [100.0 * (a - b) for a, b in zip(ours, theirs, strict=True)]
        wins, losses = sum(x > 0 for x in change), sum(x < 0 for x in change)
        more = {"wins": wins, "losses": losses, "p": _sign_test(wins, losses)}
        return {"difference": _mean(change), "stderr": _stderr(change), **more}
    # perplexities are compared as log-likelihoods, a token's or a word's
    pairs = [(a, b) if isinstance(a, list) else ([a, 1], [b, 1]) for a, b in zip(ours, theirs, strict=True)]
    rate, error = _per_unit([(a[0] - b[0], a[1]) for a, b in pairs])
    wins, losses = sum(a[0] > b[0] for a, b in pairs), sum(a[0] < b[0] for a, b in pairs)
    return {
        "difference": METRICS[metric](ours)[0] - METRICS[metric](theirs)[0],
        "log_ratio": -rate,
        "stderr": error,
        "wins": wins,
        "losses": losses,
        "p": _normal_test(rate, error),
    }


def compare(first: str | Path, second: str | Path) -> list[dict[str, Any]]:
    """Two runs on the same documents, a row for each column of the paper that both have.

    {"column", "task", "metric", "documents", "difference", "stderr", "wins", "losses", "p"}: first minus second, in
    points of accuracy or of perplexity; for a perplexity "log_ratio" is the log of their ratio, and the stderr is
    its. Wins and losses count documents. p is McNemar's exact test for accuracies, a normal one for log-likelihoods.
    """
    ours, theirs = samples(first), samples(second)
    rows = []
    for column, task, metric in PAPER_TASKS:
        if task not in ours or task not in theirs:
            continue
        documents = sorted(ours[task])
        if documents != sorted(theirs[task]):
            raise ValueError(
                f"{first} and {second} were evaluated on different documents of {task}: evaluate both with the same "
                "--data and --limit."
            )
        values = [[side[task][document][metric] for document in documents] for side in (ours, theirs)]
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
