"""`spheret report`: a pure function of run directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spheret.report import sections, tables
from spheret.report.certificates import certificates_section
from spheret.report.figure_style import Drawing
from spheret.report.page import page
from spheret.report.paper_comparison import paper_section
from spheret.report.plots import FIGURES, draw
from spheret.report.results import Study, read_study
from spheret.report.sections import Section
from spheret.report.zero_shot import zero_shot_section
from spheret.support.files import write_atomically

TITLE = "Deep connections compared"
PAGE = "report.html"
# by this an earlier report is known
PAGE_MARK = b'<meta name="generator" content="spheret report">'
TABLES = {"tables.md": tables.to_markdown, "tables.csv": tables.to_csv, "tables.tex": tables.to_latex}
FIGURE_FILES = {f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
# in the order of the page
SECTIONS: tuple[Callable[[Study], Section | None], ...] = (
    sections.summary_section,
    sections.results_section,
    sections.comparisons_section,
    sections.stream_section,
    zero_shot_section,
    certificates_section,
    paper_section,
    sections.provenance_section,
)


def sections_of(study: Study) -> list[Section]:
    """Every section that has something to show for these runs."""
    return [section for section in (function(study) for function in SECTIONS) if section is not None]


def report_files(study: Study, drawings: Sequence[Drawing]) -> dict[str, bytes]:
    """The content of every file of a report, by file name."""
    study_sections = sections_of(study)
    study_tables = [table for section in study_sections for table in section.tables]
    return {
        **{name: write(study_tables).encode() for name, write in TABLES.items()},
        **{f"figures/{drawing.name}.svg": drawing.svg.encode() for drawing in drawings},
        **{f"figures/{drawing.name}.png": drawing.png for drawing in drawings},
        # written last: if the page exists, the other files do too
        PAGE: page(TITLE, study_sections, drawings).encode(),
    }


def _refuse_other_files(directory: Path) -> None:
    """Raise if the directory holds a file of a name that a report writes, and no earlier report."""
    if PAGE_MARK in _beginning(directory / PAGE):
        return
    for name in (PAGE, *TABLES, *FIGURE_FILES):
        if (directory / name).exists() or (directory / name).is_symlink():
            raise FileExistsError(
                f"--out {directory} holds {name}, which spheret report did not write: give another directory."
            )


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(4096)


def report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page, the tables and the figures of some runs. Returns the path of the page."""
    directory = Path(out).expanduser()
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    _refuse_other_files(directory)
    study = read_study(runs)
    files = report_files(study, draw(study))
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(directory / name, data)
    # an earlier report may have had more figures
    for stale in FIGURE_FILES - set(files):
        (directory / stale).unlink(missing_ok=True)
    return directory / PAGE


def report_command(runs: tuple[str, ...] = (), /, out: str = "report") -> int:
    """Compare runs: one self-contained page, tables in Markdown, CSV and LaTeX, figures in SVG and PNG.

    Args:
        runs: run directories, or directories that contain run directories.
        out: the directory for report.html, tables.* and figures/.
    """
    print(report(runs, out))
    return 0
