"""The page of a watched training, written while it goes on, and a summary for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from spheret.lab.figures.svg import draw_chart
from spheret.lab.figures.watched import curves, draw
from spheret.lab.page.page import is_page, page
from spheret.lab.sections.watched import headline, watched_sections
from spheret.lab.watch_file import WATCH, Watched, in_order
from spheret.support.files import check_output_file, write_atomically
from spheret.watching.observations import Header, Observation

# a notebook shows so many alarms
LAST = 5


def watched_page(header: Header, observations: Sequence[Observation], refresh: int | None = None) -> str:
    """The page of a training, one offline HTML file.

    refresh: after so many seconds a browser reads the page again; None once the training has ended.
    """
    watched = Watched(WATCH, header, in_order(observations))
    drawings, charts = draw(watched)
    return page(header.model, watched_sections(watched), drawings, charts, alone=True, refresh=refresh)


def write_page(
    path: str | Path, header: Header, observations: Sequence[Observation], refresh: int | None = None
) -> None:
    """Write the page in one step, in the place of an earlier one. Any other file there is an error."""
    path = Path(path).expanduser()
    check_output_file("the page", path, is_page)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, watched_page(header, observations, refresh).encode())


def summary_html(header: Header, observations: Sequence[Observation]) -> str:
    """What a notebook shows: the headline, the loss, and the last alarms and warnings."""
    watched = Watched(WATCH, header, in_order(observations))
    parts = [Markup("<p><b>{}</b><br>{}</p>").format(headline(watched), header.model)]
    loss = curves(watched).get("loss")
    if loss is not None:
        # a notebook may be light or dark, and the colours are for white paper
        paper = Markup('<div style="background: #ffffff; display: inline-block; padding: 4px">{}</div>')
        parts.append(paper.format(Markup(draw_chart("loss", *loss).svg)))
    if watched.events:
        row = Markup("<tr><td>{:,}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>")
        rows = [row.format(each.step, each.kind, each.where, each.sentence, each.remedy) for each in watched.events]
        head = Markup("<tr><th>step</th><th>what</th><th>where</th><th>what was seen</th><th>what helps</th></tr>")
        parts.append(Markup("<table>{}{}</table>").format(head, Markup("").join(rows[-LAST:])))
    return str(Markup("<div>{}</div>").format(Markup("\n").join(parts)))
