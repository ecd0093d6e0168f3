"""The runs of a report: read from their directories and checked to be comparable. Only this module reads metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from spheret.connections import SCHEMES
from spheret.lab.answers import REFERENCE, GroupAnswer, answer_of
from spheret.lab.entries import entry_of_runs
from spheret.lab.ngrams import read_ngrams, settings_of
from spheret.lab.page.section import TableCell
from spheret.lab.plan import Contestant, Group, PartRecord
from spheret.lab.rows import RESULTS, RUNS, Key, Row, row_of_run, shortest_names
from spheret.model.gpt import PRESETS
from spheret.paper.recipe import paper_size
from spheret.runs.config import BOOKKEEPING
from spheret.runs.layout import CHECKPOINTS, CONFIG, METRICS
from spheret.runs.metrics import MetricsRecord
from spheret.runs.records import corpus_name
from spheret.runs.run import Run, open_run

# the learning rate, and what follows from it
RATE_SETTINGS = ("lr", "min_lr")


@dataclass(frozen=True)
class Result:
    """One run: its directory, its names in the report, the lines of its metrics, and its row if it has ended."""

    run: Run
    name: str
    label: str
    lines: list[MetricsRecord]
    row: Row | None

    @property
    def seed(self) -> int:
        return self.run.settings.train.seed

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.run.settings.train.lr

    @property
    def scheme(self) -> str:
        return self.run.config.model.scheme

    @property
    def step(self) -> int:
        """The step of the last line; 0 if there is no line."""
        return self.lines[-1].step if self.lines else 0

    @property
    def validation(self) -> MetricsRecord | None:
        """The line of the last evaluation."""
        return next((line for line in reversed(self.lines) if line.val_loss is not None), None)

    def number(self, key: str) -> TableCell | None:
        """A loss of the row, with its source; None if the run has no such loss."""
        value = None if self.row is None or self.row.state == "diverged" else getattr(self.row, key)
        return None if value is None else TableCell("", value, f"{self.name}.{key}")


@dataclass(frozen=True)
class RunGroup:
    """Runs that can be compared, grouped by contestant. They have the same data.

    A contestant is a scheme with its options, and with every other setting that differs between the runs. Its name
    leaves out a value that most of the runs have, and the learning rate: each is shown at its best rate.

    answer: what the runs that have ended say.
    by_rate: all runs of each contestant by learning rate, in the order of the answer.
    differing: names of the settings that are not the same in all runs.
    name: the corpus and the tokenizer, and what else distinguishes the groups of a report.
    """

    answer: GroupAnswer
    by_rate: dict[str, dict[float, list[Result]]]
    differing: list[str]
    name: str

    @cached_property
    def contestants(self) -> dict[str, list[Result]]:
        """The runs of each contestant at the reported learning rate, the best contestant first.

        Where no rate gave a loss, it is the lowest.
        """
        rates = {entry.label: entry.rate for entry in self.answer.entries}
        every = self.by_rate.items()
        return {label: runs[min(runs) if (rate := rates[label]) is None else rate] for label, runs in every}

    @property
    def results(self) -> list[Result]:
        """The runs that are shown."""
        return [result for results in self.contestants.values() for result in results]

    @property
    def every(self) -> list[Result]:
        return [result for runs in self.by_rate.values() for results in runs.values() for result in results]


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories that these paths name. A directory of runs names every run in it.

    Raises if something in it is a run that cannot be read: the others would be compared without it.
    """
    directories: list[Path] = []
    for path in map(Path, paths):
        # a study has its runs in a folder of their own
        inner = [path / RUNS, path] if (path / RUNS).is_dir() else [path]
        children = [] if (path / CONFIG).exists() else [run for each in inner for run in _runs_in(each)]
        directories += children or [path]
    return list(dict.fromkeys(directories))


def _runs_in(folder: Path) -> list[Path]:
    found = []
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        # a folder without rights raises here, where a glob leaves it out
        names = {entry.name for entry in child.iterdir()} if child.is_dir() else set()
        if names & {METRICS, CHECKPOINTS} and not (child / CONFIG).is_file():
            raise FileNotFoundError(
                f"{child} is a run without a {CONFIG} that can be read: put it back, or name only the other runs."
            )
        found += [child] if CONFIG in names else []
    return found


def read_groups(paths: Sequence[str | Path]) -> list[RunGroup]:
    """Open every run. There is one group for each set of data, and for each of the paper's sizes.

    Losses on different data cannot be compared. The paper compares schemes within one size.
    """
    runs = [open_run(path) for path in find_runs(paths)]
    if not runs:
        raise ValueError("a report needs at least one run directory, got none: give one, for example runs/race.")
    for run in runs:
        if run.config.train is None:
            raise ValueError(f"{run.path} was not trained here and has no losses to report: leave it out.")
        run.check_unedited()
    names = shortest_names([run.path for run in runs])
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
    # a min_lr that follows from the rate is not its own setting
    follows = len({round(run.settings.train.min_lr / run.settings.train.lr, 9) for run in runs}) == 1
    named = [key for key in differing if key != "lr" and not (key == "min_lr" and follows)]
    usual = {key: _usual([run_settings.get(key) for run_settings in settings]) for key in named}
    results = []
    for run, run_settings in zip(runs, settings, strict=True):
        own = {key: _format_value(run_settings.get(key)) for key in named}
        label = ", ".join([_contestant(run), *(f"{key}={own[key]}" for key in named if own[key] != usual[key])])
        lines, train = run.metrics(), run.settings.train
        row = row_of_run(run, Key(name, label, train.lr, train.seed), lines)
        if row is not None:
            row = msgspec.structs.replace(row, run=names[run.path])
        results.append(Result(run, names[run.path], label, lines, row))
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
    group, entries = _plan_group(name, contestants), []
    for contestant in group.contestants:
        rows = [run.row for run in _runs(contestants[contestant.label])]
        ended = [row for row in rows if row is not None]
        entries.append(entry_of_runs(contestant, ended, len(rows) - len(ended), group))
    answer = answer_of(group, entries, REFERENCE, _ngrams(runs))
    order = [entry.label for entry in answer.entries]
    return RunGroup(answer, {label: contestants[label] for label in order}, differing, name)


def _runs(rates: Mapping[float, Sequence[Result]]) -> list[Result]:
    return [run for runs in rates.values() for run in runs]


def _plan_group(name: str, contestants: Mapping[str, Mapping[float, Sequence[Result]]]) -> Group:
    """The runs as a plan would have asked for them: a race, with these contestants, rates and seeds."""
    every = [run for rates in contestants.values() for run in _runs(rates)]
    most = max((runs for rates in contestants.values() for runs in rates.values()), key=len)
    part = PartRecord(
        name="runs",
        contestants=list(contestants),
        rates=sorted({run.rate for run in every}),
        title=name,
        extend=0,
        tuning_seeds=[run.seed for run in most],
        fresh=False,
    )
    schemes = {label: _runs(rates)[0].scheme for label, rates in contestants.items()}
    asked = tuple(Contestant(label, {"model": {"scheme": scheme}}) for label, scheme in schemes.items())
    return Group(part, name, 0, asked, {"model": every[0].run.config.settings("model")}, {})


def _usual(values: Sequence[Any]) -> str | None:
    """The value that most of the runs have, which their names leave out; None if it is not most of them."""
    (text, count), *_ = Counter(map(_format_value, values)).most_common()
    return text if 2 * count > len(values) and count > 2 else None


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ngrams(runs: Sequence[Run]) -> dict[str, float]:
    """The losses of n-gram models, if all runs are of one race or study and have the same ones."""
    folders = {run.path.resolve().parent for run in runs}
    known = {each.settings: each.losses for folder in folders for each in read_ngrams(folder.parent / RESULTS)}
    every = {settings_of(run.settings, run.config.data.manifest_sha256) for run in runs}
    return known.get(next(iter(every)), {}) if len(every) == len(folders) == 1 else {}


def _contestant(run: Run) -> str:
    options = run.config.settings("model")["scheme_options"]
    text = ", ".join(f"{key}={_format_value(options[key])}" for key in sorted(options))
    return run.config.model.scheme + (f" ({text})" if text else "")


def _settings(run: Run) -> dict[str, Any]:
    settings = {**run.config.settings("model"), **run.config.settings("train")}
    own = {"scheme", "scheme_options", *BOOKKEEPING}
    return {key: value for key, value in settings.items() if key not in own}


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
