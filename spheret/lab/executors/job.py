"""Where trainings run: an executor is given jobs. `local.py` is one, `slurm.py` another.

A new one is one file with a class that has `run`, and a row in EXECUTORS of `spheret.lab.study`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spheret.runs.config import RunConfig
from spheret.support import files


@dataclass(frozen=True)
class Job:
    """One training: `spheret WORDS` starts the run in `directory`, or continues it, or finds that it is finished."""

    name: str
    directory: Path
    words: tuple[str, ...]


def training(
    directory: Path, config: RunConfig, configs: Path, device: str, threads: int, ignore_memory: bool
) -> Job:
    """The job of the run in `directory`, named like it. It reads its settings from a file that is written here.

    configs: the folder of these files.
    """
    path = configs / f"{directory.name}.json"
    configs.mkdir(exist_ok=True)
    files.write_atomically(path, files.dump(config.as_dict()))
    place = ["--out", str(directory), "--threads", str(threads), "--device", device]
    ignore = ["--ignore-memory"] if ignore_memory else []
    words = ["train", "--config", str(path), *place, "--quiet", "--no-tensorboard", *ignore]
    return Job(directory.name, directory, tuple(words))


class Executor(Protocol):
    """Runs jobs, here or elsewhere."""

    def run(self, wanted: Callable[[], Sequence[Job]]) -> bool:
        """Train what is wanted. Returns whether all of it is done.

        wanted: the jobs that can start now, the most valuable first. Once a job has ended there may be others.
        """
