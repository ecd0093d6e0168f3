"""Where the trainings of a race or a study run, as flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spheret.flags import shown
from spheret.lab.laboratory import Laboratory
from spheret.lab.plan import Plan
from spheret.support import machine
from spheret.support.ranges import check_counts
from spheret.support.threads import check_threads


@dataclass(frozen=True)
class Place:
    """What trainings run on.

    Args:
        threads: CPU threads per training. Another number changes the last bits, and is another run.
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

    def laboratory(self, plan: Plan, directory: Path, flat: bool = False) -> Laboratory:
        return Laboratory(plan, directory, self.device, self.threads, self.ignore_memory, self.quiet, flat)

    @property
    def at_a_time(self) -> int:
        """Trainings at a time on this machine."""
        return self.jobs or max(1, machine.cores() // self.threads)
