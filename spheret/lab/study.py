"""`spheret study`: look at what is done, do what comes next, and write the report."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# tyro reads annotations from the module
import tyro

from spheret.flags import shown
from spheret.lab.entries import runs_left
from spheret.lab.executors import Executor, Job
from spheret.lab.executors.local import Local
from spheret.lab.executors.slurm import SLURM, Slurm
from spheret.lab.laboratory import CONFIGS, LOCK, LOGS, PLAN, REPORT, Laboratory, Place, claimed
from spheret.lab.ngrams import read_ngrams
from spheret.lab.outcome import print_outcome
from spheret.lab.page.output import FIGURES
from spheret.lab.plan import OURS, Plan, committed_results, read_plan
from spheret.lab.report import study_findings, write_report
from spheret.lab.rows import RESULTS, RUNS, Key, Row, read_rows
from spheret.lab.words import listed
from spheret.runs.config import SECTIONS
from spheret.support import files
from spheret.support.errors import INTERRUPTED, unknown
from spheret.support.files import output_path
from spheret.support.meter import Meter
from spheret.support.settings import declared

EXECUTORS = ("local", "slurm")
# the folders that are written into
FOLDERS = (RUNS, LOGS, CONFIGS, f"{REPORT}/{FIGURES}", SLURM)


@dataclass(frozen=True)
class StudyOptions:
    """Where a study is written and where it runs.

    Args:
        out: The directory of the study: its runs, results.jsonl and report/.
        on: local for this machine, slurm to submit to the cluster whose login node this is.
        minutes: Stop after so many minutes; the same command resumes later. 0 only writes the report.
        join: A results.jsonl of the same study: its runs count as done. In a checkout, the plans that come with
            spheret join what docs/results holds of them.
        results: Write the report of this results.jsonl and train nothing.
    """

    out: str = "runs/study"
    on: str = "local"
    minutes: Annotated[float | None, shown("MINUTES", "until it is done")] = None
    join: Annotated[Path | None, shown("PATH", "the plan's own in docs/results")] = None
    results: Annotated[Path | None, shown("PATH", "the runs in --out")] = None


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def study(
    where: Annotated[StudyOptions, tyro.conf.FlagCreatePairsOff],
    place: Annotated[Place, tyro.conf.FlagCreatePairsOff],
    plan: Annotated[Path, tyro.conf.Positional, shown("PLAN", "the plan of docs/results")] = OURS,
) -> int:
    """Give every contestant its own best learning rate, then fresh seeds there, and say who wins.

    Run the same command again to resume: what is done is not done twice. A report can be written at any moment.

    Args:
        plan: A TOML file: contestants, learning rates, seeds, sizes. docs/compare.md lists its keys. Or the name of a
            plan that comes with spheret: connections, defaults, depth, family, length, length-deep,
            modern or streams.
    """
    place.check()
    _check(where)
    asked = read_plan(plan)
    directory = Path(where.out).expanduser()
    files.check_output_directory("--out", directory)
    if where.results is not None:
        rows = _given_rows("--results", where.results)
        found = study_findings(asked, rows, read_ngrams(where.results))
        print_outcome(found.answers, write_report(found, directory), place.quiet)
        return 0
    return run_plan(asked, plan, where, place)


def run_plan(plan: Plan, path: Path, where: StudyOptions, place: Place, name: str = "study") -> int:
    """Do what comes next of a plan, then write the report. path: the plan's. name: race or study."""
    directory = Path(where.out).expanduser()
    laboratory = Laboratory(plan, directory, place)
    # wrong settings are found before anything is written or prepared
    with _naming_keys() if name == "study" else nullcontext():
        laboratory.check(here=where.on == "local" and where.minutes != 0)
        laboratory.prepare()
    _join(laboratory, where, path)
    if where.minutes == 0:
        if not (directory / PLAN).is_file():
            raise FileNotFoundError(f"--out {directory} holds no study yet: run it without --minutes 0.")
    else:
        code = _run(laboratory, where, path, name)
        if code:
            return code
    found = study_findings(plan, laboratory.rows(), read_ngrams(directory / RESULTS))
    page = write_report(found, output_path(directory, REPORT))
    print_outcome(found.answers, page, place.quiet)
    return 0


@contextmanager
def _naming_keys() -> Iterator[None]:
    """A study has no flags of settings: what an error says of one, it says of the key in the plan."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        for section, kind in SECTIONS.items():
            for name, each in declared(kind).items():
                if (flag := each.flag_of(name)) is not None:
                    words = re.sub(rf"--{flag}(?![a-z-])", f"{section}.{name}", words)
        raise ValueError(words) from None


def _join(laboratory: Laboratory, where: StudyOptions, plan: Path) -> None:
    """Count as done what this directory, --join, or the results of the plan in this checkout have."""
    laboratory.recall()
    path = committed_results(plan) if where.join is None else where.join
    if path is None:
        return
    rows = read_rows(path) if where.join is None else _given_rows("--join", path)
    joined = laboratory.join(rows.values())
    if joined or where.join is not None:
        text = f"{joined} of the {len(rows)} runs in {path} are of this plan, and count as done."
        _say(laboratory, "study", text)


def _given_rows(flag: str, path: Path) -> dict[Key, Row]:
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{flag} {path} is empty: give a results.jsonl that holds the results of runs.")
    return rows


def _check(where: StudyOptions) -> None:
    if where.on not in EXECUTORS:
        raise unknown("--on", where.on, EXECUTORS)
    if where.minutes is not None and not 0 <= where.minutes < 1e6:
        raise ValueError(f"--minutes must be 0 or more, got {where.minutes}: leave it out to run until it is done.")
    if where.minutes and where.on != "local":
        raise ValueError(f"--minutes {where.minutes:g} bounds trainings on this machine: leave it out on {where.on}.")


def _check_directory(directory: Path) -> None:
    """Raise unless the directory is empty or holds a study."""
    known = (directory / PLAN).is_file() and (directory / RUNS).is_dir()
    if not known and any(entry.name != LOCK for entry in directory.iterdir()):
        raise FileExistsError(f"--out {directory} is not empty and no study: give a new or empty directory.")


def _run(laboratory: Laboratory, where: StudyOptions, plan: Path, name: str) -> int:
    """Train what comes next, and write the rows. Returns an exit code: 0 to continue with the report."""
    directory = laboratory.directory
    try:
        with claimed(directory, name, lambda: _check_directory(directory)):
            laboratory.check_same_plan()
            # a link in the place of any of them is found before anything is trained
            paths = [output_path(directory, *Path(name).parts) for name in (PLAN, RESULTS, *FOLDERS)]
            files.write_atomically(paths[0], laboratory.plan.text)
            for folder in (RUNS, LOGS):
                (directory / folder).mkdir(exist_ok=True)
            if where.on == "local":
                _remove_old_logs(laboratory)
            _announce(laboratory, where, name)
            with Meter(name, laboratory.place.quiet) as meter:
                done = _executor(laboratory, where, plan).run(lambda: jobs(laboratory, meter))
            laboratory.write_results()
            if not done and where.on == "local":
                _say(laboratory, name, "not done yet. Run the same command again to resume.")
    except KeyboardInterrupt:
        print("stopped; every training has saved. Run the same command again to resume.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _say(laboratory: Laboratory, name: str, text: str) -> None:
    if not laboratory.place.quiet:
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def _remove_old_logs(laboratory: Laboratory) -> None:
    """A study that was killed has not removed the output of a training that had ended by then."""
    for key in laboratory.rows():
        (laboratory.directory / LOGS / f"{laboratory.run_directory(key).name}.log").unlink(missing_ok=True)


def jobs(laboratory: Laboratory, meter: Meter) -> list[Job]:
    """What can start now, the most valuable first. Shows how many runs have ended."""
    wanted, rows = laboratory.wanted(), laboratory.rows()
    every = len(rows) + runs_left(laboratory.plan, rows)
    meter.show(f"{len(rows)} of {_about(laboratory.plan)}{every} runs", len(rows) / max(every, 1), now=True)
    # two parts may ask for one run
    return list(dict.fromkeys(map(laboratory.job, wanted)))


def _about(plan: Plan) -> str:
    """The number of runs is known only if none of them depends on results."""
    return "about " * any(group.part.fresh or group.part.behind for group in plan.groups)


def _announce(laboratory: Laboratory, where: StudyOptions, name: str) -> None:
    """Say what comes."""
    if where.on != "local":
        return
    plan, rows = laboratory.plan, laboratory.rows()
    left = runs_left(plan, rows)
    parts = listed(list(dict.fromkeys(group.part.title or group.part.name for group in plan.groups)))
    come = (
        f"{_about(plan)}{left} runs to come, {laboratory.place.at_a_time} at a time"
        if left
        else "nothing is left to run"
    )
    bound = f"; it stops after {where.minutes:g} minutes" if where.minutes else ""
    _say(laboratory, name, f"{plan.title}: {parts}. {len(rows)} runs are done, {come}{bound}.")


def _executor(laboratory: Laboratory, where: StudyOptions, plan: Path) -> Executor:
    place = laboratory.place
    if where.on == "slurm":
        gpus = place.device.startswith("cuda")
        return Slurm(laboratory.directory, _words(where, place, plan), place.threads, gpus, place.jobs)
    deadline = None if where.minutes is None else time.monotonic() + 60 * where.minutes
    return Local(place.at_a_time, laboratory.directory / LOGS, deadline)


def _words(where: StudyOptions, place: Place, plan: Path) -> list[str]:
    """The words of this command without `spheret`."""
    words = ["study", str(plan), "--out", where.out, "--on", where.on, "--threads", str(place.threads)]
    words += ["--device", place.device, *(["--jobs", str(place.jobs)] if place.jobs else [])]
    words += ["--join", str(where.join)] if where.join else []
    return words + ["--ignore-memory"] * place.ignore_memory + ["--quiet"] * place.quiet
