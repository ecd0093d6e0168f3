"""How far a race or a study is, while it runs: lines in the terminal."""

from __future__ import annotations

from spheret.lab.entries import runs_left
from spheret.lab.executors import Job
from spheret.lab.laboratory import Laboratory
from spheret.lab.rows import TUNE, Key
from spheret.lab.stages import stage_of
from spheret.runs.metrics import Follower
from spheret.support.meter import LiveLines, TimeLeft

# of the runs that can start, so many are followed: the others have not begun
FOLLOWED = 64
# the stages in words; the search needs none
STAGES = {TUNE: "", "final": ", fresh seed", "stress": ", stress"}


class Board:
    """Hands out the jobs of a plan, follows them, and shows how far they are. name: race or study."""

    def __init__(self, laboratory: Laboratory, name: str) -> None:
        self._laboratory, self._name = laboratory, name
        self._live = LiveLines(self.lines, laboratory.place.quiet)
        self._fresh = {group.name: group.part.fresh for group in laboratory.plan.groups}
        self._followed: dict[Key, Follower] = {}
        self._time_left = TimeLeft()
        self._ended, self._all = 0, 1

    def jobs(self) -> list[Job]:
        """What can start now, the most valuable first."""
        wanted, rows = self._laboratory.wanted(), self._laboratory.rows()
        self._ended, self._all = len(rows), max(len(rows) + runs_left(self._laboratory.plan, rows), 1)
        # two parts may ask for one run
        runs = dict[str, Key]()
        for key in wanted[:FOLLOWED]:
            runs.setdefault(self._laboratory.name(key)[0], key)
        self._followed = {key: self._followed.get(key) or self._follower(key) for key in runs.values()}
        return list(dict.fromkeys(map(self._laboratory.job, wanted)))

    def _follower(self, key: Key) -> Follower:
        name, config = self._laboratory.name(key)
        return Follower(name, self._laboratory.run_directory(key), config.train.steps)

    def __enter__(self) -> Board:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__()

    def watch(self, last: bool) -> None:
        """Read the new lines of the runs in training, and show where they are. last: show it in any case."""
        for run in self._followed.values():
            run.update()
        self._live.show(last)

    def lines(self) -> list[str]:
        active = {key: run for key, run in self._followed.items() if run.step}
        fraction = (self._ended + sum(run.step / run.steps for run in active.values())) / self._all
        about = "about " * any(group.part.fresh or group.part.behind for group in self._laboratory.plan.groups)
        head = f"{self._name}: {self._ended} of {about}{self._all} runs{self._time_left.text(min(1.0, fraction))}"
        return [head, *(self._line(key, run) for key, run in active.items())]

    def _line(self, key: Key, run: Follower) -> str:
        """A run in training: contestant, rate, seed, stage, how far it is, and its loss."""
        loss = "" if run.val_loss is None else f", val {run.val_loss:.3f} at step {run.val_step}"
        diverged = "" if run.diverged is None else f", diverged at step {run.diverged}"
        where = f"lr {key.rate:g}, seed {key.seed}{STAGES[stage_of(key, self._fresh[key.group])]}"
        return f"    {key.contestant}, {where}: step {run.step}/{run.steps}{loss}{diverged}"
