"""Where the runs lie, as seen from the page of a report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from spheret.runs.run import Run


@dataclass(frozen=True)
class RunLinks:
    """The directory of a run relative to the page, with a slash at its end, and the log beside it; "" for no log."""

    folder: str
    log: str


def run_places(runs: Iterable[tuple[str, Run]], page: Path) -> dict[str, RunLinks]:
    """The place of every named run that lies beside the report or below its parent directory, as those of a race do.

    page: the directory of the report. Runs and report can be moved together, and the links hold. A run that lies
    elsewhere has no link: the page of a report is the same wherever such runs are.
    """
    home = page.resolve()
    places = {}
    for name, run in runs:
        path = run.path.resolve()
        if path.is_relative_to(home.parent):
            log = path.with_name(f"{path.name}.log")
            places[name] = RunLinks(_link(path, home) + "/", _link(log, home) if log.is_file() else "")
    return places


def _link(path: Path, home: Path) -> str:
    return quote(Path(os.path.relpath(path, home)).as_posix())
