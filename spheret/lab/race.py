"""`spheret race`: every contestant on the same batches, at the same few learning rates; then one page and a verdict.

A race is a plan with fixed rates whose contestants are compared on the seeds of the search. At its end it proposes
the plan of a study, which tunes every rate and has fresh seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

# tyro reads annotations from the module
import tyro

from spheret.data import check_named
from spheret.flags import given, section_flags, shown
from spheret.lab.answers import group_answers
from spheret.lab.board import FOLLOWED, Board
from spheret.lab.estimate import duration_words, seconds_left
from spheret.lab.executors.local import Local
from spheret.lab.laboratory import LOCK, Laboratory, claimed
from spheret.lab.live_page import LivePage
from spheret.lab.outcome import print_outcome
from spheret.lab.place import Place
from spheret.lab.plan import OWN_SETTINGS, RECIPE, Group, PartRecord, Plan, named_contestants, read_plan
from spheret.lab.proposal import propose_study
from spheret.lab.report import Findings, run_findings, write_report
from spheret.lab.runs import read_groups
from spheret.runs.config import Given, merge, read_config
from spheret.runs.layout import CONFIG
from spheret.runs.run import manifest_sha256
from spheret.support import files
from spheret.support.child import typed
from spheret.support.documents import Document, Record
from spheret.support.exit_codes import INTERRUPTED
from spheret.support.ranges import check_above_zero, check_count, counts, whole_number

RACE, REPORT = "race.json", "report"
FIRST_SEED, MOST_SEEDS = 1337, 10_000
RATES = (2.5e-3, 5e-3, 1e-2)
# the nine with the head of the recipe, and the projection with the paper's own
CONTESTANTS = "paper,proj-spheretnorm:head=tied"


class RaceRecord(Record):
    """race.json: what all runs of a race have in common, by name."""

    settings: dict[str, Any]
    format: str = "spheret-race"
    version: int = 3


RACES = Document(RaceRecord, "race", "delete the directory, or give another --out")
ModelFlags = section_flags("model", RECIPE, without=("scheme",))
DataFlags = section_flags("data", RECIPE)
OptimisationFlags = section_flags("train", RECIPE, without=("seed", "init_from", "lr"))
EvaluationFlags = section_flags("evaluation", RECIPE)


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
    if "," not in text:
        return [FIRST_SEED + k for k in range(whole_number("--seeds", text.strip(), most=MOST_SEEDS))]
    # a comma at the end makes a list of one seed
    numbers = counts("--seeds", text.strip().removesuffix(","), least=0)
    check_count("the number of --seeds", len(numbers), most=MOST_SEEDS)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds {text[:60]} has a seed twice: give each once.")
    return numbers


def race_plan(schemes: str, seeds: Sequence[int], rates: Sequence[float], shared: Given) -> Plan:
    """A race as a plan. rates: ascending."""
    part = PartRecord(
        name="race", contestants=[schemes], rates=list(rates), extend=0, tuning_seeds=list(seeds), fresh=False
    )
    group = Group(part, part.name, 0, tuple(named_contestants(schemes)), shared, {})
    return Plan("Deep connections compared", "pre-ln", (group,), (), b"")


def _rates(where: RaceOptions, shared: Given) -> list[float]:
    """The learning rates of a race: those of the flag, else that of a config file, else ours."""
    if where.lr is not None:
        return learning_rates(where.lr)
    return [shared["train"]["lr"]] if "lr" in shared["train"] else list(RATES)


def _shared_settings(laboratory: Laboratory) -> dict[str, Any]:
    """What all runs of a race have in common, by name. Several rates are one setting, which they share."""
    (group,) = laboratory.plan.groups
    config = laboratory.config(group, group.contestants[0])
    names = {name: value for section in config.as_dict().values() for name, value in section.items()}
    own = ("scheme", "scheme_options", "seed", *OWN_SETTINGS)
    settings = {name: value for name, value in names.items() if name not in own}
    settings |= {name: group.given["model"][name] for name in OWN_SETTINGS}
    if len(group.part.rates) > 1:
        settings["lr"] = group.part.rates
        # by default it follows each rate
        if "min_lr" not in group.given["train"]:
            del settings["min_lr"]
    manifest = manifest_sha256(laboratory.data(group))
    return {**settings, "manifest_sha256": manifest, "threads": laboratory.threads, "device": laboratory.device}


def _check_directory(directory: Path, settings: dict[str, Any]) -> None:
    """Raise unless the directory is empty or holds this race."""
    path = directory / RACE
    if path.exists():
        _check_same(path, settings)
    elif any(entry.name != LOCK for entry in directory.iterdir()):
        raise FileExistsError(f"--out {directory} is not empty and no race: give a new or empty directory.")
    else:
        RACES.write(path, RaceRecord(settings=settings))


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


@dataclass(frozen=True)
class RaceOptions:
    """Who races, and where the race is written.

    Args:
        schemes: "paper" for its nine, "all", or names with commas; scheme:option=value races a variant, and
            scheme:head=tied or scheme:head_bias=none one with another head.
        seeds: How many seeds; or, with a comma, the seeds: 3,4,9 (one seed: 7,). With one no pair can have a winner.
        lr: Highest learning rates with commas. Every scheme is trained at each and reported at its best.
        out: The directory of the race: one run directory per contestant, and report/.
        config: A TOML or JSON file of settings, by section; flags win over it.
    """

    schemes: str = CONTESTANTS
    seeds: Annotated[str, shown("INT|LIST", "1")] = "1"
    lr: Annotated[str | None, shown("LIST", ",".join(map(str, RATES)))] = None
    out: str = "runs/race"
    config: Annotated[Path | None, shown("PATH", "none")] = None


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def race(
    where: Annotated[RaceOptions, tyro.conf.FlagCreatePairsOff],
    place: Annotated[Place, tyro.conf.FlagCreatePairsOff],
    model: ModelFlags,  # type: ignore[valid-type]
    data: DataFlags,  # type: ignore[valid-type]
    optimisation: OptimisationFlags,  # type: ignore[valid-type]
    evaluation: EvaluationFlags,  # type: ignore[valid-type]
) -> int:
    """Train every scheme on the same batches, then say who wins. Run the same command again to continue."""
    place.check()
    directory = Path(where.out).expanduser()
    files.check_output_directory("--out", directory)
    shared = merge(
        RECIPE,
        {} if where.config is None else read_config(where.config),
        given(model=model, data=data, train=optimisation, evaluation=evaluation),
    )
    every = shared["evaluation"].get("eval_every")
    if every is not None:
        check_count("--eval-every of a race", every)
        # what is validated is saved
        shared["train"].setdefault("checkpoint_every", every)
    plan = race_plan(where.schemes, race_seeds(where.seeds), _rates(where, shared), shared)
    laboratory = place.laboratory(plan, directory, flat=True)
    # wrong settings are found before anything is written or prepared
    laboratory.check()
    check_named(shared["data"]["path"])
    _say(laboratory, f"{_size(plan)} on {shared['data']['path']}, into {directory}.")
    laboratory.prepare()
    settings = _shared_settings(laboratory)
    try:
        with claimed(directory, "race", lambda: _check_directory(directory, settings)):
            with LivePage(directory / REPORT, lambda: _so_far(laboratory), "race", laboratory.quiet) as live:
                _run(laboratory, place.at_a_time, live)
                found = run_findings(read_groups([laboratory.run_directory(key) for key in laboratory.rows()]))
                page = write_report(found, directory / REPORT)
            following = _next(laboratory, shared, place.at_a_time)
    except KeyboardInterrupt:
        print("stopped; every training has saved. Run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    print_outcome(found.answers, page, place.quiet, following)
    return 0


def _say(laboratory: Laboratory, text: str) -> None:
    if not laboratory.quiet:
        print(f"race: {text}", file=sys.stderr, flush=True)


def _size(plan: Plan) -> str:
    (group,) = plan.groups
    runs = len(group.contestants) * len(group.part.rates) * len(group.part.tuned_with)
    return f"{runs} run{'s' * (runs > 1)} of {len(group.contestants)} contestants"


def _so_far(laboratory: Laboratory) -> Findings | None:
    """What the runs that have begun say; None before the first."""
    keys = [*laboratory.rows(), *laboratory.wanted()[:FOLLOWED]]
    begun = [path for path in map(laboratory.run_directory, keys) if (path / CONFIG).exists()]
    return run_findings(read_groups(begun)) if begun else None


def _run(laboratory: Laboratory, jobs: int, live: LivePage) -> None:
    """Train what is left, so many at a time, and measure what a step costs."""
    left, done = len(laboratory.wanted()), len(laboratory.rows())
    if left:
        already = f"; {done} are done already" if done else ""
        time = duration_words(seconds_left(laboratory, jobs))
        _say(
            laboratory,
            f"{left} runs, {min(jobs, left)} at a time, {laboratory.threads} threads each, {time}{already}.",
        )
        with Board(laboratory, "race", live) as board:
            Local(jobs, laboratory.directory, board.watch).run(board.jobs)
    else:
        _say(laboratory, f"all {done} runs of {laboratory.directory} are finished; the report is written again.")
    if laboratory.unmeasured():
        _say(laboratory, "measuring the step of every contestant, side by side.")
    try:
        laboratory.measure()
    # such as too little memory: the race has its results all the same
    except (RuntimeError, MemoryError) as error:
        print(f"the steps could not be measured side by side ({error}); the report says so.", file=sys.stderr)
    busy = [f"{cost.spread:.0%}" for cost in laboratory.costs().values() if not cost.precise]
    if busy:
        text = f"step costs: not measured, machine busy (their rounds lie {busy[0]} apart, 10% is the limit)."
        _say(laboratory, text)
    laboratory.write_results()


def _next(laboratory: Laboratory, shared: Given, jobs: int) -> str:
    """Write the plan of the study that follows, and say how to run it and how long it takes."""
    (answer,) = group_answers(laboratory.plan, laboratory.rows())
    path = propose_study(laboratory.directory, answer, shared)
    if path is None:
        return ""
    study = Laboratory(read_plan(path), laboratory.directory, laboratory.device, laboratory.threads, quiet=True)
    time = duration_words(seconds_left(study, jobs, laboratory.rows().values()))
    return f"next: spheret study {typed([str(path)])}, {time}"
