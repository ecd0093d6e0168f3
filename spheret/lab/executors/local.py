"""Trainings on this machine, a few at a time. Each is a child process that continues its run by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spheret.lab.executors import Job
from spheret.runs.layout import LOCK
from spheret.support import files
from spheret.support.child import PATIENCE, Child, stop
from spheret.support.errors import FINISHED, STOPPED_BY_GUARD


@dataclass(frozen=True)
class Local:
    """Runs `jobs` trainings at a time. Their output goes to `logs`, one file each while it runs.

    deadline: on the clock of time.monotonic(). When it has passed, every training saves and ends.
    """

    jobs: int
    logs: Path
    deadline: float | None = None

    def run(self, wanted: Callable[[], Sequence[Job]]) -> bool:
        """Train what is wanted, and what is wanted after that. The first that fails ends all, and the others save.

        wanted: asked at the start and whenever a training has ended. The first job comes first, and none comes twice.
        """
        waiting, running = list(wanted()), dict[Job, Child]()
        started = set[Job]()
        _wait_for_orphans(waiting)
        try:
            while waiting or running:
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    return False
                while waiting and len(running) < self.jobs:
                    job = waiting.pop(0)
                    started.add(job)
                    running[job] = Child(job.words, self.logs / f"{job.name}.log")
                ended = [job for job, child in running.items() if child.poll() is not None]
                for job in ended:
                    _check(job, running.pop(job))
                if ended:
                    waiting = [job for job in wanted() if job not in started]
                time.sleep(0.1)
        finally:
            stop(list(running.values()))
        return True


def _check(job: Job, child: Child) -> None:
    """Raise unless a training has finished, or was stopped by a guard, which is a result too."""
    code = child.poll()
    if code not in (FINISHED, STOPPED_BY_GUARD):
        raise RuntimeError(
            f"{job.name} ended with exit code {code} ({child.last_line()}). What is done is kept: fix this and run "
            f"the same command again. Its whole output is in {child.log}."
        )
    child.log.unlink()


def _wait_for_orphans(todo: Sequence[Job]) -> None:
    """Wait for trainings whose parent was killed: they are still saving and end by themselves."""
    deadline = time.monotonic() + PATIENCE
    while busy := [job for job in todo if files.is_locked(job.directory / LOCK)]:
        if time.monotonic() > deadline:
            raise BlockingIOError(f"another process is training in {busy[0].directory}: wait for it to end.")
        time.sleep(0.1)
