"""How far long work is: a bar in a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class Meter:
    """A title, what the work says of itself, and the time left."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._begun = self._shown = time.monotonic()
        self._first: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Meter:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._title, total=1.0, said="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the meter began."""
        return max(time.monotonic() - self._begun, 1e-9)

    def show(self, said: str, fraction: float | None, now: bool = False) -> None:
        """Say how it goes and that `fraction` of all is done (None: nobody knows); `now` prints a line at once."""
        if self._quiet:
            return
        # a resumed run starts with work that it did not do
        if self._first is None:
            self._first = fraction or 0.0
        gained = (fraction or 0.0) - self._first
        if fraction is not None and gained > 0:
            said += f", {clock(self.seconds * (1 - fraction) / gained)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction or 0.0, said=said)
        elif now or time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            print(f"{self._title}: {said}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, which the bar does not overwrite."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
