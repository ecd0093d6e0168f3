"""The standings of a race, read from the metrics of its runs: one ranked line per contestant and seed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from spheret.runs.metrics import Follower
from spheret.support.meter import TimeLeft

# seconds between tables where there is no terminal
LINES_SECONDS = 20.0


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
    """A live table in a terminal; elsewhere the same lines now and then. Both go to stderr.

    rows: the runs that share a line, which shows the best of them.
    """

    def __init__(self, rows: Sequence[Sequence[Follower]], quiet: bool = False) -> None:
        self._rows, self._quiet = rows, quiet
        self._followers = followers = [follower for row in rows for follower in row]
        self._width = max(len(follower.name) for follower in followers)
        self._shown = 0.0
        # a rate of the first steps alone would count the start-up of their processes
        self._time_left = TimeLeft(least=5 / sum(follower.steps for follower in followers))
        self._live: Any = None

    def __enter__(self) -> Scoreboard:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

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
        if self._quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(self.lines())))
        elif last or time.monotonic() - self._shown >= LINES_SECONDS:
            self._shown = time.monotonic()
            print("\n".join(self.lines()), file=sys.stderr, flush=True)
