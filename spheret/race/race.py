"""`spheret race`: every contestant on the same batches, each an ordinary run; then one report."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.data import open_named
from spheret.race.children import PATIENCE, Child, stop
from spheret.race.recipe import flags
from spheret.race.scoreboard import Follower, Scoreboard
from spheret.report.report import report
from spheret.runs.config import Options, resolve_model, resolve_training
from spheret.runs.layout import LOCK as RUN_LOCK
from spheret.runs.run import manifest_sha256
from spheret.support import files, machine
from spheret.support.errors import unknown
from spheret.train.loop import FINISHED, STOPPED_BY_GUARD

RACE, LOCK = "race.json", "race.lock"
FORMAT, VERSION = "spheret-race", 1
FIRST_SEED = 1337
GROUPS = {"paper": PAPER_SCHEMES, "all": tuple(SCHEMES)}
INTERRUPTED = 130


@dataclass(frozen=True)
class Entry:
    """One run of a race."""

    scheme: str
    settings: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        return "-".join([self.scheme, *self.settings, str(self.seed)])


def entries(schemes: str, seeds: int) -> list[Entry]:
    """Contestants by seed: `paper`, `all`, or names with commas, each with options as scheme:option=value:..."""
    words: list[str] = []
    for word in schemes.split(","):
        words += GROUPS.get(word.strip(), (word.strip(),))
    found = []
    for word in dict.fromkeys(words):
        scheme, *settings = word.split(":")
        if scheme not in SCHEMES:
            raise unknown("scheme", scheme, [*SCHEMES, *GROUPS])
        for setting in settings:
            # it becomes the name of a directory
            if not re.fullmatch(r"\w+=[\w.+-]+", setting):
                raise ValueError(f"a variant is scheme:option=value, as in {scheme}:schedule=sqrt, got {word!r}.")
        found.append((scheme, tuple(settings)))
    if seeds < 1:
        raise ValueError(f"--seeds counts from 1, got {seeds}.")
    # a seed of everyone before the next, so that a race cut short compares
    return [Entry(scheme, settings, FIRST_SEED + k) for k in range(seeds) for scheme, settings in found]


def _arguments(options: Options, out: Path, threads: int, device: str) -> list[str]:
    """The command of one run: `spheret train` as anyone could type it."""
    how = [
        "--threads",
        str(threads),
        "--device",
        device,
        "--out",
        str(out),
        "--resume",
        "--quiet",
        "--no-tensorboard",
    ]
    return ["train", *flags(options), *how]


def _claim(directory: Path, settings: dict[str, Any]) -> files.Lock:
    """The directory, locked, and of this race or of none yet."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RACE
    lock = files.Lock(directory / LOCK)
    if not lock.acquire():
        raise BlockingIOError(f"another race is running in {directory}: wait for it, or give another --out.")
    try:
        if path.exists():
            _refuse_other(path, settings)
        elif any(entry.name != LOCK for entry in directory.iterdir()):
            raise FileExistsError(f"--out {directory} is not empty and no race: give a new or empty directory.")
        else:
            files.write_atomically(path, files.dump({"format": FORMAT, "version": VERSION, "settings": settings}))
    except BaseException:
        lock.release()
        raise
    return lock


def _refuse_other(path: Path, asked: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError("not of this version")
        there = found["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete {path.parent}, or give another --out.") from None
    said = [
        f"{key} is {there.get(key)!r} there and {asked.get(key)!r} here"
        for key in dict.fromkeys([*there, *asked])
        if there.get(key) != asked.get(key)
    ]
    if said:
        raise FileExistsError(
            f"{path.parent} holds a race with other settings ({'; '.join(said)}): give the settings it has to go on "
            f"with it, another --out for a new race, or delete it."
        )


def _wait_for_orphans(directory: Path, todo: Sequence[Entry]) -> None:
    """A race that was killed leaves trainings that are still saving: they end by themselves."""
    deadline = time.monotonic() + PATIENCE
    while busy := [entry.name for entry in todo if files.is_locked(directory / entry.name / RUN_LOCK)]:
        if time.monotonic() > deadline:
            raise BlockingIOError(f"another process is training in {directory / busy[0]}: wait for it to end.")
        time.sleep(0.1)


def _run(
    directory: Path, todo: Sequence[Entry], commands: dict[Entry, list[str]], jobs: int, board: Scoreboard
) -> None:
    """Train all, `jobs` at a time; the first that fails ends the race, and those beside it save."""
    waiting, running = list(todo), dict[Entry, Child]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                entry = waiting.pop(0)
                running[entry] = Child(commands[entry], directory / f"{entry.name}.log")
            board.update()
            for entry, child in list(running.items()):
                code = child.poll()
                if code is None:
                    continue
                del running[entry]
                if code not in (FINISHED, STOPPED_BY_GUARD):
                    raise RuntimeError(
                        f"{entry.name} ended with exit code {code} ({child.last_words()}). What is done is kept: "
                        f"mend that and run the same command again; all it said is in {child.log}."
                    )
                child.log.unlink()
            time.sleep(0.1)
    finally:
        stop(list(running.values()))
        board.update(last=True)


def race(
    schemes: str = "paper",
    layers: int = 12,
    width: int = 64,
    steps: int = 300,
    seeds: int = 1,
    data: str = "sotu",
    tokenizer: str = "bytes",
    out: str = "runs/race",
    heads: int = 4,
    block: int = 128,
    batch_size: int = 8,
    lr: float = 3e-3,
    head_bias: str = "unigram",
    eval_every: int | None = None,
    eval_windows: int = 128,
    threads: int = 1,
    jobs: int | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> int:
    """Train every scheme on the same batches from the same weights, then write one report; run it again to go on.

    Args:
        schemes: "paper" for its nine, "all", or names with commas; scheme:option=value races a variant.
        layers: blocks.
        width: of the stream.
        steps: updates of each run; a tenth warms up, then a cosine falls to a tenth of the learning rate.
        seeds: runs of each scheme; with one, no pair can have a winner.
        data: a corpus, or a directory made by spheret prepare.
        tokenizer: for a corpus.
        out: the directory of the race: a run directory each, and report/.
        heads: attention heads.
        block: tokens in a window.
        batch_size: windows in an update.
        lr: the highest learning rate, the same for all.
        head_bias: unigram gives token frequencies a home of their own, for every scheme; none is the paper's head.
        eval_every: updates between validations; by default a tenth of the steps.
        eval_windows: validation windows.
        threads: of each training, recorded with it; another number changes the last bits.
        jobs: trainings at a time; by default as many as the cores have room for.
        device: cpu, cuda or mps.
        quiet: no progress.
    """
    chosen = entries(schemes, seeds)
    if threads < 1 or (jobs is not None and jobs < 1):
        raise ValueError(f"--threads and --jobs count from 1, got {threads} and {jobs}.")
    jobs = jobs or max(1, machine.cores() // threads)
    every = max(1, steps // 10) if eval_every is None else eval_every
    shared: dict[str, Any] = {
        "data": data, "tokenizer": tokenizer, "steps": steps, "layers": layers, "heads": heads, "width": width,
        "block": block, "batch_size": batch_size, "lr": lr, "head_bias": head_bias, "eval_every": every,
        "eval_windows": eval_windows, "checkpoint_every": every, "keep": 1,
    }  # fmt: skip
    asked = {entry: Options(scheme=entry.scheme, set=entry.settings, seed=entry.seed, **shared) for entry in chosen}
    # wrong numbers are found before anything is written or prepared
    for options in asked.values():
        resolve_training(options, device)
        resolve_model(options, 1, 64)
    prepared = open_named(data, tokenizer, quiet)
    directory = Path(out).expanduser()
    settings = {**shared, "manifest_sha256": manifest_sha256(prepared), "threads": threads, "device": device}
    lock = _claim(directory, settings)
    # a plain kill stops it as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        followers = [Follower(entry.name, directory / entry.name, steps) for entry in chosen]
        for follower in followers:
            follower.look()
        todo = [entry for entry, follower in zip(chosen, followers, strict=True) if not follower.done]
        if not quiet:
            _announce(directory, chosen, todo, steps, jobs, threads)
        commands = {entry: _arguments(asked[entry], directory / entry.name, threads, device) for entry in todo}
        _wait_for_orphans(directory, todo)
        if todo:
            with Scoreboard(followers, quiet) as board:
                _run(directory, todo, commands, jobs, board)
        page = report([directory / entry.name for entry in chosen], directory / "report")
    except KeyboardInterrupt:
        print("stopped; every training has saved. Run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    print(page)
    return 0


def _announce(
    directory: Path, chosen: Sequence[Entry], todo: Sequence[Entry], steps: int, jobs: int, threads: int
) -> None:
    done = len(chosen) - len(todo)
    if not todo:
        said = f"all {len(chosen)} runs of {directory} are finished; its report is written again"
    else:
        said = f"{len(todo)} runs of {steps} steps into {directory}, {min(jobs, len(todo))} at a time"
        said += f", threads {threads} each" + (f"; {done} are done already" if done else "")
    print(f"race: {said}.", file=sys.stderr, flush=True)
