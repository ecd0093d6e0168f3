"""The page of a watched training, written while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spheret.lab.page.page import is_page, page
from spheret.lab.sections.watched import watched_sections
from spheret.lab.watch_file import WATCH, Watched, in_order
from spheret.observe.records import Header, Observation
from spheret.support.files import check_output_file, write_atomically


def watched_page(header: Header, observations: Sequence[Observation], refresh: int | None = None) -> str:
    """The page of a training, one offline HTML file.

    refresh: after so many seconds a browser reads the page again; None once the training has ended.
    """
    watched = Watched(WATCH, header, in_order(observations))
    return page(header.model, watched_sections(watched), refresh=refresh)


def write_page(
    path: str | Path, header: Header, observations: Sequence[Observation], refresh: int | None = None
) -> None:
    """Write the page in one step, in the place of an earlier one. Any other file there is an error."""
    path = Path(path).expanduser()
    check_output_file("the page", path, is_page)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, watched_page(header, observations, refresh).encode())
