"""The files of a report: the page, its tables and its figures. Nothing that a report did not write is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spheret.lab.page import tables
from spheret.lab.page.charts import Chart
from spheret.lab.page.page import page
from spheret.lab.sections.section import Section
from spheret.support.documents import MOST_BYTES
from spheret.support.figure_style import Drawing
from spheret.support.files import NotRegular, read_regular, write_atomically

PAGE = "report.html"
FIGURES = "figures"
# the names of the files that a report has written, by which it knows its own
LISTING = "files.txt"
HEAD = "written by spheret, which replaces and removes these files of the directory, and no others"
TABLES = {"tables.md": tables.to_markdown, "tables.csv": tables.to_csv, "tables.tex": tables.to_latex}


def contents(
    title: str,
    sections: Sequence[Section],
    drawings: Sequence[Drawing],
    charts: Mapping[str, Chart] | None = None,
    styles: Mapping[str, tuple[str, Any]] | None = None,
    refresh: int | None = None,
) -> dict[str, bytes]:
    """The content of every file of a report, by file name.

    charts: the numbers behind interactive figures, by the name of the figure. styles: the line of each contestant.
    refresh: after so many seconds a browser reads the page again.
    """
    page_tables = [table for section in sections for table in section.tables]
    return {
        **{name: write(page_tables).encode() for name, write in TABLES.items()},
        **{f"{FIGURES}/{drawing.name}.svg": drawing.themed_svg.encode() for drawing in drawings},
        **{f"{FIGURES}/{drawing.name}.png": drawing.png for drawing in drawings if drawing.png},
        **{f"{FIGURES}/{drawing.name}.pgf": drawing.pgf.encode() for drawing in drawings if drawing.pgf is not None},
        # written last: if the page exists, the other files do too
        PAGE: page(title, sections, drawings, charts or {}, styles or {}, refresh=refresh).encode(),
    }


def refuse_other_files(directory: Path, names: Iterable[str] = (PAGE, *TABLES)) -> None:
    """Raise if the directory holds a file of one of these names that no earlier report has written."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    own = _written_before(directory)
    for name in (LISTING, *names):
        path = directory / name
        if name not in own and (path.exists() or path.is_symlink()):
            raise FileExistsError(
                f"--out {directory} holds {name}, which spheret did not write: give another directory."
            )


def _written_before(directory: Path) -> list[str]:
    """The names in the listing of an earlier report, its own included; empty if there is none."""
    try:
        head, *names = read_regular(directory / LISTING, MOST_BYTES).decode().splitlines()
    except (FileNotFoundError, NotRegular, UnicodeDecodeError, ValueError):
        return []
    return [LISTING, *names] if head == HEAD else []


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files of a report, and remove what an earlier one had besides. Returns the path of the page."""
    refuse_other_files(directory, files)
    before = _written_before(directory)
    (directory / FIGURES).mkdir(parents=True, exist_ok=True)
    # before the first file: a report that is killed half-way is known as one
    _list(directory, {*before, *files})
    for name, data in files.items():
        write_atomically(directory / name, data)
    for name in {*before} - {*files, LISTING}:
        # a name that a stranger put into the listing stays inside
        if (directory / name).resolve().is_relative_to(directory.resolve()):
            (directory / name).unlink(missing_ok=True)
    _list(directory, set(files))
    return directory / PAGE


def _list(directory: Path, names: set[str]) -> None:
    write_atomically(directory / LISTING, "\n".join([HEAD, *sorted(names - {LISTING})]).encode() + b"\n")
