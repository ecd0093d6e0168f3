"""`spheret study`: look at what is done, do what comes next, and write the report."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# tyro reads annotations from the module
import tyro

from spheret.flags import shown
from spheret.lab.board import Board
from spheret.lab.executors.job import Executor
from spheret.lab.executors.local import Local
from spheret.lab.executors.slurm import Slurm
from spheret.lab.laboratory import LOCK, LOGS, PLAN, REPORT, RUNS, Laboratory
from spheret.lab.plan import OURS, read_plan
from spheret.lab.rows import read_rows
from spheret.lab.study_report import study_report
from spheret.support import files, machine
from spheret.support.errors import unknown
from spheret.support.exit_codes import INTERRUPTED
from spheret.support.live import LiveLines
from spheret.support.ranges import check_counts
from spheret.support.threads import check_threads

EXECUTORS = ("local", "slurm")


@dataclass(frozen=True)
class Where:
    """Where a study is written and where it runs.

    Args:
        out: The directory of the study: its runs, results.jsonl and report/.
        on: local for this machine, slurm to submit to the cluster whose login node this is.
        minutes: Stop after so many minutes; the same command goes on later. 0 only writes the report.
        join: A results.jsonl of the same study: its runs count as done.
        results: Write the report of this results.jsonl and train nothing.
        threads: CPU threads per training. Another number changes the last bits, and is another run.
        jobs: Trainings at a time.
        device: cpu, cuda or mps.
        ignore_memory: Start although a model and its batch need more memory than there is.
        quiet: Print no progress.
    """

    out: str = "runs/study"
    on: str = "local"
    minutes: Annotated[float | None, shown("MINUTES", "until it is done")] = None
    join: Annotated[Path | None, shown("PATH", "none")] = None
    results: Annotated[Path | None, shown("PATH", "the runs in --out")] = None
    threads: int = 1
    jobs: Annotated[int | None, shown("INT", "as many as the cores, or the cluster, allow")] = None
    device: str = "cpu"
    ignore_memory: bool = False
    quiet: bool = False


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def study(
    where: Annotated[Where, tyro.conf.FlagCreatePairsOff],
    plan: Annotated[Path, tyro.conf.Positional, shown("PLAN", "the plan of docs/results")] = OURS,
) -> int:
    """Give every contestant its own best learning rate, then fresh seeds there, and say who wins.

    Run the same command again to go on: what is done is not done twice. A report can be written at any moment.

    Args:
        plan: A TOML file: contestants, learning rates, seeds, sizes. docs/lab.md lists its keys. Or the name of a
            plan that comes with spheret: connections, depth, modern, transfer or transfer-more.
    """
    _check(where)
    asked = read_plan(plan)
    directory = Path(where.out).expanduser()
    files.check_output_directory("--out", directory)
    if where.results is not None:
        print(study_report(asked, read_rows(where.results), directory))
        return 0
    laboratory = Laboratory(asked, directory, where.device, where.threads, where.ignore_memory, where.quiet)
    laboratory.check(here=where.on == "local" and where.minutes != 0)
    laboratory.prepare()
    if where.join is not None:
        rows = read_rows(where.join)
        joined = laboratory.join(rows.values())
        print(f"study: {joined} of the {len(rows)} runs in {where.join} are of this plan.", file=sys.stderr)
    if where.minutes != 0:
        code = _run(laboratory, where, plan)
        if code:
            return code
    elif not directory.is_dir():
        raise FileNotFoundError(f"--out {directory} holds no study yet: run it without --minutes 0.")
    print(study_report(asked, laboratory.write_results(), directory / REPORT))
    return 0


def _check(where: Where) -> None:
    if where.on not in EXECUTORS:
        raise unknown("--on", where.on, EXECUTORS)
    check_threads("--threads", where.threads)
    check_counts(jobs=where.jobs)
    if where.minutes is not None and not 0 <= where.minutes < 1e6:
        raise ValueError(f"--minutes must be 0 or more, got {where.minutes}: leave it out to run until it is done.")
    if where.minutes and where.on != "local":
        raise ValueError(f"--minutes {where.minutes:g} bounds trainings on this machine: leave it out on {where.on}.")


def _claim(directory: Path) -> files.Lock:
    """Lock the directory, which must be empty or hold a study."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = files.Lock(directory / LOCK)
    if not lock.acquire():
        raise BlockingIOError(
            f"another study is running in {directory}: wait for it, or look at it with --minutes 0."
        )
    known = (directory / PLAN).is_file() or all(entry.name == LOCK for entry in directory.iterdir())
    if not known:
        lock.release()
        raise FileExistsError(f"--out {directory} is not empty and no study: give a new or empty directory.")
    return lock


def _run(laboratory: Laboratory, where: Where, plan: Path) -> int:
    """Train what comes next. Returns an exit code: 0 to go on with the report."""
    directory = laboratory.directory
    lock = _claim(directory)
    # a plain kill stops it as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        files.write_atomically(directory / PLAN, laboratory.plan.text)
        for name in (RUNS, LOGS):
            (directory / name).mkdir(exist_ok=True)
        board = Board(laboratory)
        with LiveLines(board.lines, where.quiet) as live:
            done = _executor(laboratory, where, plan, live, board).run(board.jobs)
        if done or where.on == "local":
            laboratory.measure()
        if not done and where.on == "local" and not where.quiet:
            print("study: not done yet. Run the same command again to go on.", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; every training has saved. Run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    return 0


def _executor(laboratory: Laboratory, where: Where, plan: Path, live: LiveLines, board: Board) -> Executor:
    if where.on == "slurm":
        gpus = where.device.startswith("cuda")
        return Slurm(laboratory.directory, _words(where, plan), where.threads, gpus, where.jobs)
    deadline = None if where.minutes is None else time.monotonic() + 60 * where.minutes
    jobs = where.jobs or max(1, machine.cores() // where.threads)

    def watch(last: bool) -> None:
        board.follow()
        live.show(last)

    return Local(jobs, laboratory.directory / LOGS, watch, deadline)


def _words(where: Where, plan: Path) -> list[str]:
    """The words of this command without `spheret`."""
    words = ["study", str(plan), "--out", where.out, "--on", where.on, "--threads", str(where.threads)]
    words += ["--device", where.device, *(["--jobs", str(where.jobs)] if where.jobs else [])]
    words += ["--join", str(where.join)] if where.join else []
    return words + ["--ignore-memory"] * where.ignore_memory + ["--quiet"] * where.quiet
