"""The runs of a report: read from their directories and checked to be comparable. Only this module reads metrics."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spheret.connections import SCHEMES
from spheret.model.gpt import PRESETS
from spheret.paper.recipe import paper_size
from spheret.report.links import Place
from spheret.report.statistics import mean_and_deviation
from spheret.runs.config import BOOKKEEPING
from spheret.runs.layout import CONFIG, STEP_COST
from spheret.runs.metrics import MetricsRecord
from spheret.runs.records import corpus_name
from spheret.runs.run import Run, RunDocument, open_run
from spheret.runs.step_cost import StepCost, measured_together, read_step_cost

# the training loss is the mean over this many last steps, as in the paper
WINDOW = 200
# the learning rate, and what follows from it
RATE_SETTINGS = ("lr", "min_lr")


@dataclass(frozen=True)
class Number:
    """A number and its source: a formula over RUN[STEP].KEY or RUN[FIRST..LAST].KEY, lines of RUN/metrics.jsonl."""

    value: float
    source: str


@dataclass(frozen=True)
class Result:
    """One run: its directory, its names in the report, and the lines of its metrics.jsonl."""

    run: Run
    name: str
    label: str
    lines: list[MetricsRecord]
    step_cost: StepCost | None = None

    @property
    def seed(self) -> int:
        return self.run.settings.train.seed

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.run.settings.train.lr

    @property
    def rate_source(self) -> str:
        return f"{self.name}/{CONFIG}[train.lr]"

    @property
    def scheme(self) -> str:
        return self.run.config.model.scheme

    @property
    def step(self) -> int:
        """The step of the last line; 0 if there is no line."""
        return self.lines[-1].step if self.lines else 0

    @cached_property
    def diverged(self) -> tuple[int, str] | None:
        """The step at which the run diverged, and what the guard said. The run may have gone on."""
        for line in self.lines:
            reason = line.diverged or line.stopped
            if reason:
                return line.step, reason
        return None

    @property
    def finished(self) -> bool:
        return self.diverged is None and self.step == self.run.steps and self.validation is not None

    @property
    def state(self) -> str:
        if self.diverged is not None:
            return f"diverged at step {self.diverged[0]}"
        if not self.lines:
            return "no step yet"
        return "finished" if self.finished else f"unfinished: step {self.step} of {self.run.steps}"

    @cached_property
    def steps(self) -> list[MetricsRecord]:
        """The lines that have a finite training loss."""
        return [line for line in self.lines if line.loss is not None]

    @cached_property
    def evaluations(self) -> list[MetricsRecord]:
        return [line for line in self.lines if line.val_loss is not None]

    @property
    def validation(self) -> MetricsRecord | None:
        """The line of the last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def alarms(self) -> list[tuple[int, str]]:
        return [(line.step, line.alarm) for line in self.lines if line.alarm]

    @property
    def collapsed(self) -> bool:
        """Whether the run raised the alarm of token collapse, which is the only alarm that metrics record."""
        return bool(self.alarms)

    @property
    def train_loss(self) -> Number | None:
        """The mean training loss over the last `WINDOW` steps, or over all steps if there are fewer."""
        return self._mean("loss", self.steps[-WINDOW:])

    @property
    def tokens_per_second(self) -> Number | None:
        return self._mean("tokens_per_second", self.steps)

    @property
    def milliseconds_per_step(self) -> Number | None:
        """The cost of a step that was measured beside the other contestants."""
        if self.step_cost is None:
            return None
        return Number(1000 * self.step_cost.seconds, f"1000 * {self.name}/{STEP_COST}[seconds]")

    def _mean(self, key: str, lines: list[MetricsRecord]) -> Number | None:
        values = [value for line in lines if (value := getattr(line, key)) is not None]
        if not values:
            return None
        source = f"{self.name}[{lines[0].step}..{lines[-1].step}].{key}"
        return Number(math.fsum(values) / len(values), f"mean({source})")

    @property
    def val_loss(self) -> Number | None:
        return self.at_last_evaluation("val_loss")

    def at_last_evaluation(self, key: str) -> Number | None:
        line = self.validation
        return None if line is None else Number(float(getattr(line, key)), f"{self.name}[{line.step}].{key}")

    def at_last_step(self, key: str) -> Number | None:
        """The value in the last line that has this key, such as the seconds so far."""
        line = next((line for line in reversed(self.lines) if getattr(line, key) is not None), None)
        return None if line is None else Number(float(getattr(line, key)), f"{self.name}[{line.step}].{key}")


@dataclass(frozen=True)
class Bowl:
    """The runs of one contestant by learning rate, ascending. Its loss over the rate has the shape of a bowl."""

    runs: dict[float, list[Result]]

    def loss(self, rate: float) -> float | None:
        """The mean final validation loss of the finished seeds; None if there is none, or if a seed diverged."""
        runs = self.runs[rate]
        losses = [run.val_loss.value for run in runs if run.finished and run.val_loss is not None]
        if not losses or any(run.diverged is not None for run in runs):
            return None
        return math.fsum(losses) / len(losses)

    @cached_property
    def best(self) -> float | None:
        """The rate with the lowest loss; None if no rate has a loss."""
        losses = {rate: loss for rate in self.runs if (loss := self.loss(rate)) is not None}
        return min(losses, key=lambda rate: losses[rate], default=None)

    @cached_property
    def reported(self) -> float:
        """The best rate. Without one, the lowest rate among those that came furthest before they diverged."""
        if self.best is not None:
            return self.best
        return max(self.runs, key=lambda rate: (min(_healthy_steps(run) for run in self.runs[rate]), -rate))

    @cached_property
    def edges(self) -> list[str]:
        """The sides on which no rate was tried beyond the best one: lower, upper, both or none.

        A rate that diverged was tried. One that is not finished was not.
        """
        if self.best is None:
            return ["lower", "upper"]
        tried = [
            rate
            for rate, runs in self.runs.items()
            if self.loss(rate) is not None or any(run.diverged is not None for run in runs)
        ]
        return [*["lower"] * (self.best == min(tried)), *["upper"] * (self.best == max(tried))]


def final_loss(runs: Sequence[Result]) -> float | None:
    """The mean final validation loss of a contestant; None if a run of it diverged or is not finished."""
    losses = [run.val_loss.value for run in runs if run.finished and run.val_loss is not None]
    return mean_and_deviation(losses)[0] if losses and len(losses) == len(runs) else None


def _place(runs: Sequence[Result]) -> tuple[bool, bool, float]:
    """Where a contestant stands: by its loss, then those that are not finished, then those that diverged."""
    loss = final_loss(runs)
    return loss is None, any(run.diverged is not None for run in runs), 0.0 if loss is None else loss


def _healthy_steps(run: Result) -> int:
    return run.step if run.diverged is None else run.diverged[0]


@dataclass(frozen=True)
class RunGroup:
    """Runs that can be compared, grouped by contestant. They have the same data.

    A contestant is a scheme with its options, and with every other setting that differs between the runs. Its name
    leaves out a value that most of the runs have. If every contestant has several learning rates, or the runs differ
    in nothing else, the rate is no part of a contestant: each is reported at its best rate.

    contestants: the runs that are reported, the lowest loss first.
    differing: names of the settings that are not the same in all runs.
    name: the corpus and the tokenizer, and what else tells the groups of a report apart.
    bowls: all runs of each contestant by their learning rate; empty if the rate is the same or part of a contestant.
    places: where runs lie as seen from the page, by their names; a run without a place has no link.
    """

    contestants: dict[str, list[Result]]
    differing: list[str]
    name: str
    bowls: dict[str, Bowl] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        """The runs that are reported."""
        return [result for results in self.contestants.values() for result in results]

    @property
    def by_rate(self) -> list[list[Result]]:
        """All runs, those of one contestant at one learning rate together."""
        if not self.bowls:
            return list(self.contestants.values())
        return [runs for bowl in self.bowls.values() for runs in bowl.runs.values()]

    @property
    def rates(self) -> list[float]:
        """Every learning rate of the bowls, ascending."""
        return sorted({rate for bowl in self.bowls.values() for rate in bowl.runs})

    @property
    def edge_contestants(self) -> list[str]:
        """The contestants whose best learning rate may lie beyond those that were tried."""
        return [label for label, bowl in self.bowls.items() if bowl.edges]

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    @property
    def one_seed(self) -> bool:
        """Whether every contestant has a single seed, which leaves the noise of seeds unknown."""
        return all(len(results) == 1 for results in self.contestants.values())

    @property
    def side_by_side(self) -> bool:
        """Whether the step of every contestant was measured, and all of them in one measurement."""
        return measured_together([result.step_cost for result in self.results])

    @property
    def config(self) -> RunDocument:
        """The config of the first run, for the settings that all runs share."""
        return self.results[0].run.config


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories that these paths name. A directory of runs names every run in it."""
    directories: list[Path] = []
    for path in map(Path, paths):
        children = [] if (path / CONFIG).exists() else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        directories += children or [path]
    return list(dict.fromkeys(directories))


def read_group(paths: Sequence[str | Path]) -> RunGroup:
    """Open every run and check that the runs can be compared."""
    first, *others = read_groups(paths)
    for other in others:
        raise ValueError(
            f"{first.results[0].run.path} and {other.results[0].run.path} have different data or sizes "
            f"({first.name}; {other.name}) and are not compared: take one of them."
        )
    return first


def read_groups(paths: Sequence[str | Path]) -> list[RunGroup]:
    """Open every run. There is one group for each set of data, and for each of the paper's sizes.

    Losses on different data cannot be compared. The paper compares schemes within one size.
    """
    runs = [open_run(path) for path in find_runs(paths)]
    if not runs:
        raise ValueError("a report needs at least one run directory, got none: give one, for example runs/race.")
    _refuse_untrained(runs)
    for run in runs:
        run.check_unedited()
    names = dict(zip((run.path for run in runs), _names(runs), strict=True))
    groups: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        key = str(run.config.data.manifest_sha256), paper_size(run.config.as_dict())
        groups.setdefault(key, []).append(run)
    # by data, then from the smallest size to the largest
    sizes = [*PRESETS, None]
    keys = sorted(groups, key=lambda key: (_describe_data(groups[key][0]), key[0], sizes.index(key[1])))
    return [_group(groups[key], names, _group_name(key, groups)) for key in keys]


def _group_name(key: tuple[str, str | None], groups: Mapping[tuple[str, str | None], Sequence[Run]]) -> str:
    """The corpus and the tokenizer, with manifest and size where these are needed to tell groups apart."""
    manifest, size = key
    name = _describe_data(groups[key][0])
    alike = {other for (other, _), runs in groups.items() if _describe_data(runs[0]) == name}
    if len(alike) > 1:
        name += f", manifest {manifest[:12]}"
    if len({other for _, other in groups}) > 1:
        name += f", size {size}" if size else ", other sizes"
    return name


def _group(runs: Sequence[Run], names: dict[Path, str], name: str) -> RunGroup:
    settings = [_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for run_settings in settings for key in run_settings))
    differing = [key for key in keys if len({json.dumps(run_settings.get(key)) for run_settings in settings}) > 1]
    named = [key for key in differing if key not in RATE_SETTINGS]
    tuned = _are_tuned(runs, differing, [[run_settings.get(key) for key in named] for run_settings in settings])
    named = named if tuned else differing
    usual = {key: _usual([run_settings.get(key) for run_settings in settings]) for key in named}
    results = []
    for run, run_settings in zip(runs, settings, strict=True):
        own = {key: _format_value(run_settings.get(key)) for key in named}
        label = ", ".join([_contestant(run), *(f"{key}={own[key]}" for key in named if own[key] != usual[key])])
        records, cost = run.metrics(), read_step_cost(run.path)
        results.append(Result(run, names[run.path], label, records, cost))
    places = {scheme: index for index, scheme in enumerate(SCHEMES)}
    results.sort(key=lambda r: (places.get(r.scheme, len(places)), r.label, r.rate, r.seed, r.name))
    contestants: dict[str, dict[float, list[Result]]] = {}
    for result in results:
        seeds = contestants.setdefault(result.label, {}).setdefault(result.rate, [])
        if seeds and seeds[-1].seed == result.seed:
            raise ValueError(
                f"{seeds[-1].name} and {result.name} are both {result.label} with seed {result.seed}: leave one of "
                f"them out."
            )
        seeds.append(result)
    _refuse_different_windows(results)
    bowls = {label: Bowl(runs) for label, runs in contestants.items()}
    reported = {label: bowl.runs[bowl.reported] for label, bowl in bowls.items()}
    order = sorted(reported, key=lambda label: _place(reported[label]))
    tuned_bowls = {label: bowls[label] for label in order} if tuned else {}
    return RunGroup({label: reported[label] for label in order}, differing, name, tuned_bowls)


def _are_tuned(runs: Sequence[Run], differing: Sequence[str], others: Sequence[Sequence[Any]]) -> bool:
    """Whether each contestant is reported at the best of its learning rates, so that no name has a rate.

    That is so if the runs differ in the rate alone, or if every contestant has several. A min_lr must be the same
    part of each lr. others: the settings of each run that differ besides the rate.
    """
    if "lr" not in differing:
        return False
    parts = [run.settings.train.min_lr / run.settings.train.lr for run in runs]
    if "min_lr" in differing and not math.isclose(min(parts), max(parts), rel_tol=1e-9):
        return False
    rates: dict[str, set[float]] = {}
    for run, values in zip(runs, others, strict=True):
        rates.setdefault(json.dumps([_contestant(run), *values]), set()).add(run.settings.train.lr)
    return not others[0] or all(len(each) > 1 for each in rates.values())


def _usual(values: Sequence[Any]) -> str | None:
    """The value that most of the runs have, which their names leave out; None if it is not most of them."""
    (text, count), *_ = Counter(map(_format_value, values)).most_common()
    return text if 2 * count > len(values) and count > 2 else None


def _names(runs: Sequence[Run]) -> list[str]:
    """The shortest unique name of each run: its directory, with as many parents as are needed to tell it apart."""
    parts = [run.path.resolve().parts for run in runs]
    names = []
    for own in parts:
        depth = next(
            d for d in range(1, len(own) + 1) if sum(p[-d:] == own[-d:] for p in parts) == 1 or d == len(own)
        )
        names.append("/".join(own[-depth:]))
    return names


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _contestant(run: Run) -> str:
    options = run.config.settings("model")["scheme_options"]
    text = ", ".join(f"{key}={_format_value(options[key])}" for key in sorted(options))
    return run.config.model.scheme + (f" ({text})" if text else "")


def _settings(run: Run) -> dict[str, Any]:
    model, train = run.config.settings("model"), run.config.settings("train")
    shown = {key: value for key, value in model.items() if key not in ("scheme", "scheme_options")}
    return shown | {key: value for key, value in train.items() if key not in BOOKKEEPING}


def _refuse_untrained(runs: Sequence[Run]) -> None:
    for run in runs:
        if run.config.train is None:
            raise ValueError(f"{run.path} was not trained here and has no losses to report: leave it out.")


def _describe_data(run: Run) -> str:
    return f"{corpus_name(run.config.as_dict()) or 'no data'}, {run.config.data.tokenizer.name}"


def _refuse_different_windows(results: Sequence[Result]) -> None:
    """Raise an error if two runs were validated on different text: their losses cannot be compared."""
    reference: tuple[Result, list[tuple[int, ...]]] | None = None
    for result in results:
        documents = None if result.validation is None else result.validation.val_documents
        if documents is None:
            continue
        windows = [tuple(document[:2]) for document in documents]
        if reference is None:
            reference = result, windows
        elif reference[1] != windows:
            raise ValueError(
                f"{reference[0].name} and {result.name} were validated on different windows of the data, so their "
                f"losses cannot be compared: train them with the same block and eval_windows, or make one report for "
                f"each."
            )
