"""The page of a race, of a study, or of runs that somebody else started: `spheret report`.

Everything is a pure function of what was found: the same rows and runs give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spheret.lab.answers import GroupAnswer, group_answers
from spheret.lab.endpoints import EndpointAnswer, endpoint_answers, ladders
from spheret.lab.ngrams import NgramRecord
from spheret.lab.outcome import print_outcome
from spheret.lab.page.output import FIGURES, PAGE, TABLES, refuse_other_files, write_files
from spheret.lab.page.page import page
from spheret.lab.page.section import Section, to_markdown
from spheret.lab.plan import Plan
from spheret.lab.rows import Key, Row
from spheret.lab.runs import RunGroup, read_groups
from spheret.lab.sections.answers import answer_sections, receipts
from spheret.lab.sections.charts import line_styles
from spheret.lab.sections.runs import paper_section, summary_section
from spheret.lab.sections.watched import headline, watched_sections
from spheret.lab.watch_file import Watched, find_watched, read_all
from spheret.support.charts import draw
from spheret.support.errors import one_line

TITLE = "Deep connections compared"
WATCHED_TITLE = "Watched training"


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


def study_findings(plan: Plan, rows: Mapping[Key, Row], ngrams: Sequence[NgramRecord] = ()) -> Findings:
    """What the rows of a study say."""
    answers = group_answers(plan, rows, ngrams)
    return Findings(plan.title, answers, rows, endpoint_answers(plan.endpoints, answers))


def run_findings(groups: Sequence[RunGroup], watched: Sequence[Watched] = ()) -> Findings:
    """What runs say that no plan asked for."""
    title = TITLE if groups else WATCHED_TITLE
    return Findings(title, [group.answer for group in groups], groups=groups, watched=watched)


def sections_of(found: Findings) -> list[Section]:
    """Every section that has something to show: the answer first, where the numbers are from last.

    With several groups of runs the names of their sections, tables and charts end in the name of the group.
    """
    watched = _watched_sections(found)
    if watched and not found.groups:
        return watched
    # groups of runs have other data or sizes: they are no rungs of one part
    rungs = () if found.groups else ladders(found.answers).values()
    sections = answer_sections(found.answers, rungs, found.endpoints)
    for group in found.groups:
        suffix = "-" + re.sub(r"[^a-z0-9]+", "-", group.name.lower()).strip("-")
        summary = summary_section(group)
        sections.append(summary if len(found.groups) == 1 else summary.renamed(suffix, group.name))
    paper = [paper_section(found.groups)] if found.groups else []
    return [*sections, *watched, *paper, *receipts(found.answers, found.rows)]


def _watched_sections(found: Findings) -> list[Section]:
    if len(found.watched) == 1 and not found.groups:
        return watched_sections(found.watched[0])
    return [
        section.renamed(f"-watched-{number}", watched.name)
        for number, watched in enumerate(found.watched, 1)
        for section in watched_sections(watched, opening=False)
    ]


def report_files(found: Findings) -> dict[str, bytes]:
    """The content of every file of a report, by file name."""
    sections = sections_of(found)
    styles = {label: style for answer in found.answers for label, style in line_styles(answer).items()}
    drawings = [draw(chart) for section in sections for chart in section.charts]
    return {
        TABLES: to_markdown(table for section in sections for table in section.tables).encode(),
        **{f"{FIGURES}/{drawing.name}.svg": drawing.themed_svg.encode() for drawing in drawings},
        **{f"{FIGURES}/{drawing.name}.png": drawing.png for drawing in drawings},
        # written last: if the page exists, the other files do too
        PAGE: page(found.title, sections, drawings, styles).encode(),
    }


def write_report(found: Findings, directory: Path) -> Path:
    """Write the page, the tables and the figures. Returns the path of the page."""
    refuse_other_files(directory)
    return write_files(directory, report_files(found))


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
    """Compare runs: one self-contained page, tables in Markdown, figures in SVG and PNG.

    Runs are compared only with runs on the same data and, of the paper's sizes, of the same size. Watched trainings
    are shown, and compared with nothing.

    Args:
        runs: run directories, directories that contain run directories, such as a race's, or a watch.jsonl of
            spheret.watch or its directory.
        out: the directory for report.html, tables.md and figures/.
    """
    found, path = report(runs, out)
    print_outcome(found.answers, path)
    for watched in found.watched:
        print(one_line(f"{watched.name}: {headline(watched)}"))
    return 0
