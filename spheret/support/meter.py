"""The progress of long work on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

# seconds between lines where there is no terminal
LINE_SECONDS = 10.0


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class Meter:
    """A title, a text about the work, and the time left."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._begun = self._shown = time.monotonic()
        # resumed work starts with a share that was done before
        self._first: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Meter:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._title, total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the meter began."""
        return max(time.monotonic() - self._begun, 1e-9)

    def show(self, text: str, fraction: float | None, now: bool = False) -> None:
        """Show a text and the share of the work that is done, None if unknown; `now` prints a line at once."""
        if self._quiet:
            return
        done = fraction or 0.0
        self._first = done if self._first is None else self._first
        if done > self._first:
            text += f", {clock(self.seconds * (1 - done) / (done - self._first))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif now or time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            print(f"{self._title}: {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own, which the bar does not overwrite."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
