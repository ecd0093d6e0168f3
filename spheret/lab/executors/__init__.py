"""Where trainings run: an executor is given jobs. `local.py` is one, `slurm.py` another.

A new one is one file with a class that has `run`, and a row in EXECUTORS of `spheret.lab.study`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Job:
    """One training: `spheret WORDS` starts the run in `directory`, or continues it, or finds that it is finished."""

    name: str
    directory: Path
    words: tuple[str, ...]


class Executor(Protocol):
    """Runs jobs, here or elsewhere."""

    def run(self, wanted: Callable[[], Sequence[Job]]) -> bool:
        """Train what is wanted. Returns whether all of it is done.

        wanted: the jobs that can start now, the most valuable first. Once a job has ended there may be others.
        """
