"""`spheret race`: every contestant on the same batches, each an ordinary run; then one report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

# tyro reads annotations from the module
import tyro

from spheret.connections.parse import SchemeChoice, parse_options, parse_schemes
from spheret.data import Data, check_named, open_named
from spheret.flags import given, section_flags, shown
from spheret.lab.executors.job import training
from spheret.lab.executors.local import Local
from spheret.lab.outcome import print_outcome
from spheret.lab.report import write_report
from spheret.lab.runs import read_groups
from spheret.lab.scoreboard import Scoreboard
from spheret.plan.fits import check_run
from spheret.runs.config import Given, RunConfig, merge, read_config
from spheret.runs.metrics import Follower
from spheret.runs.run import manifest_sha256
from spheret.runs.step_cost import StepCost, measured_together, read_step_cost
from spheret.support import files, machine
from spheret.support.documents import Document, Record
from spheret.support.exit_codes import INTERRUPTED
from spheret.support.ranges import check_above_zero, check_count, check_counts
from spheret.support.threads import check_threads
from spheret.train.recipes import complete
from spheret.train.step_cost import measure_step_costs

RACE, LOCK, CONFIGS = "race.json", "race.lock", "configs"
FIRST_SEED, MOST_SEEDS = 1337, 10_000


class RaceRecord(Record):
    """race.json: what all runs of a race have in common, by name."""

    settings: dict[str, Any]
    format: str = "spheret-race"
    version: int = 3


RACES = Document(RaceRecord, "race", "delete the directory, or give another --out")

# what a race takes where nothing is given
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"layers": 12, "heads": 4, "width": 64, "block": 128, "head_bias": "unigram", "head": "shifted"},
    "data": {"path": "sotu"},
    "train": {"steps": 200, "batch_size": 8, "keep": 1},
    "evaluation": {"eval_windows": 128},
}
RATES = (2.5e-3, 5e-3, 1e-2)
# the nine with the head of the recipe, and the projection with the paper's own
CONTESTANTS = "paper,proj-spheretnorm:head=tied"
# settings of the model that a contestant may have for itself: all have the same matrices
OWN_SETTINGS = ("head", "head_bias")
ModelFlags = section_flags("model", RECIPE, without=("scheme",))
DataFlags = section_flags("data", RECIPE)
OptimisationFlags = section_flags("train", RECIPE, without=("seed", "init_from", "lr"))
EvaluationFlags = section_flags("evaluation", RECIPE)


@dataclass(frozen=True)
class RaceRun:
    """One run of a race: a scheme with its options, a seed, and a learning rate if the race has several."""

    choice: SchemeChoice
    seed: int
    lr: float | None = None

    @property
    def contestant(self) -> str:
        return "-".join([self.choice.name, *self.choice.settings, *self.choice.others])

    @property
    def name(self) -> str:
        # all digits of the rate, so that no two names are the same
        return f"{self.contestant}{'' if self.lr is None else f'-lr{self.lr}'}-{self.seed}"

    def settings(self, shared: Given) -> dict[str, Any]:
        """What to ask of the trainer."""
        own = parse_options(self.choice.others)
        model = {"scheme": self.choice.name, "scheme_options": self.choice.options, **own}
        train = {"seed": self.seed} if self.lr is None else {"seed": self.seed, "lr": self.lr}
        return merge(shared, {"model": model, "train": train})


def learning_rates(text: str) -> list[float]:
    """The rates of the flag --lr, a list with commas, ascending."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got {text[:60]!r}.") from None
    for rate in rates:
        check_above_zero("each rate of --lr", rate)
    rates.sort()
    for rate, following in pairwise(rates):
        if rate == following:
            raise ValueError(f"--lr has {rate} twice: give each rate once.")
    return rates


def race_seeds(text: str) -> list[int]:
    """The seeds of the flag --seeds: a number is how many, and numbers with commas are the seeds themselves."""
    words = [word.strip() for word in text.split(",")]
    # a comma at the end makes a list of one seed
    listed = words[:-1] if len(words) > 1 and not words[-1] else words
    # longer words are too large in any case, and Python refuses to read the longest
    if not all(word.removeprefix("-").isdecimal() and len(word) < 4000 for word in listed):
        raise ValueError(f"--seeds must be a number, or seeds with commas, such as 3,4,9 or 7, got {text[:60]!r}.")
    numbers = [int(word) for word in listed]
    if len(words) == 1:
        return [FIRST_SEED + k for k in range(check_count("--seeds", numbers[0], most=MOST_SEEDS))]
    check_count("the seeds of --seeds", len(numbers), most=MOST_SEEDS)
    for seed in numbers:
        check_count("each seed of --seeds", seed, least=0)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds {text[:60]} has a seed twice: give each once.")
    return numbers


def race_runs(schemes: str, seeds: Sequence[int], rates: Sequence[float] = ()) -> list[RaceRun]:
    """The runs of a race, in an order that compares all contestants if the race is cut short.

    A seed of every contestant comes before the next seed. Within a seed, every contestant has the middle rate before
    anyone has a rate further out.

    rates: ascending; none if all runs share one rate.
    """
    choices = parse_schemes(schemes, OWN_SETTINGS)
    # a stable sort: of two rates at one distance from the middle, the lower comes first
    outwards = sorted(range(len(rates)), key=lambda index: abs(2 * index - (len(rates) - 1)))
    ordered: list[float | None] = [rates[index] for index in outwards] if rates else [None]
    return [RaceRun(choice, seed, rate) for seed in seeds for rate in ordered for choice in choices]


def _rates(where: Where, shared: Given) -> list[float]:
    """The learning rates of a race: those of the flag, else that of a config file, else ours."""
    if where.lr is not None:
        return learning_rates(where.lr)
    return [shared["train"]["lr"]] if "lr" in shared["train"] else list(RATES)


def _shared_settings(config: RunConfig, rates: Sequence[float], shared: Given) -> dict[str, Any]:
    """What all runs of a race have in common, by name. Several rates are one setting, which they share."""
    names = {name: value for section in config.as_dict().values() for name, value in section.items()}
    own = ("scheme", "scheme_options", "seed", *OWN_SETTINGS)
    settings = {name: value for name, value in names.items() if name not in own}
    settings |= {name: shared["model"][name] for name in OWN_SETTINGS}
    if len(rates) > 1:
        settings["lr"] = list(rates)
        # by default it follows each rate
        if "min_lr" not in shared["train"]:
            del settings["min_lr"]
    return settings


def _claim(directory: Path, settings: dict[str, Any]) -> files.Lock:
    """Lock the directory, which must be empty or hold this race."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RACE
    lock = files.Lock(directory / LOCK)
    if not lock.acquire():
        raise BlockingIOError(f"another race is running in {directory}: wait for it, or give another --out.")
    try:
        if path.exists():
            _check_same(path, settings)
        elif any(entry.name != LOCK for entry in directory.iterdir()):
            raise FileExistsError(f"--out {directory} is not empty and no race: give a new or empty directory.")
        else:
            RACES.write(path, RaceRecord(settings=settings))
    except BaseException:
        lock.release()
        raise
    return lock


def _check_same(path: Path, settings: dict[str, Any]) -> None:
    """Raise unless the race in this directory has these settings."""
    saved = RACES.read(path).settings
    changes = [
        f"{key} is {saved.get(key)!r} there and {settings.get(key)!r} here"
        for key in dict.fromkeys([*settings, *saved])
        if saved.get(key) != settings.get(key)
    ]
    if changes:
        raise FileExistsError(
            f"{path.parent} holds a race with other settings ({'; '.join(changes)}): give the settings it has to go "
            f"on with it, another --out for a new race, or delete it."
        )


def _is_measured(directory: Path, runs: Sequence[RaceRun]) -> bool:
    try:
        costs = [read_step_cost(directory / run.name) for run in runs]
    # a damaged file is written again
    except ValueError:
        return False
    return measured_together(costs)


def _measure(directory: Path, configs: dict[RaceRun, RunConfig], data: Data, where: Where) -> None:
    """Measure the step of every contestant side by side: while they trained, they slowed each other."""
    if _is_measured(directory, list(configs)):
        return
    if not where.quiet:
        print("race: measuring the step of every contestant, side by side.", file=sys.stderr, flush=True)
    # any seed of a contestant will do
    contestants = {run.contestant: config for run, config in configs.items()}
    device = machine.resolve_device(where.device)
    try:
        seconds, rounds = measure_step_costs(contestants, data, device, where.threads)
    # such as too little memory: the race has its results all the same
    except (RuntimeError, MemoryError) as error:
        print(f"the steps could not be measured side by side ({error}); the report says so.", file=sys.stderr)
        return
    environment = {**machine.machine(), "threads": where.threads}
    for run in configs:
        StepCost.of(run.contestant, seconds, rounds, where.device, environment).write(directory / run.name)


@dataclass(frozen=True)
class Where:
    """Who races, where the race is written, and what it runs on.

    Args:
        schemes: "paper" for its nine, "all", or names with commas; scheme:option=value races a variant, and
            scheme:head=tied or scheme:head_bias=none one with another head.
        seeds: How many seeds; or, with a comma, the seeds: 3,4,9 (one seed: 7,). With one no pair can have a winner.
        lr: Highest learning rates with commas. Every scheme is trained at each and reported at its best.
        out: The directory of the race: one run directory per contestant, and report/.
        config: A TOML or JSON file of settings, by section; flags win over it.
        threads: CPU threads per training. They are recorded; another number changes the last bits.
        jobs: Trainings at a time.
        device: cpu, cuda or mps.
        ignore_memory: Start although a model and its batch need more memory than there is.
        quiet: Print no progress.
    """

    schemes: str = CONTESTANTS
    seeds: Annotated[str, shown("INT|LIST", "1")] = "1"
    lr: Annotated[str | None, shown("LIST", ",".join(map(str, RATES)))] = None
    out: str = "runs/race"
    config: Annotated[Path | None, shown("PATH", "none")] = None
    threads: int = 1
    jobs: Annotated[int | None, shown("INT", "as many as the cores allow")] = None
    device: str = "cpu"
    ignore_memory: bool = False
    quiet: bool = False


def _check_data(config: RunConfig, data: Data) -> None:
    """Raise if a split holds no window. A race is decided by the validation loss, so it needs both splits."""
    data.loader(config.model.block, config.train.batch_size, config.train.seed)
    data.validation(config.model.block, config.train.batch_size, config.evaluation.eval_windows)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def race(
    where: Annotated[Where, tyro.conf.FlagCreatePairsOff],
    model: ModelFlags,  # type: ignore[valid-type]
    data: DataFlags,  # type: ignore[valid-type]
    optimisation: OptimisationFlags,  # type: ignore[valid-type]
    evaluation: EvaluationFlags,  # type: ignore[valid-type]
) -> int:
    """Train every scheme on the same batches, then write one report. Run the same command again to continue."""
    check_threads("--threads", where.threads)
    check_counts(jobs=where.jobs)
    device, directory = machine.resolve_device(where.device), Path(where.out).expanduser()
    files.check_output_directory("--out", directory)
    jobs = where.jobs or max(1, machine.cores() // where.threads)
    shared = merge(
        RECIPE,
        {} if where.config is None else read_config(where.config),
        given(model=model, data=data, train=optimisation, evaluation=evaluation),
    )
    rates = _rates(where, shared)
    # all runs share a single rate
    if len(rates) == 1:
        shared["train"]["lr"] = rates[0]
    runs = race_runs(where.schemes, race_seeds(where.seeds), rates if len(rates) > 1 else ())
    every = shared["evaluation"].get("eval_every")
    if every is not None:
        check_count("--eval-every of a race", every)
        # what is validated is saved
        shared["train"].setdefault("checkpoint_every", every)
    # wrong settings are found before anything is written or prepared
    for run in runs:
        check_run(complete(run.settings(shared), device.type), device, where.ignore_memory)
    check_named(shared["data"]["path"])
    if not where.quiet:
        count = f"{len(runs)} run{'s' * (len(runs) > 1)} of {len({run.contestant for run in runs})} contestants"
        print(f"race: {count} on {shared['data']['path']}, into {directory}.", file=sys.stderr, flush=True)
    prepared = open_named(shared["data"]["path"], shared["data"].get("tokenizer"), where.quiet)
    sizes = prepared.vocab_size, prepared.padded_vocab_size
    configs = {run: complete(run.settings(shared), device.type, 1, *sizes) for run in runs}
    for config in configs.values():
        check_run(config, device, where.ignore_memory)
        _check_data(config, prepared)
    settings = {
        **_shared_settings(configs[runs[0]], rates, shared),
        "manifest_sha256": manifest_sha256(prepared),
        "threads": where.threads,
        "device": where.device,
    }
    lock = _claim(directory, settings)
    # a plain kill stops it as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = configs[runs[0]].train.steps
    try:
        followers = [Follower(run.name, directory / run.name, steps) for run in runs]
        for follower in followers:
            follower.update()
        todo = [run for run, follower in zip(runs, followers, strict=True) if not follower.done]
        if not where.quiet:
            _announce(directory, runs, todo, steps, jobs, where.threads)
        if todo:
            settings_of = {run: configs[run].reading(prepared) for run in todo}
            place = directory / CONFIGS, where.device, where.threads, where.ignore_memory
            waiting = [training(directory / run.name, settings_of[run], *place) for run in todo]
            # a contestant's rates share a line
            lines: dict[tuple[str, int], list[Follower]] = {}
            for run, follower in zip(runs, followers, strict=True):
                lines.setdefault((run.contestant, run.seed), []).append(follower)
            with Scoreboard(list(lines.values()), where.quiet) as board:
                Local(jobs, directory, board.update).run(lambda: waiting)
        _measure(directory, configs, prepared, where)
        groups = read_groups([directory / run.name for run in runs])
        page = write_report(groups, directory / "report")
    except KeyboardInterrupt:
        print("stopped; every training has saved. Run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    # scripts take the path from the last line
    if not where.quiet:
        print_outcome(groups)
    print(page)
    return 0


def _announce(
    directory: Path, runs: Sequence[RaceRun], todo: Sequence[RaceRun], steps: int, jobs: int, threads: int
) -> None:
    done = len(runs) - len(todo)
    if not todo:
        text = f"all {len(runs)} runs of {directory} are finished; the report is written again"
    else:
        text = f"{len(todo)} runs of {steps} steps into {directory}, {min(jobs, len(todo))} at a time"
        text += f", {threads} threads each" + (f"; {done} are done already" if done else "")
    print(f"race: {text}.", file=sys.stderr, flush=True)
