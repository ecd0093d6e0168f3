"""The page of a race, of a study, or of runs that somebody else started: `spheret report`.

Everything is a pure function of what was found: the same rows and runs give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spheret.lab.answers import GroupAnswer, group_answers
from spheret.lab.endpoints import EndpointAnswer, endpoint_answers
from spheret.lab.figures import answers as answer_figures
from spheret.lab.figures import runs as run_figures
from spheret.lab.figures import watched as watched_figures
from spheret.lab.figures.lines import line_styles
from spheret.lab.ladders import ladders
from spheret.lab.links import run_places
from spheret.lab.outcome import print_outcome
from spheret.lab.page.charts import Chart, answer_charts, run_charts
from spheret.lab.page.output import contents, refuse_other_files, write_files
from spheret.lab.page.tables import to_markdown
from spheret.lab.plan import Plan
from spheret.lab.rows import Key, Row
from spheret.lab.runs import RunGroup, read_groups
from spheret.lab.sections.answers import answer_sections, receipts
from spheret.lab.sections.certificates import certificates_section
from spheret.lab.sections.paper import paper_section
from spheret.lab.sections.runs import (
    groups_section,
    provenance_section,
    results_section,
    stream_section,
    summary_section,
)
from spheret.lab.sections.samples import samples_section
from spheret.lab.sections.section import Section
from spheret.lab.sections.watched import headline, watched_sections
from spheret.lab.sections.zero_shot import zero_shot_section
from spheret.lab.watch_file import Watched, find_watched, read_all
from spheret.support.errors import one_line
from spheret.support.figure_style import Drawing

TITLE = "Deep connections compared"
WATCHED_TITLE = "Watched training"
# the sections of one group of runs, in the order of the page
RUN_SECTIONS: tuple[Callable[[RunGroup], Section | None], ...] = (
    summary_section,
    results_section,
    samples_section,
    stream_section,
    zero_shot_section,
    certificates_section,
    provenance_section,
)


@dataclass(frozen=True)
class Findings:
    """What a page is made from. groups: runs whose directories are here, with their answers. rows: all that ended.

    watched: trainings by others' loops, of which there is a watch.jsonl.
    """

    title: str
    answers: Sequence[GroupAnswer]
    rows: Mapping[Key, Row] = field(default_factory=dict)
    endpoints: Sequence[EndpointAnswer] = ()
    groups: Sequence[RunGroup] = ()
    watched: Sequence[Watched] = ()


def study_findings(plan: Plan, rows: Mapping[Key, Row]) -> Findings:
    """What the rows of a study say."""
    answers = group_answers(plan, rows)
    return Findings(plan.title, answers, rows, endpoint_answers(plan.endpoints, answers))


def run_findings(groups: Sequence[RunGroup], watched: Sequence[Watched] = ()) -> Findings:
    """What runs say that no plan asked for."""
    title = TITLE if groups else WATCHED_TITLE
    return Findings(title, [group.answer for group in groups], groups=groups, watched=watched)


def sections_of(found: Findings) -> list[Section]:
    """Every section that has something to show: the answer first, where the numbers are from last.

    With several groups of runs the names of their sections, tables and figures end in the name of the group.
    """
    watched = [section for number in range(len(found.watched)) for section in _watched_sections(found, number)]
    if watched and not found.groups:
        return watched
    results = {run.row.key: run for group in found.groups for run in group.every if run.row is not None}
    sections = answer_sections(found.answers, ladders(found.answers), found.endpoints, results)
    if not found.groups:
        return [*sections, *receipts(found.answers, found.rows)]
    sections += [groups_section(found.groups)] if len(found.groups) > 1 else []
    for group in found.groups:
        own = [section for section in (function(group) for function in RUN_SECTIONS) if section is not None]
        sections += (
            own if len(found.groups) == 1 else [_renamed(section, _suffix(group), group.name) for section in own]
        )
    return [*sections, *watched, paper_section(found.groups)]


def _suffix(group: RunGroup) -> str:
    return "-" + re.sub(r"[^a-z0-9]+", "-", group.name.lower()).strip("-")


def _watched_suffix(found: Findings, number: int) -> str:
    """What the names of a watched training end in: nothing if it is alone on the page."""
    return f"-watched-{number + 1}" if found.groups or len(found.watched) > 1 else ""


def _watched_sections(found: Findings, number: int) -> list[Section]:
    suffix, watched = _watched_suffix(found, number), found.watched[number]
    own = watched_sections(watched, opening=not suffix)
    return [_renamed(section, suffix, watched.name) for section in own] if suffix else own


def _renamed(section: Section, suffix: str, name: str) -> Section:
    return replace(
        section,
        name=section.name + suffix,
        title=f"{section.title}: {name}",
        tables=[replace(t, name=t.name + suffix, caption=f"{t.caption}: {name}") for t in section.tables],
        figures=[figure + suffix for figure in section.figures],
    )


def drawings_of(found: Findings) -> list[Drawing]:
    """Every figure, named as the sections name them."""
    drawings = answer_figures.draw(found.answers, ladders(found.answers))
    for group in found.groups:
        for drawing in run_figures.draw(group):
            suffix, words = (_suffix(group), f": {group.name}") if len(found.groups) > 1 else ("", "")
            drawings.append(replace(drawing, name=drawing.name + suffix, caption=drawing.caption + words))
    for number, watched in enumerate(found.watched):
        suffix = _watched_suffix(found, number)
        words = f": {watched.name}" if suffix else ""
        drawings += [
            replace(drawing, name=drawing.name + suffix, caption=drawing.caption + words)
            for drawing in watched_figures.draw(watched)[0]
        ]
    return drawings


def charts_of(found: Findings) -> dict[str, Chart]:
    """The numbers behind the interactive figures, by the name of the figure."""
    charts = answer_charts(found.answers)
    for group in found.groups:
        suffix = _suffix(group) if len(found.groups) > 1 else ""
        charts |= {name + suffix: chart for name, chart in run_charts(group).items()}
    for number, watched in enumerate(found.watched):
        suffix = _watched_suffix(found, number)
        charts |= {name + suffix: chart for name, chart in watched_figures.draw(watched)[1].items()}
    return charts


def report_files(
    found: Findings,
    drawings: Sequence[Drawing] | None = None,
    directory: Path | None = None,
    refresh: int | None = None,
) -> dict[str, bytes]:
    """The content of every file of a report, by file name.

    drawings: by default all of them. directory: where the report will be; without it the page links no run. refresh:
    after so many seconds a browser reads the page again.
    """
    if directory is not None:
        places = run_places([(run.name, run.run) for group in found.groups for run in group.every], directory)
        found = replace(found, groups=[replace(group, places=places) for group in found.groups])
    # before the figures, which take longer: a damaged document is found at once
    sections = sections_of(found)
    drawings = drawings_of(found) if drawings is None else drawings
    styles = {label: style for answer in found.answers for label, style in line_styles(answer).items()}
    return contents(found.title, sections, drawings, charts_of(found), styles, refresh)


def write_report(found: Findings, directory: Path) -> Path:
    """Write the page, the tables and the figures. Returns the path of the page."""
    refuse_other_files(directory)
    return write_files(directory, report_files(found, directory=directory))


def result_files(plan: Plan, rows: Mapping[Key, Row]) -> dict[str, bytes]:
    """The figures and the tables of a study for its documents, by file name. results.jsonl has every run."""
    found = study_findings(plan, rows)
    tables = [table for section in sections_of(found) for table in section.tables]
    drawings = answer_figures.draw(found.answers, ladders(found.answers), curves=False)
    return {
        "tables.md": to_markdown(table for table in tables if table.name != "runs").encode(),
        **{f"{drawing.name}.svg": drawing.themed_svg.encode() for drawing in drawings},
    }


def report(runs: Sequence[str | Path], out: str | Path) -> tuple[Findings, Path]:
    """Write the report of some runs. Returns what was found and the path of the page."""
    directory = Path(out).expanduser()
    # before the runs are read, which may take long
    refuse_other_files(directory)
    files, others = find_watched(runs)
    watched = read_all(files)
    found = run_findings(read_groups(others) if others or not watched else [], watched)
    return found, write_report(found, directory)


def report_command(runs: tuple[str, ...] = (), /, out: str = "report") -> int:
    """Compare runs: one self-contained page, tables in Markdown, CSV and LaTeX, figures in SVG, PNG and PGF.

    Runs are compared only with runs on the same data and, of the paper's sizes, of the same size. Watched trainings
    are shown, and compared with nothing.

    Args:
        runs: run directories, directories that contain run directories, such as that of a race, or a watch.jsonl of
            spheret.watch or its directory.
        out: the directory for report.html, tables.* and figures/.
    """
    found, page = report(runs, out)
    print_outcome(found.answers, page)
    for watched in found.watched:
        print(one_line(f"{watched.name}: {headline(watched)}"))
    return 0
