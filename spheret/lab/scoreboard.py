"""The standings of a race, read from the metrics of its runs: one ranked line per contestant and seed."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.runs.metrics import Follower
from spheret.support.live import LiveLines
from spheret.support.meter import TimeLeft


def standing(follower: Follower, width: int) -> str:
    """One run in one line."""
    val = "-" if follower.val_loss is None else f"{follower.val_loss:.4f} at step {follower.val_step}"
    state = f"step {follower.step}/{follower.steps}, val {val}"
    if follower.diverged is not None:
        state = f"diverged at step {follower.diverged}" + ("" if follower.stopped else f", {state}")
    return f"{follower.name:<{width}} {state}"


def _place(follower: Follower) -> tuple[bool, bool, float, str]:
    """What standings are sorted by."""
    loss = follower.val_loss
    return follower.diverged is not None, loss is None, 0.0 if loss is None else loss, follower.name


class Scoreboard:
    """Follows the runs of a race and shows their standings.

    rows: the runs that share a line, which shows the best of them.
    """

    def __init__(self, rows: Sequence[Sequence[Follower]], quiet: bool = False) -> None:
        self._rows = rows
        self._followers = followers = [follower for row in rows for follower in row]
        self._width = max(len(follower.name) for follower in followers)
        # a rate of the first steps alone would count the start-up of their processes
        self._time_left = TimeLeft(least=5 / sum(follower.steps for follower in followers))
        self._live = LiveLines(self.lines, quiet)

    def __enter__(self) -> Scoreboard:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__()

    def lines(self) -> list[str]:
        """The time left, then everyone who started: the lowest validation loss first, the diverged last."""
        left, total = sum(f.steps_left for f in self._followers), sum(f.steps for f in self._followers)
        fraction = 1 - left / total
        head = f"race: {fraction:.0%}{self._time_left.text(fraction)}"
        started = [min((f for f in row if f.step), key=_place) for row in self._rows if any(f.step for f in row)]
        started.sort(key=_place)
        return [head, *(f"{rank:>3} {standing(f, self._width)}" for rank, f in enumerate(started, start=1))]

    def update(self, last: bool = False) -> None:
        """Read every run's new lines and show the standings."""
        for follower in self._followers:
            follower.update()
        self._live.show(last)
