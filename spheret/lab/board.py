"""How far a study is: the runs that have ended, those in training, and the time left."""

from __future__ import annotations

from spheret.lab.executors.job import Job
from spheret.lab.laboratory import Laboratory
from spheret.lab.stages import expected
from spheret.runs.metrics import Follower
from spheret.support.meter import TimeLeft

# of the runs that can start, so many are followed: the others have not begun
FOLLOWED = 64


class Board:
    """Hands out the jobs of a study and follows them."""

    def __init__(self, laboratory: Laboratory) -> None:
        self._laboratory = laboratory
        self._followers: dict[str, Follower] = {}
        self._time_left = TimeLeft()
        self._ended, self._all = 0, 1

    def jobs(self) -> list[Job]:
        """What can start now, the most valuable first."""
        wanted, rows = self._laboratory.wanted(), self._laboratory.rows()
        self._ended, self._all = len(rows), max(expected(self._laboratory.plan, rows), len(rows), 1)
        followers = {}
        for key in wanted[:FOLLOWED]:
            name, config = self._laboratory.name(key)
            new = Follower(name, self._laboratory.run_directory(key), config.train.steps)
            followers[name] = self._followers.get(name, new)
        self._followers = followers
        return list(dict.fromkeys(map(self._laboratory.job, wanted)))

    def follow(self) -> None:
        """Read the new lines of the runs in training."""
        for follower in self._followers.values():
            follower.update()

    def lines(self) -> list[str]:
        active = [follower for follower in self._followers.values() if follower.step]
        fraction = (self._ended + sum(each.step / each.steps for each in active)) / self._all
        head = f"study: {self._ended} of about {self._all} runs{self._time_left.text(min(1.0, fraction))}"
        return [head, *(f"    {each.name} step {each.step}/{each.steps}" for each in active)]
