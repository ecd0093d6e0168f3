"""What run directories say, checked to be comparable: the only place where a report reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spheret.connections import SCHEMES
from spheret.runs.config import BOOKKEEPING
from spheret.runs.layout import CONFIG, METRICS
from spheret.runs.run import Run, open_run

# the training loss is the mean over so many last steps, as the paper's
WINDOW = 200
_NUMBERS = ("loss", "val_loss", "lr", "grad_norm", "spikes", "seconds", "tokens_per_second", "radius")


@dataclass(frozen=True)
class Number:
    """A number and the formula over lines of metrics.jsonl that gives it: RUN[STEP].KEY or RUN[FIRST..LAST].KEY."""

    value: float
    source: str


@dataclass(frozen=True)
class Result:
    """One run: its config and its lines."""

    run: Run
    name: str
    label: str
    lines: list[dict[str, Any]]

    @property
    def seed(self) -> int:
        return int(self.run.config["train"]["seed"])

    @property
    def scheme(self) -> str:
        return str(self.run.config["model"]["scheme"])

    @property
    def step(self) -> int:
        """The last step it has a line of."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def stopped(self) -> str | None:
        """What was not finite, where a run diverged."""
        return str(self.lines[-1]["stopped"]) if self.lines and self.lines[-1].get("stopped") else None

    @property
    def finished(self) -> bool:
        return self.stopped is None and self.step == self.run.steps and self.validation is not None

    @property
    def state(self) -> str:
        if self.stopped is not None:
            return f"diverged at step {self.step}"
        if not self.lines:
            return "no step yet"
        return "finished" if self.finished else f"unfinished: step {self.step} of {self.run.steps}"

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines with a finite training loss."""
        return [line for line in self.lines if line.get("loss") is not None]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("val_loss") is not None]

    @property
    def validation(self) -> dict[str, Any] | None:
        """The line of the last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def alarms(self) -> list[tuple[int, str]]:
        return [(line["step"], str(line["alarm"])) for line in self.lines if line.get("alarm")]

    @property
    def train_loss(self) -> Number | None:
        """The mean training loss of the last `WINDOW` steps, or of all when there are fewer."""
        return self._mean("loss", self.steps[-WINDOW:])

    @property
    def tokens_per_second(self) -> Number | None:
        return self._mean("tokens_per_second", self.steps)

    def _mean(self, key: str, lines: list[dict[str, Any]]) -> Number | None:
        values = [line[key] for line in lines if line.get(key) is not None]
        if not values:
            return None
        where = f"{self.name}[{lines[0]['step']}..{lines[-1]['step']}].{key}"
        return Number(math.fsum(values) / len(values), f"mean({where})")

    @property
    def val_loss(self) -> Number | None:
        return self.at_last_evaluation("val_loss")

    def at_last_evaluation(self, key: str) -> Number | None:
        line = self.validation
        return None if line is None else Number(float(line[key]), f"{self.name}[{line['step']}].{key}")

    def at_last_step(self, key: str) -> Number | None:
        """What the last line that has this key says, such as the seconds so far."""
        line = next((line for line in reversed(self.lines) if line.get(key) is not None), None)
        return None if line is None else Number(float(line[key]), f"{self.name}[{line['step']}].{key}")


@dataclass(frozen=True)
class Study:
    """Runs on the same data, by contestant: a scheme with its options and whatever else differs between the runs."""

    contestants: dict[str, list[Result]]
    # settings that are not the same in all runs
    differing: list[str]

    @property
    def results(self) -> list[Result]:
        return [result for results in self.contestants.values() for result in results]

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    @property
    def one_seed(self) -> bool:
        """Whether no contestant has a second seed to tell noise from merit."""
        return all(len(results) == 1 for results in self.contestants.values())

    @property
    def config(self) -> dict[str, Any]:
        """A config for what all of them share."""
        return self.results[0].run.config


def find(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories among these, where a directory of runs stands for those in it."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p.parent for p in path.glob(f"*/{CONFIG}")) if not (path / CONFIG).exists() else []
        found += inside or [path]
    return list(dict.fromkeys(found))


def read(paths: Sequence[str | Path]) -> Study:
    """Open every run and check that they may stand in one table."""
    runs = [open_run(path) for path in find(paths)]
    if not runs:
        raise ValueError("a report needs at least one run directory, got none: give RUN..., for example runs/race.")
    _refuse_other_data(runs)
    names = _names(runs)
    settings = [_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    differing = [key for key in keys if len({json.dumps(each.get(key)) for each in settings}) > 1]
    results = []
    for run, name, each in zip(runs, names, settings, strict=True):
        label = ", ".join([_contestant(run), *(f"{key}={_word(each.get(key))}" for key in differing)])
        results.append(Result(run, name, label, _lines(run)))
    order = list(SCHEMES)
    results.sort(key=lambda r: (order.index(r.scheme) if r.scheme in order else len(order), r.label, r.seed, r.name))
    contestants: dict[str, list[Result]] = {}
    for result in results:
        others = contestants.setdefault(result.label, [])
        if others and others[-1].seed == result.seed:
            raise ValueError(
                f"{others[-1].name} and {result.name} are both {result.label} with seed {result.seed}: one of them "
                f"is enough, so leave the other out."
            )
        others.append(result)
    _refuse_other_windows(results)
    return Study(contestants, differing)


def _lines(run: Run) -> list[dict[str, Any]]:
    lines = run.metrics()
    before = 0
    for line in lines:
        wrong = _wrong(line)
        if line["step"] <= before:
            wrong = f"comes after step {before}"
        if wrong is not None:
            raise ValueError(
                f"step {line['step']} of {run.path / METRICS} {wrong}: the file is damaged, resume the run from a "
                f"checkpoint before it."
            )
        before = line["step"]
    return lines


def _wrong(line: dict[str, Any]) -> str | None:
    """What in a line is not what the trainer writes there; null stands for what was not finite."""
    for key in _NUMBERS:
        if not _is_number(line.get(key)):
            return f"has the {key} {line[key]!r}, which is no finite number"
    layers, documents = line.get("sublayers") or [], line.get("val_documents") or []
    if not isinstance(layers, list) or not all(
        isinstance(layer, dict) and all(map(_is_number, layer.values())) for layer in layers
    ):
        return "has sublayers that are no table of numbers"
    if not isinstance(documents, list) or not all(
        isinstance(each, list) and len(each) == 3 and None not in each and all(map(_is_number, each))
        for each in documents
    ):
        return "has val_documents that are not a number, tokens and a loss each"
    return None


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _names(runs: Sequence[Run]) -> list[str]:
    """Each run's shortest name that no other has: its directory, with as many parents as that needs."""
    parts = [run.path.resolve().parts for run in runs]
    names = []
    for own in parts:
        depth = next(
            d for d in range(1, len(own) + 1) if sum(p[-d:] == own[-d:] for p in parts) == 1 or d == len(own)
        )
        names.append("/".join(own[-depth:]))
    return names


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _contestant(run: Run) -> str:
    options = run.config["model"].get("scheme_options") or {}
    said = ", ".join(f"{key}={_word(options[key])}" for key in sorted(options))
    return str(run.config["model"]["scheme"]) + (f" ({said})" if said else "")


def _settings(run: Run) -> dict[str, Any]:
    model = {k: v for k, v in run.config["model"].items() if k not in ("scheme", "scheme_options")}
    return {**model, **{k: v for k, v in run.config["train"].items() if k not in BOOKKEEPING}}


def _refuse_other_data(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        ours, theirs = (each.config["data"].get("manifest_sha256") for each in (first, run))
        if ours != theirs:
            raise ValueError(
                f"{first.path} and {run.path} were trained on different data ({_data(first)} and {_data(run)}), so "
                f"their losses cannot stand in one table: make a report for each."
            )


def _data(run: Run) -> str:
    data = run.config["data"]
    corpus = data.get("corpus")
    name = corpus.get("name") if isinstance(corpus, dict) else corpus
    tokenizer = (data.get("tokenizer") or {}).get("name")
    return f"{name or 'no data'}, {tokenizer}, manifest {str(data.get('manifest_sha256'))[:12]}"


def _refuse_other_windows(results: Sequence[Result]) -> None:
    """Runs that ended on other validation windows have losses of other text."""
    seen: tuple[Result, list[tuple[float, ...]]] | None = None
    for result in results:
        documents = (result.validation or {}).get("val_documents")
        if documents is None:
            continue
        windows = [tuple(document[:2]) for document in documents]
        if seen is None:
            seen = result, windows
        elif seen[1] != windows:
            raise ValueError(
                f"{seen[0].name} and {result.name} were validated on different windows of the data, so their losses "
                f"cannot stand in one table: train them with the same block and eval_windows, or report on each."
            )
