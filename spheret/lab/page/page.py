"""A report as one self-contained page: no request to the network, light and dark, whole without its scripts.

The page itself is page.html.jinja with the parts in page_parts.html.jinja. Autoescaping is on: a string from a run is
shown as text. The policy of the page allows the scripts below by their hashes, and no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from spheret.lab.page.charts import Chart
from spheret.lab.page.tables import BEST, SECOND
from spheret.lab.sections.section import Section
from spheret.support.figure_style import PALETTE, THEMES, Drawing
from spheret.support.templates import environment, script_hashes

FOLDER = Path(__file__).parent
TEMPLATE = "page.html.jinja"
STYLE, SCRIPT, CHART_SCRIPT = "report.css", "report.js", "report_charts.js"
CHART_LIBRARY, CHART_STYLE = "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"
# by which a page is known as ours
GENERATOR = '<meta name="generator" content="spheret report">'


def inline_svg(drawing: Drawing) -> str:
    """The figure as part of the page. Its colours become variables of the page, and its ids become unique."""
    svg = drawing.svg
    variables = {light: f"var(--{name})" for name, (light, _) in THEMES.items()}

    def recolour(style: re.Match[str]) -> str:
        return re.sub(r"#[0-9a-f]{6}\b", lambda colour: variables.get(colour.group(), colour.group()), style.group())

    svg = re.sub(r'\bstyle="[^"]*"', recolour, svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{drawing.name}-", svg)
    # matplotlib names an image by its content, so that two constant heat maps have one name. Nothing refers to them
    numbers = count(1)
    svg = re.sub(r'(<image\b[^>]*\bid="[^"]*)"', lambda image: f'{image[1]}-{next(numbers)}"', svg)
    label = f'role="img" aria-label="{escape(drawing.caption)}"'
    # as wide as it was drawn: letters of a narrow figure would grow with it
    return re.sub(
        r'width="(?P<points>[\d.]+)pt" height="[\d.]+pt"',
        lambda size: f'style="--wide: {float(size["points"]) / 72:g}in" {label}',
        svg,
        count=1,
    )


class LineKey(NamedTuple):
    """The line of a contestant, as it stands beside its name: a number of the palette, and dashes of SVG."""

    colour: int
    dashes: str


def _key(colour: str, dash: Any) -> LineKey:
    index = [light for light, _ in PALETTE].index(colour)
    return LineKey(index, "" if dash == "-" else " ".join(f"{length:g}" for length in dash[1]))


@cache
def _source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """A sentence in which commands between backticks are set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def _templates() -> Environment:
    templates = environment(FOLDER)
    templates.filters["code"] = _code
    return templates


def is_page(content: bytes) -> bool:
    """Whether a file is a page of ours."""
    return GENERATOR.encode() in content[:1000]


def page(
    title: str,
    sections: Sequence[Section],
    drawings: Sequence[Drawing],
    charts: Mapping[str, Chart] | None = None,
    styles: Mapping[str, tuple[str, Any]] | None = None,
    alone: bool = False,
    refresh: int | None = None,
) -> str:
    """The whole of report.html.

    charts: the numbers behind interactive figures, by the name of the figure. styles: the line of each contestant.
    alone: whether no figures lie beside the page as files. refresh: after so many seconds a browser reads it again.
    """
    inline = {drawing.name: replace(drawing, svg=Markup(inline_svg(drawing))) for drawing in drawings}
    alive = {name: chart for name, chart in (charts or {}).items() if name in inline}
    scripts = [*([CHART_LIBRARY, CHART_SCRIPT] if alive else []), SCRIPT]
    values = {
        "title": title,
        "sections": sections,
        "figures": {s.name: [inline[name] for name in s.figures if name in inline] for s in sections},
        "charts": alive,
        "charts_json": htmlsafe_json_dumps(alive, separators=(",", ":")),
        "keys": {label: _key(*style) for label, style in (styles or {}).items()},
        "colours": THEMES,
        "style": Markup("".join(map(_source, [*([CHART_STYLE] if alive else []), STYLE]))),
        "scripts": [Markup(_source(name)) for name in scripts],
        "script_hashes": script_hashes([_source(name) for name in scripts]),
        "generator": Markup(GENERATOR),
        "alone": alone,
        "refresh": refresh,
        "BEST": BEST,
        "SECOND": SECOND,
    }
    return _templates().get_template(TEMPLATE).render(values)
