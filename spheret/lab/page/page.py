"""A report as one self-contained page: no request to the network, light and dark, whole without its scripts.

The page itself is page.html.jinja with the parts in page_parts.html.jinja. Autoescaping is on: a string from a run is
shown as text. The policy of the page allows the scripts below by their hashes, and no other.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from spheret.lab.page.section import Section
from spheret.support.charts import PALETTE, THEMES, Chart, Drawing

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
    label = f'role="img" aria-label="{escape(drawing.caption)}"'
    # as wide as it was drawn: letters of a narrow figure would grow with it
    return re.sub(
        r'width="(?P<points>[\d.]+)pt" height="[\d.]+pt"',
        lambda size: f'style="--wide: {float(size["points"]) / 72:g}in" {label}',
        svg,
        count=1,
    )


def _key(colour: str, dash: Any) -> dict[str, Any]:
    """The line of a contestant, as it stands beside its name: a number of the palette, and dashes of SVG."""
    index = [light for light, _ in PALETTE].index(colour)
    return {"colour": index, "dashes": "" if dash == "-" else " ".join(f"{length:g}" for length in dash[1])}


@cache
def _source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """A sentence in which commands between backticks are set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def _templates() -> Environment:
    """The templates of this folder. A name that a template asks for and does not get is an error."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["code"] = _code
    return templates


def _allowed(script: str) -> str:
    """The hash by which the policy of a page allows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def is_page(content: bytes) -> bool:
    """Whether a file is a page of ours."""
    return GENERATOR.encode() in content[:1000]


def payload(chart: Chart) -> dict[str, Any] | None:
    """The numbers that report_charts.js draws; None for several panels and for rows, whose drawing is shown.

    A loss has the digits of the tables, so what a reader finds on a curve is what a table shows.
    xs: every list of places, each once. series: one per name, with its lines. range: of y at first.
    """
    (panel, *others), colours = chart.panels, {light: index for index, (light, _) in enumerate(PALETTE)}
    if others or panel.rows:
        return None
    xs, series = list[list[float]](), dict[str, dict[str, Any]]()
    for line in panel.lines:
        places = [float(f"{place:.5g}") for place in line.x]
        if places not in xs:
            xs.append(places)
        columns = {"y": line.y, "low": line.low, "high": line.high}
        numbers = {"x": xs.index(places), **{name: _rounded(values) for name, values in columns.items() if values}}
        colour, dash = line.style
        look = {"colour": colours[colour], "dash": [] if dash == "-" else list(dash[1]), "diverged": line.failed}
        series.setdefault(line.label, {"label": line.label, **look, "lines": []})["lines"].append(numbers)
    return {
        "x": panel.x, "y": panel.y, "log": panel.log, "digits": 3, "window": chart.window, "xs": xs,
        "series": list(series.values()), "range": panel.limits and [round(limit, 4) for limit in panel.limits],
        "marks": [{"x": mark.x, "text": mark.text, "colour": mark.colour} for mark in panel.marks],
    }  # fmt: skip


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}") for value in values]


def page(
    title: str,
    sections: Sequence[Section],
    drawings: Sequence[Drawing] = (),
    styles: Mapping[str, tuple[str, Any]] | None = None,
    refresh: int | None = None,
) -> str:
    """The whole of report.html.

    drawings: of the charts, if they lie beside the page as files; without them the page shows what scripts can draw.
    styles: the line of each contestant. refresh: after so many seconds a browser reads the page again.
    """
    charts = [chart for section in sections for chart in section.charts]
    inline = {drawing.name: Markup(inline_svg(drawing)) for drawing in drawings}
    numbers = {chart.name: payload(chart) for chart in charts}
    # with a drawing beside it, a single point needs no script
    alive = {
        name: data for name, data in numbers.items() if data and (name not in inline or max(map(len, data["xs"])) > 1)
    }
    figures = {
        chart.name: {
            "name": chart.name,
            "caption": chart.caption,
            # empty if only scripts show it
            "svg": inline.get(chart.name, Markup()),
            "alive": chart.name in alive,
        }
        for chart in charts
        if chart.name in inline or chart.name in alive
    }
    scripts = [*([CHART_LIBRARY, CHART_SCRIPT] if alive else []), SCRIPT]
    values = {
        "title": title,
        "sections": sections,
        "figures": {s.name: [figures[c.name] for c in s.charts if c.name in figures] for s in sections},
        "charts": alive,
        "charts_json": htmlsafe_json_dumps(alive, separators=(",", ":")),
        "keys": {label: _key(*style) for label, style in (styles or {}).items()},
        "colours": THEMES,
        "style": Markup("".join(map(_source, [*([CHART_STYLE] if alive else []), STYLE]))),
        "scripts": [Markup(_source(name)) for name in scripts],
        "script_hashes": Markup(" ".join(_allowed(_source(name)) for name in scripts)),
        "generator": Markup(GENERATOR),
        "refresh": refresh,
    }
    return _templates().get_template(TEMPLATE).render(values)
