"""`spheret report`: a pure function of run directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from spheret.lab.figures.lines import line_styles
from spheret.lab.figures.runs import FIGURES, draw
from spheret.lab.links import run_places
from spheret.lab.page.charts import Chart, charts
from spheret.lab.page.output import contents, refuse_other_files, write_files
from spheret.lab.runs import RunGroup, read_groups
from spheret.lab.sections import sections
from spheret.lab.sections.answer import answer_section
from spheret.lab.sections.certificates import certificates_section
from spheret.lab.sections.failures import failures_section
from spheret.lab.sections.learning_rates import learning_rates_section
from spheret.lab.sections.pairs import comparisons_section
from spheret.lab.sections.paper import paper_section
from spheret.lab.sections.samples import samples_section
from spheret.lab.sections.sections import Section
from spheret.lab.sections.zero_shot import zero_shot_section
from spheret.support.figure_style import Drawing

TITLE = "Deep connections compared"
# with several groups a figure's name ends in that of its group
FIGURE_NAME = re.compile(rf"({'|'.join(FIGURES)})(-.+)?\.(svg|png|pgf)")
# the sections of one group, in the order of the page
SECTIONS: tuple[Callable[[RunGroup], Section | None], ...] = (
    answer_section,
    sections.summary_section,
    failures_section,
    sections.results_section,
    learning_rates_section,
    comparisons_section,
    samples_section,
    sections.stream_section,
    zero_shot_section,
    certificates_section,
    sections.provenance_section,
)


def sections_of(groups: Sequence[RunGroup]) -> list[Section]:
    """Every section that has something to show: those of each group, and the comparison with the paper for all.

    With several groups the names of sections, tables and figures end in the name of the group.
    """
    page_sections = [] if len(groups) == 1 else [sections.groups_section(groups)]
    for group in groups:
        own = [section for section in (function(group) for function in SECTIONS) if section is not None]
        page_sections += own if len(groups) == 1 else [_renamed(section, group) for section in own]
    return [*page_sections, paper_section(groups)]


def _suffix(group: RunGroup) -> str:
    return "-" + re.sub(r"[^a-z0-9]+", "-", group.name.lower()).strip("-")


def _renamed(section: Section, group: RunGroup) -> Section:
    suffix = _suffix(group)
    return replace(
        section,
        name=section.name + suffix,
        title=f"{section.title}: {group.name}",
        tables=[replace(t, name=t.name + suffix, caption=f"{t.caption}: {group.name}") for t in section.tables],
        figures=[name + suffix for name in section.figures],
    )


def drawings_of(groups: Sequence[RunGroup]) -> list[Drawing]:
    """The figures of every group, named like its sections."""
    if len(groups) == 1:
        return draw(groups[0])
    return [
        replace(drawing, name=drawing.name + _suffix(group), caption=f"{drawing.caption}: {group.name}")
        for group in groups
        for drawing in draw(group)
    ]


def charts_of(groups: Sequence[RunGroup]) -> dict[str, Chart]:
    """The numbers behind the interactive figures of every group, by the name of the figure."""
    if len(groups) == 1:
        return charts(groups[0])
    return {name + _suffix(group): chart for group in groups for name, chart in charts(group).items()}


def report_files(
    groups: Sequence[RunGroup], drawings: Sequence[Drawing] | None = None, directory: Path | None = None
) -> dict[str, bytes]:
    """The content of every file of a report, by file name.

    drawings: by default those of the groups. directory: where the report will be; without it the page links no run.
    """
    if directory is not None:
        runs = [(result.name, result.run) for group in groups for results in group.by_rate for result in results]
        places = run_places(runs, directory)
        groups = [replace(group, places=places) for group in groups]
    # before the figures, which take longer: a damaged document is found at once
    page_sections = sections_of(groups)
    drawings = drawings_of(groups) if drawings is None else drawings
    styles = {label: style for group in groups for label, style in line_styles(group).items()}
    return contents(TITLE, page_sections, drawings, charts_of(groups), styles)


def report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page, the tables and the figures of some runs. Returns the path of the page."""
    directory = Path(out).expanduser()
    # before the runs are read, which may take long
    refuse_other_files(directory, FIGURE_NAME)
    return write_report(read_groups(runs), directory)


def write_report(groups: Sequence[RunGroup], directory: Path) -> Path:
    """Write the report of runs that were read. Returns the path of the page."""
    refuse_other_files(directory, FIGURE_NAME)
    return write_files(directory, report_files(groups, directory=directory), FIGURE_NAME)


def report_command(runs: tuple[str, ...] = (), /, out: str = "report") -> int:
    """Compare runs: one self-contained page, tables in Markdown, CSV and LaTeX, figures in SVG, PNG and PGF.

    Runs are compared only with runs on the same data and, of the paper's sizes, of the same size.

    Args:
        runs: run directories, or directories that contain run directories.
        out: the directory for report.html, tables.* and figures/.
    """
    print(report(runs, out))
    return 0
