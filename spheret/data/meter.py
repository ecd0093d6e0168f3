"""How far long work is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class Meter:
    """Tokens so far, tokens/s and time left, on stderr."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._begun = self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None
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

    def update(self, tokens: int, fraction: float | None) -> None:
        """Show that `tokens` are done, which is `fraction` of all (None: nobody knows)."""
        if self._quiet:
            return
        now = time.monotonic()
        # a resumed run starts with tokens that it did not make
        if self._first is None:
            self._first = tokens, fraction or 0.0
        seconds = max(now - self._begun, 1e-9)
        said = f"{tokens:,} tokens, {(tokens - self._first[0]) / seconds:,.0f} tokens/s"
        gained = (fraction or 0.0) - self._first[1]
        if fraction is not None and gained > 0:
            said += f", {_clock(seconds * (1 - fraction) / gained)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction or 0.0, said=said)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(f"{self._title}: {said}", file=sys.stderr, flush=True)
