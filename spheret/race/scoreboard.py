"""How a race stands: read from the runs' own metrics, shown as one ranked line a contestant."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spheret.runs.layout import METRICS
from spheret.support.meter import clock

# without a terminal, a table so often
LINES_SECONDS = 20.0


class Follower:
    """One run's step and validation loss, from the lines that were added since the last look."""

    def __init__(self, name: str, path: Path, steps: int) -> None:
        self.name, self.steps = name, steps
        self._path, self._offset = path / METRICS, 0
        self.step, self.val_step = 0, 0
        self.val_loss: float | None = None
        self.stopped: str | None = None

    def look(self) -> None:
        try:
            # a run that goes on cuts off the lines after its checkpoint
            if self._path.stat().st_size < self._offset:
                self.__init__(self.name, self._path.parent, self.steps)  # type: ignore[misc]
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
                self.step = line["step"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{self._path} has a damaged line: delete {self._path.parent} to train that run again, or give "
                    f"another --out."
                ) from None
            self.stopped = line.get("stopped")
            if line.get("val_loss") is not None:
                self.val_loss, self.val_step = line["val_loss"], line["step"]

    @property
    def done(self) -> bool:
        return self.stopped is not None or self.step >= self.steps

    @property
    def left(self) -> int:
        return 0 if self.done else self.steps - self.step

    def line(self) -> str:
        val = "-" if self.val_loss is None else f"{self.val_loss:.4f} at step {self.val_step}"
        said = f"diverged at step {self.step}" if self.stopped else f"step {self.step}/{self.steps}, val {val}"
        return f"{self.name:<{NAME_WIDTH}} {said}"


NAME_WIDTH = 28


class Scoreboard:
    """A live table in a terminal, lines now and then elsewhere, on stderr."""

    def __init__(self, followers: Sequence[Follower], quiet: bool = False) -> None:
        self._followers, self._quiet = followers, quiet
        self._begun, self._shown = time.monotonic(), 0.0
        self._first: int | None = None
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
        """The time left, then everyone who started: the lowest validation loss first."""
        left, total = sum(f.left for f in self._followers), sum(f.steps for f in self._followers)
        if self._first is None:
            self._first = left
        head = f"race: {1 - left / total:.0%}"
        # a rate of the first steps of all would count the start-up of their processes
        if self._first - left >= 5:
            head += f", {clock((time.monotonic() - self._begun) * left / (self._first - left))} left"
        started = [f for f in self._followers if f.step]
        started.sort(key=lambda f: (f.stopped is not None, f.val_loss is None, f.val_loss, f.name))
        return [head, *(f"{rank:>3} {f.line()}" for rank, f in enumerate(started, start=1))]

    def update(self, last: bool = False) -> None:
        """Look at every run and show how it stands."""
        for follower in self._followers:
            follower.look()
        if self._quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(self.lines())))
        elif last or time.monotonic() - self._shown >= LINES_SECONDS:
            self._shown = time.monotonic()
            print("\n".join(self.lines()), file=sys.stderr, flush=True)
