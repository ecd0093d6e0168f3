"""The report of a race or a study while it runs, in the place of the one at its end. A browser reads it again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from spheret.lab.figures.svg import draw_chart
from spheret.lab.page.output import PAGE, write_files
from spheret.lab.report import Findings, charts_of, report_files
from spheret.support.errors import one_line
from spheret.support.figure_style import Drawing

# seconds between two pages, and the largest share of the time that making them may take
SECONDS, SHARE = 20.0, 0.02
# a browser reads the page again after so many
REFRESH = 20


class LivePage:
    """Writes the page now and then. On an error or an interruption it writes the last one, which stays as it is.

    directory: of the report. findings: what is known by now; None as long as that is nothing. name: race or study.
    """

    def __init__(self, directory: Path, findings: Callable[[], Findings | None], name: str, quiet: bool) -> None:
        self._directory, self._findings, self._name, self._quiet = directory, findings, name, quiet
        self._due = time.monotonic() + SECONDS
        self._written = self._failed = False

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # without an error the report at the end follows
        if self._written and kind is not None:
            self._write(refresh=None)

    def update(self) -> None:
        """Write the page, if it is time."""
        start = time.monotonic()
        if start < self._due:
            return
        self._write(refresh=REFRESH)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - start) / SHARE)

    def _write(self, refresh: int | None) -> None:
        try:
            found = self._findings()
            if found is None:
                return
            write_files(self._directory, report_files(found, _drawings(found), self._directory, refresh))
        except (OSError, ValueError) as error:
            # the runs go on: what is wrong may pass, and if it does not, the report at the end says it
            if not self._failed:
                self._say(f"the page cannot be written yet ({error}).")
            self._failed = True
            return
        if not self._written:
            self._say(f"{self._directory / PAGE} shows how far it is. A browser reads it again every {REFRESH} s.")
        self._written = True

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(one_line(f"{self._name}: {text}"), file=sys.stderr, flush=True)


def _drawings(found: Findings) -> list[Drawing]:
    """The charts as figures. What matplotlib draws takes longer, and comes with the report at the end."""
    return [
        draw_chart(name, f"{chart['y'][:1].upper()}{chart['y'][1:]} by {chart['x']}", chart)
        for name, chart in charts_of(found).items()
    ]
