"""The directory of a study or a race: which run belongs to what the plan asks for, and what has ended there.

DIR/plan.toml         the plan as it was last run
DIR/runs/NAME/        one run directory each, named after its settings: what two parts ask for is trained once
DIR/configs/NAME.json the settings of each run that was started
DIR/results.jsonl     one row per run that has ended; results.ngrams.json has the n-gram losses beside them
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

from spheret.connections import scheme
from spheret.data import Data, open_named
from spheret.flags import shown
from spheret.lab.executors import Job
from spheret.lab.ngrams import NGRAMS, NgramsRecord, ngrams_beside, ngrams_file, read_ngrams, settings_of
from spheret.lab.plan import RECIPE, Contestant, Group, Plan, read_plan
from spheret.lab.rows import RESULTS, RUNS, Key, Row, read_rows, row_of_run, write_rows
from spheret.lab.stages import wanted
from spheret.runs.config import Given, RunConfig, differences, merge
from spheret.runs.cost import check_run
from spheret.runs.layout import CONFIG
from spheret.runs.run import manifest_sha256, open_run
from spheret.support import files, machine
from spheret.support.errors import unknown
from spheret.support.files import output_path
from spheret.support.machine import check_threads
from spheret.support.ranges import check_counts
from spheret.train.recipes import complete

PLAN, REPORT, LOCK = "plan.toml", "report", "lab.lock"
DEVICES = ("cpu", "cuda", "mps")
CONFIGS, LOGS = "configs", "logs"
# settings that the names of all results so far leave out at these values
UNNAMED: dict[str, dict[str, Any]] = {
    "model": {
        "positions": "learned", "rope_base": 10_000.0, "mlp": "gelu", "norm": None, "qk_norm": False,
        "kv_heads": None, "head": "tied",
    },
    "train": {
        "optimizer": "adamw", "matrix_lr": None, "embedding_lr": None, "lr_schedule": "cosine", "decay_steps": 0,
        "parametrization": "standard", "base_width": None, "base_layers": None, "base_heads": None,
    },
}  # fmt: skip
# a setting that is gone, with the value that it has in them
GONE = {"evaluation": {"certify_every": 0}}


@contextmanager
def claimed(directory: Path, name: str, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a directory. A plain kill stops what runs meanwhile as Ctrl-C does.

    name: race or study. check: called under the lock; it raises if the directory belongs to a different command.
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


@dataclass(frozen=True)
class Place:
    """What trainings run on.

    Args:
        threads: CPU threads per training. A different number changes the last bits, and is a different run.
        jobs: Trainings at a time.
        device: cpu, cuda or mps.
        ignore_memory: Start although a model and its batch need more memory than there is.
        quiet: Print no progress.
    """

    threads: int = 1
    jobs: Annotated[int | None, shown("INT", "as many as the cores allow")] = None
    device: str = "cpu"
    ignore_memory: bool = False
    quiet: bool = False

    def check(self) -> None:
        check_threads("--threads", self.threads)
        check_counts(jobs=self.jobs)

    @property
    def at_a_time(self) -> int:
        """Trainings at a time on this machine."""
        return self.jobs or max(1, machine.cores() // self.threads)


@dataclass
class Laboratory:
    """The directory of a study or a race, with what its runs need.

    place: its device and its threads decide the last bits of a run, so that they are part of its name.
    """

    plan: Plan
    directory: Path
    place: Place = field(default_factory=Place)
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
        device = machine.resolve_device(self.place.device if here else "cpu")
        kind = self.place.device.split(":")[0]
        if kind not in DEVICES:
            raise unknown("--device", self.place.device, DEVICES)
        for group in self.plan.groups:
            for contestant in group.contestants:
                for rate in group.rates(contestant.label):
                    config = complete(self._given(group, contestant, rate, 0), kind)
                if here:
                    check_run(config, device, self.place.ignore_memory)

    def prepare(self) -> None:
        """Open the data of every group, and prepare a corpus that is not in the cache yet.

        Raises if a split holds no window: contestants are compared by their validation loss.
        """
        for group in self.plan.groups:
            data, config = self.data(group), self.config_of(group)
            data.loader(config.model.block, config.train.batch_size, config.train.seed)
            data.validation(config.model.block, config.train.batch_size, config.evaluation.eval_windows)

    def config_of(self, group: Group) -> RunConfig:
        """The settings of a run of a group: its first contestant, at its first rate."""
        label = group.contestants[0].label
        return self.name(Key(group.name, label, group.rates(label)[0], group.part.tuned_with[0]))[1]

    def data(self, group: Group) -> Data:
        asked = merge(RECIPE, group.given)["data"]
        place = asked["path"], asked.get("tokenizer")
        if place not in self._data:
            self._data[place] = open_named(*place, self.place.quiet, self.directory)
        return self._data[place]

    def _given(self, group: Group, contestant: Contestant, rate: float, seed: int) -> Given:
        model = contestant.given["model"]
        plain = scheme(model["scheme"])
        # what is given and what is the default anyway are one run
        options = {
            name: value
            for name, value in model["scheme_options"].items()
            if not hasattr(plain, name) or getattr(plain, name) != value
        }
        own = {"model": {"scheme_options": options}, "train": {"lr": rate, "seed": seed}}
        return merge(RECIPE, group.given, contestant.given, own)

    def name(self, key: Key) -> tuple[str, RunConfig]:
        """The name of a run's directory, which follows from its settings, and the settings."""
        if key not in self._names:
            group = self._groups[key.group]
            data = self.data(group)
            given = self._given(group, self._contestants[key.group, key.contestant], key.rate, key.seed)
            config = complete(given, self.place.device.split(":")[0], 1, data.vocab_size, data.padded_vocab_size)
            self._names[key] = self._name(key, config, data), config
        return self._names[key]

    def _name(self, key: Key, config: RunConfig, data: Data) -> str:
        # what identifies the tokens, however their manifest is written
        tokens = [shard.sha256 for shards in data.manifest.shards.values() for shard in shards]
        settings: dict[str, Any] = {"data": tokens, "device": self.place.device, "threads": self.place.threads}
        for section, values in merge(config.as_dict(), GONE).items():
            unnamed = UNNAMED.get(section, {}).items()
            if section != "data":
                settings[section] = dict(pair for pair in values.items() if pair not in unnamed)
        digest = hashlib.sha256(files.dump(settings)).hexdigest()[:12]
        return f"{config.model.scheme}-lr{key.rate:g}-seed{key.seed}-{digest}"

    def run_directory(self, key: Key) -> Path:
        return self.directory / RUNS / self.name(key)[0]

    def job(self, key: Key) -> Job:
        """The training of a run. Its settings are written once: what can start is asked for after every run."""
        name, config = self.name(key)
        if name not in self._jobs:
            directory, settings = (
                output_path(self.directory, *each) for each in ((RUNS, name), (CONFIGS, f"{name}.json"))
            )
            files.write_atomically(settings, files.dump(config.reading(self.data(self._groups[key.group])).as_dict()))
            where = ["--out", str(directory), "--threads", str(self.place.threads), "--device", self.place.device]
            words = ["train", "--config", str(settings), *where, "--quiet"]
            self._jobs[name] = Job(name, directory, (*words, *["--ignore-memory"] * self.place.ignore_memory))
        return self._jobs[name]

    def join(self, rows: Iterable[Row]) -> int:
        """Count runs of another directory, or of another machine, as done, if their settings are the same.

        Returns how many are of this plan. The name of a run holds a hash of its settings.
        """
        same = {row.key: row for row in rows if self._asked(row.key) and row.run == self.name(row.key)[0]}
        for key, row in same.items():
            own = self._rows.setdefault(key, row)
            # a different processor or version of torch may give different last bits
            if own.made_by == row.made_by and own.result != row.result:
                raise ValueError(
                    f"two results of {row.run} contradict each other ({own.state} with {own.val_loss}, "
                    f"{row.state} with {row.val_loss}): leave the wrong one out of the file that is joined."
                )
        return len(same)

    def check_same_plan(self) -> None:
        """Raise if runs or rows of this directory have other settings in its plan.toml than in this plan."""
        path = self.directory / PLAN
        begun = any((self.directory / RUNS).glob("*")) or (self.directory / RESULTS).is_file()
        if not path.is_file() or not begun:
            return
        before = Laboratory(read_plan(path), self.directory, self.place)
        for (name, label), contestant in before._contestants.items():
            group = before._groups[name]
            key = Key(name, label, group.rates(label)[0], group.part.tuned_with[0])
            if self._asked(key) and self.name(key)[0] != before.name(key)[0]:
                raise FileExistsError(
                    f"{contestant.label} of {name} has other settings in {path} than in this plan, so that its runs "
                    "would be lost: give another --out for a plan with other settings."
                )

    def recall(self) -> None:
        """Count the rows of an earlier results.jsonl of this directory as done, if they are of this plan."""
        path = self.directory / RESULTS
        self.join(read_rows(path).values() if path.is_file() else [])

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

    def write_results(self) -> None:
        """Write results.jsonl: what this plan asks for and has ended, and what the file held before; and n-grams."""
        path = output_path(self.directory, RESULTS)
        before = read_rows(path) if path.is_file() else {}
        write_rows(path, {**before, **self.rows()}.values())
        self.write_ngrams(path, self.plan.groups)

    def write_ngrams(self, results: Path, groups: Iterable[Group]) -> None:
        """Write the n-gram losses of some groups beside a results.jsonl. What is known is not counted again."""
        known = {(each.group, each.settings): each for each in read_ngrams(results)}
        found = []
        for group in groups:
            data, config = self.data(group), self.config_of(group)
            sha256 = manifest_sha256(data)
            record = known.get((group.name, settings_of(config, sha256)))
            found.append(record or ngrams_beside(group.name, config, data, sha256))
        records = NgramsRecord([record for record in found if record is not None])
        NGRAMS.write(output_path(results.parent, ngrams_file(results).name), records)
