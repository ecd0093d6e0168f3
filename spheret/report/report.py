"""`spheret report`: a pure function of run directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spheret.report import sections, tables
from spheret.report.beside import beside_the_paper
from spheret.report.drawing import Drawing
from spheret.report.extras import certificates, zero_shot
from spheret.report.page import page
from spheret.report.plots import FIGURES, draw
from spheret.report.results import Study, read
from spheret.report.sections import Section
from spheret.support.files import write_atomically

TITLE = "Deep connections, compared"
# in the order of the page
SECTIONS: tuple[Callable[[Study], Section | None], ...] = (
    sections.summary,
    sections.results,
    sections.verdicts,
    sections.stream,
    zero_shot,
    certificates,
    beside_the_paper,
    sections.receipts,
)


def make(study: Study) -> list[Section]:
    """Every section that the runs have something for."""
    return [section for section in (function(study) for function in SECTIONS) if section is not None]


def contents(study: Study, drawings: Sequence[Drawing]) -> dict[str, bytes]:
    """Every file of a report by its name."""
    made = make(study)
    every = [table for section in made for table in section.tables]
    return {
        "tables.md": tables.to_markdown(every).encode(),
        "tables.csv": tables.to_csv(every).encode(),
        "tables.tex": tables.to_latex(every).encode(),
        **{f"figures/{drawing.name}.svg": drawing.svg.encode() for drawing in drawings},
        **{f"figures/{drawing.name}.png": drawing.png for drawing in drawings},
        # last: where the page is, the rest is
        "report.html": page(TITLE, made, drawings).encode(),
    }


def report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page, the tables and the figures of some runs; returns the page."""
    study = read(runs)
    directory = Path(out).expanduser()
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    written = contents(study, draw(study))
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for name, data in written.items():
        write_atomically(directory / name, data)
    # of an earlier report with more to show
    for stale in {f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")} - set(written):
        (directory / stale).unlink(missing_ok=True)
    return directory / "report.html"


def report_command(runs: tuple[str, ...] = (), /, out: str = "report") -> int:
    """Compare runs: one self-contained page, tables in Markdown, CSV and LaTeX, figures in SVG and PNG.

    Args:
        runs: run directories, or directories of them.
        out: the directory to write report.html, tables.* and figures/ into.
    """
    print(report(runs, out))
    return 0
