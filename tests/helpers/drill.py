"""The crash drill: a run is killed with -9 several times and must still equal an unbroken run bit for bit."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spheret.runs.layout import METRICS, MODEL, OPTIMIZER
from spheret.runs.metrics import TIMING, MetricsRecord
from spheret.runs.run import open_run
from spheret.support.child import python_environment, spheret_command

# with a checkpoint every second step, many kills fall inside a save
RECIPE = (
    "--scheme", "proj-spheretnorm", "--layers", "2", "--heads", "2", "--width", "32", "--block", "64",
    "--batch-size", "4", "--steps", "60", "--eval-every", "10", "--set", "evaluation.eval_windows=8",
    "--set", "train.checkpoint_every=2",
    "--set", "model.dropout=0.1", "--data", "sotu", "--threads", "1", "--quiet",
)  # fmt: skip


def start(out: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """`spheret train` in a process of its own."""
    command = spheret_command(["train", *arguments, "--out", str(out)])
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=python_environment())


def reached(process: subprocess.Popen[bytes], path: Path, size: int) -> bool:
    """Wait until the metrics reach a size. Returns False if the process ended first."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size >= size:
            return True
        time.sleep(0.002)
    return False


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"training ended with code {process.returncode}: {errors.decode().strip()}")


def kill_and_resume(
    out: Path, arguments: Sequence[str], kills: int, seed: int, size: int, say: Callable[[str], object]
) -> None:
    """Train into `out` and kill it at `kills` seeded moments, each a little after the metrics reach a seeded size."""
    choose = random.Random(seed)
    marks = sorted(choose.uniform(0.02, 0.95) * size for _ in range(kills))
    for number, mark in enumerate(marks, start=1):
        process = start(out, arguments)
        if not reached(process, out / METRICS, int(mark)):
            finish(process)
            break
        time.sleep(choose.uniform(0, 0.02))
        process.kill()
        process.communicate()
        say(f"kill {number} of {kills}")
    finish(start(out, arguments))


def timeless(records: Sequence[MetricsRecord]) -> list[dict[str, Any]]:
    """Metrics as plain data without the fields that the clock decides."""
    plain = [msgspec.to_builtins(record) for record in records]
    return [{key: value for key, value in record.items() if key not in TIMING} for record in plain]


def differences(left: Path, right: Path) -> list[str]:
    """What differs between two finished runs: weights, optimiser state, metrics apart from timing."""
    runs = [open_run(path) for path in (left, right)]
    last = [run.checkpoint() for run in runs]
    differing = [f"the last step: {last[0].step} and {last[1].step}"] if last[0].step != last[1].step else []
    differing += [
        name
        for name in (MODEL, OPTIMIZER)
        if (last[0].path / name).read_bytes() != (last[1].path / name).read_bytes()
    ]
    ours, theirs = (timeless(run.metrics()) for run in runs)
    differing += [f"metrics of step {a['step']}" for a, b in zip(ours, theirs, strict=False) if a != b][:3]
    if len(ours) != len(theirs):
        differing.append(f"{len(ours)} and {len(theirs)} lines of metrics")
    return differing


def drill(
    directory: Path,
    kills: int = 5,
    seed: int = 1337,
    arguments: Sequence[str] = RECIPE,
    say: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Train twice in a directory, unbroken and broken, and return what differs: an empty list if all is well."""
    unbroken, broken = directory / "unbroken", directory / "broken"
    finish(start(unbroken, arguments))
    say("the unbroken run is done")
    kill_and_resume(broken, arguments, kills, seed, (unbroken / METRICS).stat().st_size, say)
    return differences(unbroken, broken)
