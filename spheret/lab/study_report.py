"""The report of a study: a pure function of the plan and the rows, at any moment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from spheret.lab.answers import group_answers
from spheret.lab.endpoints import endpoint_answers
from spheret.lab.figures.answers import draw
from spheret.lab.ladders import ladders
from spheret.lab.page.output import contents, refuse_other_files, write_files
from spheret.lab.page.tables import to_markdown
from spheret.lab.plan import Plan
from spheret.lab.rows import Key, Row
from spheret.lab.sections.study import sections_of

FIGURE_NAME = re.compile(r".+-(answer|bowls|pairs|collapse|ladder|transfer)\.(svg|png)")


def study_report(plan: Plan, rows: Mapping[Key, Row], out: Path) -> Path:
    """Write the page, the tables and the figures of a study. Returns the path of the page."""
    refuse_other_files(out, FIGURE_NAME)
    answers = group_answers(plan, rows)
    climbs = ladders(answers)
    sections = sections_of(answers, climbs, rows, endpoint_answers(plan.endpoints, answers))
    files = contents(plan.title, sections, draw(answers, climbs))
    return write_files(out, files, FIGURE_NAME)


def result_files(plan: Plan, rows: Mapping[Key, Row]) -> dict[str, bytes]:
    """The figures and the tables of a study for its documents, by file name. results.jsonl has every run."""
    answers = group_answers(plan, rows)
    climbs = ladders(answers)
    sections = sections_of(answers, climbs, rows, endpoint_answers(plan.endpoints, answers))
    tables = [table for section in sections for table in section.tables]
    return {
        "tables.md": to_markdown(table for table in tables if table.name != "runs").encode(),
        **{f"{drawing.name}.svg": drawing.svg.encode() for drawing in draw(answers, climbs)},
    }
