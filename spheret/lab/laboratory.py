"""The directory of a study or a race: which run belongs to what the plan asks for, and what has ended there.

DIR/plan.toml         the plan of a study as it was last run; a race has race.json, and proposes the study after it
DIR/runs/NAME/        one run directory each, named after its settings: what two parts ask for is trained once. Those
                      of a race lie in DIR itself, named after contestant, rate and seed
DIR/configs/NAME.json the settings of each run that was started
DIR/costs.json        the seconds of one update, measured side by side
DIR/results.jsonl     one row per run that has ended
DIR/report/           the page, its tables and its figures
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from spheret.connections import scheme
from spheret.data import Data, open_named
from spheret.lab.executors.job import Job, training
from spheret.lab.plan import RECIPE, Contestant, Group, Plan
from spheret.lab.rows import RESULTS, RUNS, Key, Row, read_rows, row_of_run, write_rows
from spheret.lab.stages import tuning, wanted
from spheret.plan.fits import check_run
from spheret.runs.config import Given, RunConfig, differences, merge
from spheret.runs.layout import CONFIG
from spheret.runs.run import open_run
from spheret.support import files, machine
from spheret.support.documents import Document, Positive, Record
from spheret.support.errors import unknown
from spheret.train.recipes import complete
from spheret.train.step_cost import measure_step_costs

PLAN, COSTS, REPORT, LOCK = "plan.toml", "costs.json", "report", "lab.lock"
DEVICES = ("cpu", "cuda", "mps")
CONFIGS, LOGS = "configs", "logs"
# step costs whose rounds lie further apart say more about the machine than about the contestants
MOST_SPREAD = 0.1


class GroupCost(Record):
    """Seconds of one update of each contestant, measured in turn in one process.

    spread: how far they lay apart in the rounds, relative to the median; the largest of all contestants.
    """

    seconds: dict[str, Annotated[float, Meta(gt=0)]]
    rounds: Positive
    spread: Annotated[float, Meta(ge=0)]
    machine: dict[str, Any]

    @property
    def precise(self) -> bool:
        return self.spread <= MOST_SPREAD


class CostsRecord(Record):
    """costs.json, by group."""

    groups: dict[str, GroupCost]
    format: str = "spheret-study-costs"
    version: int = 2


STUDY_COSTS = Document(CostsRecord, "study", "delete it, and run the study again to measure")


def _content(data: Data) -> list[str]:
    """What identifies the tokens of prepared data, however its manifest is written."""
    return [shard.sha256 for shards in data.manifest.shards.values() for shard in shards]


@contextmanager
def claimed(directory: Path, name: str, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a directory. A plain kill stops what runs meanwhile as Ctrl-C does.

    name: race or study. check: called under the lock; it raises if the directory is another's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = files.Lock(directory / LOCK)
    if not lock.acquire():
        raise BlockingIOError(f"another {name} is running in {directory}: wait for it, or give another --out.")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check()
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()


@dataclass
class Laboratory:
    """The directory of a study or a race, with what its runs need.

    device, threads: they decide the last bits of a run, so that they are part of its name.
    flat: a race. Its runs lie in the directory itself, and their names have no hash of the settings: race.json keeps
        the settings, and runs of other settings are refused.
    """

    plan: Plan
    directory: Path
    device: str = "cpu"
    threads: int = 1
    ignore_memory: bool = False
    quiet: bool = False
    flat: bool = False
    _rows: dict[Key, Row] = field(default_factory=dict)
    _data: dict[tuple[str, str | None], Data] = field(default_factory=dict)
    _names: dict[Key, tuple[str, RunConfig]] = field(default_factory=dict)
    _jobs: dict[str, Job] = field(default_factory=dict)

    @cached_property
    def _groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.plan.groups}

    @cached_property
    def _contestants(self) -> dict[tuple[str, str], Contestant]:
        return {(group.name, each.label): each for group in self.plan.groups for each in group.contestants}

    def check(self, here: bool = True) -> None:
        """Raise if some run of the plan could not be trained. Nothing is prepared or written.

        here: whether this machine trains. Otherwise it may lack the device and the memory.
        """
        device = machine.resolve_device(self.device if here else "cpu")
        kind = self.device.split(":")[0]
        if kind not in DEVICES:
            raise unknown("--device", self.device, DEVICES)
        for group in self.plan.groups:
            for contestant in group.contestants:
                for rate in group.part.rates:
                    given = self._given(group, contestant, rate, 0)
                    config = complete(given, kind)
                if here:
                    check_run(config, device, self.ignore_memory)

    def prepare(self) -> None:
        """Open the data of every group, and prepare a corpus that is not in the cache yet.

        Raises if a split holds no window: contestants are compared by their validation loss.
        """
        for group in self.plan.groups:
            data = self.data(group)
            config = self.config(group, group.contestants[0])
            data.loader(config.model.block, config.train.batch_size, config.train.seed)
            data.validation(config.model.block, config.train.batch_size, config.evaluation.eval_windows)

    def data(self, group: Group) -> Data:
        asked = merge(RECIPE, group.given)["data"]
        place = asked["path"], asked.get("tokenizer")
        if place not in self._data:
            self._data[place] = open_named(*place, self.quiet, self.directory)
        return self._data[place]

    def _given(self, group: Group, contestant: Contestant, rate: float, seed: int) -> Given:
        model = contestant.given["model"]
        plain = scheme(model["scheme"])
        # what is given and what is the default anyway are one run, but in a race two contestants with a run each
        options = {
            name: value
            for name, value in model["scheme_options"].items()
            if self.flat or not hasattr(plain, name) or getattr(plain, name) != value
        }
        own = {"model": {"scheme_options": options}, "train": {"lr": rate, "seed": seed}}
        return merge(RECIPE, group.given, contestant.given, own)

    def name(self, key: Key) -> tuple[str, RunConfig]:
        """The name of a run's directory, which follows from its settings, and the settings."""
        if key not in self._names:
            group = self._groups[key.group]
            data = self.data(group)
            given = self._given(group, self._contestants[key.group, key.contestant], key.rate, key.seed)
            config = complete(given, self.device.split(":")[0], 1, data.vocab_size, data.padded_vocab_size)
            self._names[key] = self._name(key, group, config, data), config
        return self._names[key]

    def _name(self, key: Key, group: Group, config: RunConfig, data: Data) -> str:
        if self.flat:
            # all digits of the rate, so that no two names are the same
            rate = f"-lr{key.rate}" if len(group.part.rates) > 1 else ""
            return f"{self._contestants[key.group, key.contestant].slug}{rate}-{key.seed}"
        settings = {name: values for name, values in config.as_dict().items() if name != "data"}
        settings |= {"data": _content(data), "device": self.device, "threads": self.threads}
        digest = hashlib.sha256(files.dump(settings)).hexdigest()[:12]
        return f"{config.model.scheme}-lr{key.rate:g}-seed{key.seed}-{digest}"

    def config(self, group: Group, contestant: Contestant) -> RunConfig:
        """The settings of a contestant at the lowest rate, with the first seed of the search."""
        return self.name(Key(group.name, contestant.label, group.part.rates[0], group.part.tuned_with[0]))[1]

    def run_directory(self, key: Key) -> Path:
        return (self.directory if self.flat else self.directory / RUNS) / self.name(key)[0]

    def job(self, key: Key) -> Job:
        """The training of a run. Its settings are written once: what can start is asked for after every run."""
        name, config = self.name(key)
        if name not in self._jobs:
            settings = config.reading(self.data(self._groups[key.group]))
            place = self.directory / CONFIGS, self.device, self.threads, self.ignore_memory
            self._jobs[name] = training(self.run_directory(key), settings, *place)
        return self._jobs[name]

    def join(self, rows: Iterable[Row]) -> int:
        """Count runs of another directory, or of another machine, as done, if their settings are the same.

        Returns how many are of this plan. The name of a run holds a hash of its settings.
        """
        same = {row.key: row for row in rows if self._asked(row.key) and row.run == self.name(row.key)[0]}
        for key, row in same.items():
            own = self._rows.setdefault(key, row)
            # another processor, or another version of torch, may give other last bits
            if own.made_by == row.made_by and own.result != row.result:
                raise ValueError(
                    f"two results of {row.run} contradict each other ({own.outcome} with {own.val_loss}, "
                    f"{row.outcome} with {row.val_loss}): leave the wrong one out of the file that is joined."
                )
        return len(same)

    def recall(self) -> None:
        """Count the rows of an earlier results.jsonl of this directory as done, if they are of this plan."""
        if not self.flat and (self.directory / RESULTS).is_file():
            self.join(read_rows(self.directory / RESULTS).values())

    def _asked(self, key: Key) -> bool:
        return (key.group, key.contestant) in self._contestants

    def rows(self) -> Mapping[Key, Row]:
        """Every run that has ended, of those that the plan asks for. What has ended is read once."""
        while True:
            found = {}
            for key in wanted(self.plan, self._rows):
                row = self._row(key)
                if row is not None:
                    found[key] = row
            if not found:
                return self._rows
            self._rows.update(found)

    def _row(self, key: Key) -> Row | None:
        """The row of a run directory, whose config must be what its name says."""
        directory = self.run_directory(key)
        # a training makes its directory before it writes its config
        if not (directory / CONFIG).exists():
            return None
        run = open_run(directory)
        row = row_of_run(run, key)
        changes = differences(run.settings, self.name(key)[1]) if row is not None else []
        if changes:
            raise ValueError(
                f"{directory} is not the run that its name says ({'; '.join(changes[:3])}): it was moved or edited. "
                "Put it back, or delete it to train that run again."
            )
        return row

    def wanted(self) -> list[Key]:
        return wanted(self.plan, self.rows())

    def costs(self) -> dict[str, GroupCost]:
        try:
            return STUDY_COSTS.read(self.directory / COSTS).groups
        except FileNotFoundError:
            return {}

    def unmeasured(self) -> dict[Group, dict[Contestant, float]]:
        """The groups that are done and have no precise costs of all their contestants, each with its best rate."""
        results, left = self.results(), {key.group for key in self.wanted()}
        found = {}
        for group in self.plan.groups:
            rates = {each: tuning(self.plan, group, each, results).best for each in group.contestants}
            tuned = {each: rate for each, rate in rates.items() if rate is not None}
            known = {key.contestant for key, row in results.items() if key.group == group.name and row.step_seconds}
            if group.name not in left and group.part.compared_with and not {each.label for each in tuned} <= known:
                found[group] = tuned
        return found

    def measure(self) -> None:
        """Measure the update of every contestant of the groups that are done."""
        costs, device = self.costs(), machine.resolve_device(self.device)
        for group, tuned in self.unmeasured().items():
            configs = {each.label: self.name(Key(group.name, each.label, rate, 0))[1] for each, rate in tuned.items()}
            cost = measure_step_costs(configs, self.data(group), device, self.threads)
            costs[group.name] = GroupCost(*cost, {**machine.machine(), "threads": self.threads})
            STUDY_COSTS.write(self.directory / COSTS, CostsRecord(costs))

    def results(self) -> dict[Key, Row]:
        """The rows with the cost of their updates, as results.jsonl has them."""
        costs = self.costs()
        results = {}
        for key, row in self.rows().items():
            cost = costs.get(key.group)
            seconds = cost.seconds.get(key.contestant) if cost is not None and cost.precise else None
            # a joined row may have one of its own
            results[key] = row if seconds is None else msgspec.structs.replace(row, step_seconds=seconds)
        return results

    def write_results(self) -> dict[Key, Row]:
        """Write results.jsonl: what this plan asks for and has ended, and what the file held before."""
        results, path = self.results(), self.directory / RESULTS
        before = read_rows(path) if path.is_file() and not self.flat else {}
        for key in before.keys() & results.keys():
            if before[key].run != results[key].run:
                raise FileExistsError(
                    f"{path} has {before[key].run} where this plan has {results[key].run}, so that one of them would "
                    "be lost: give another --out for a plan with other settings."
                )
        write_rows(path, {**before, **results}.values())
        return results
