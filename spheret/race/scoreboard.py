"""The standings of a race, read from the metrics of its runs: one ranked line per contestant."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from spheret.runs.metrics import Follower
from spheret.support.meter import TimeLeft

# seconds between tables where there is no terminal
LINES_SECONDS = 20.0
NAME_WIDTH = 28


def standing(follower: Follower) -> str:
    """One contestant in one line."""
    val = "-" if follower.val_loss is None else f"{follower.val_loss:.4f} at step {follower.val_step}"
    state = f"step {follower.step}/{follower.steps}, val {val}"
    if follower.diverged is not None:
        state = f"diverged at step {follower.diverged}" + ("" if follower.stopped else f", {state}")
    return f"{follower.name:<{NAME_WIDTH}} {state}"


class Scoreboard:
    """A live table in a terminal; elsewhere the same lines now and then. Both go to stderr."""

    def __init__(self, followers: Sequence[Follower], quiet: bool = False) -> None:
        self._followers, self._quiet = followers, quiet
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
        started = [f for f in self._followers if f.step]
        started.sort(key=lambda f: (f.diverged is not None, f.val_loss is None, f.val_loss, f.name))
        return [head, *(f"{rank:>3} {standing(f)}" for rank, f in enumerate(started, start=1))]

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
