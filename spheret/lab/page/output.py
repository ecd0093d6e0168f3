"""The files of a report: the page, its tables and its figures. Nothing that a report did not write is overwritten."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spheret.lab.page import tables
from spheret.lab.page.charts import Chart
from spheret.lab.page.page import page
from spheret.lab.sections.section import Section
from spheret.support.figure_style import Drawing
from spheret.support.files import write_atomically

PAGE = "report.html"
FIGURES = "figures"
# the files by which an earlier report is known, each with what it begins with
MARKS = {
    PAGE: b'<meta name="generator" content="spheret report">',
    "tables.csv": ",".join(tables.CSV_COLUMNS).encode(),
}
TABLES = {"tables.md": tables.to_markdown, "tables.csv": tables.to_csv, "tables.tex": tables.to_latex}


def contents(
    title: str,
    sections: Sequence[Section],
    drawings: Sequence[Drawing],
    charts: Mapping[str, Chart] | None = None,
    styles: Mapping[str, tuple[str, Any]] | None = None,
) -> dict[str, bytes]:
    """The content of every file of a report, by file name.

    charts: the numbers behind interactive figures, by the name of the figure. styles: the line of each contestant.
    """
    page_tables = [table for section in sections for table in section.tables]
    return {
        **{name: write(page_tables).encode() for name, write in TABLES.items()},
        **{f"{FIGURES}/{drawing.name}.svg": drawing.svg.encode() for drawing in drawings},
        **{f"{FIGURES}/{drawing.name}.png": drawing.png for drawing in drawings},
        **{f"{FIGURES}/{drawing.name}.pgf": drawing.pgf.encode() for drawing in drawings if drawing.pgf is not None},
        # written last: if the page exists, the other files do too
        PAGE: page(title, sections, drawings, charts or {}, styles or {}).encode(),
    }


def refuse_other_files(directory: Path, figure_name: re.Pattern[str]) -> None:
    """Raise if the directory holds a file of a name that a report writes, and no earlier report."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    if any(mark in _beginning(directory / name) for name, mark in MARKS.items()):
        return
    for path in (directory / PAGE, *(directory / name for name in TABLES), *_figures(directory, figure_name)):
        if path.exists() or path.is_symlink():
            raise FileExistsError(
                f"--out {directory} holds {path.relative_to(directory)}, which spheret report did not write: give "
                f"another directory."
            )


def _figures(directory: Path, figure_name: re.Pattern[str]) -> list[Path]:
    """The files that have the name of a figure."""
    folder = directory / FIGURES
    return sorted(p for p in folder.iterdir() if figure_name.fullmatch(p.name)) if folder.is_dir() else []


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(4096)


def write_files(directory: Path, files: Mapping[str, bytes], figure_name: re.Pattern[str]) -> Path:
    """Write the files of a report, and delete the figures of an earlier one. Returns the path of the page."""
    (directory / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(directory / name, data)
    # an earlier report may have had more figures
    for path in _figures(directory, figure_name):
        if f"{FIGURES}/{path.name}" not in files:
            path.unlink()
    return directory / PAGE
