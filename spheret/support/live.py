"""Lines that follow long work: live in a terminal, elsewhere now and then. Both go to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# seconds between tables where there is no terminal
LINES_SECONDS = 20.0


class LiveLines:
    """Shows what `lines` returns."""

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
