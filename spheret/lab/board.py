"""How far a race or a study is: the runs that have ended, those in training, and the time left."""

from __future__ import annotations

from dataclasses import dataclass

from spheret.lab.executors.job import Job
from spheret.lab.laboratory import Laboratory
from spheret.lab.live_page import LivePage
from spheret.lab.rows import TUNE, Key
from spheret.lab.stages import expected, stage_of
from spheret.runs.metrics import Follower
from spheret.support.live import LiveLines
from spheret.support.meter import TimeLeft

# of the runs that can start, so many are followed: the others have not begun
FOLLOWED = 64
# the stages in words; the search needs none
STAGES = {TUNE: "", "final": ", fresh seed", "floor": ", noise floor", "stress": ", stress"}


@dataclass(frozen=True)
class Followed:
    """A run in training."""

    key: Key
    fresh: bool
    follower: Follower

    @property
    def line(self) -> str:
        """One run in one line: contestant, rate, seed, stage, how far it is, and its loss."""
        key, run = self.key, self.follower
        loss = "" if run.val_loss is None else f", val {run.val_loss:.3f} at step {run.val_step}"
        diverged = "" if run.diverged is None else f", diverged at step {run.diverged}"
        where = f"lr {key.rate:g}, seed {key.seed}{STAGES[stage_of(key, self.fresh)]}"
        return f"    {key.contestant}, {where}: step {run.step}/{run.steps}{loss}{diverged}"


class Board:
    """Hands out the jobs of a plan, follows them, and shows how far they are. name: race or study."""

    def __init__(self, laboratory: Laboratory, name: str, page: LivePage | None = None) -> None:
        self._laboratory, self._name, self._page = laboratory, name, page
        self._live = LiveLines(self.lines, laboratory.quiet)
        self._fresh = {group.name: group.part.fresh for group in laboratory.plan.groups}
        self._followed: dict[str, Followed] = {}
        self._time_left = TimeLeft()
        self._ended, self._all = 0, 1

    def jobs(self) -> list[Job]:
        """What can start now, the most valuable first."""
        wanted, rows = self._laboratory.wanted(), self._laboratory.rows()
        self._ended, self._all = len(rows), max(expected(self._laboratory.plan, rows), len(rows), 1)
        followed = {}
        for key in wanted[:FOLLOWED]:
            name, config = self._laboratory.name(key)
            new = Followed(
                key, self._fresh[key.group], Follower(name, self._laboratory.run_directory(key), config.train.steps)
            )
            followed[name] = self._followed.get(name, new)
        self._followed = followed
        return list(dict.fromkeys(map(self._laboratory.job, wanted)))

    def __enter__(self) -> Board:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__()

    def watch(self, last: bool) -> None:
        """Read the new lines of the runs in training, and show where they are. last: show it in any case."""
        for each in self._followed.values():
            each.follower.update()
        self._live.show(last)
        if self._page is not None and not last:
            self._page.update()

    def lines(self) -> list[str]:
        active = [each for each in self._followed.values() if each.follower.step]
        fraction = (self._ended + sum(each.follower.step / each.follower.steps for each in active)) / self._all
        about = "about " if any(self._fresh.values()) else ""
        head = f"{self._name}: {self._ended} of {about}{self._all} runs{self._time_left.text(min(1.0, fraction))}"
        return [head, *(each.line for each in active)]
