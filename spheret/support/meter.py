"""The progress of long work on stderr: a bar or lines that stay in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# seconds between lines, and between tables, where there is no terminal
LINE_SECONDS, LINES_SECONDS = 10.0, 20.0


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class TimeLeft:
    """An estimate of the time left, from how much of the work was done since it began."""

    def __init__(self, least: float = 0.0) -> None:
        """least: the share of the work that must be done before there is an estimate."""
        self._begun, self._least = time.monotonic(), least
        self._first: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return max(time.monotonic() - self._begun, 1e-9)

    def text(self, fraction: float | None) -> str:
        """ ", 0:01:20 left", or nothing while there is no estimate. None: the fraction is not known."""
        # resumed work starts with a share that was done before
        if self._first is None:
            self._first = fraction or 0.0
        gained = (fraction or 0.0) - self._first
        if fraction is None or gained <= 0 or gained < self._least:
            return ""
        return f", {clock(self.seconds * (1 - fraction) / gained)} left"


class Meter:
    """A title, a text about the work, and the time left."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._time_left = TimeLeft()
        self._shown = time.monotonic()
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
        return self._time_left.seconds

    def show(self, text: str, fraction: float | None, now: bool = False) -> None:
        """Show a text and the share of the work that is done, None if unknown; `now` prints a line at once."""
        if self._quiet:
            return
        text += self._time_left.text(fraction)
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction or 0.0, text=text)
        elif now or time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            print(f"{self._title}: {text}", file=sys.stderr, flush=True)

    def counter(self, total: int, unit: str, parts: int = 1) -> Callable[..., None]:
        """A function to call after every part, or with how many: "3 of 24 tokens". A unit has `parts` of them."""
        done = 0

        def tick(count: int = 1) -> None:
            nonlocal done
            done += count
            self.show(f"{done // parts} of {total} {unit}", done / (total * parts))

        return tick

    def say(self, text: str) -> None:
        """Print a line of its own, which the bar does not overwrite."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class LiveLines:
    """Shows what `lines` returns: live in a terminal, elsewhere now and then."""

    def __init__(self, lines: Callable[[], Sequence[str]], quiet: bool = False) -> None:
        self._lines, self._quiet = lines, quiet
        self._shown = 0.0
        self._live: Any = None

    def __enter__(self) -> LiveLines:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, last: bool = False) -> None:
        """Show the lines, if it is time; `last` shows them in any case."""
        if self._quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(self._lines())))
        elif last or time.monotonic() - self._shown >= LINES_SECONDS:
            self._shown = time.monotonic()
            print("\n".join(self._lines()), file=sys.stderr, flush=True)
