"""A report as one self-contained page: no script, no request to the network, light and dark.

The page itself is the template page.html.jinja. Autoescaping is on: a string from a run is shown as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from spheret.report.figure_style import GRID, INK, PALETTE, Drawing
from spheret.report.sections import Section
from spheret.report.tables import BEST, SECOND

TEMPLATE = "page.html.jinja"
# colours that figures and page share, by the name of their CSS variable: (on white, on black)
_COLOURS = {
    "ink": (INK, "#e6e6e6"),
    "grid": (GRID, "#3a3f47"),
    "paper": ("#ffffff", "#15181c"),
    **{f"line-{index}": pair for index, pair in enumerate(PALETTE)},
}


def inline_svg(drawing: Drawing) -> str:
    """The figure as part of the page. Its colours become variables of the page, and its ids become unique."""
    svg = drawing.svg
    variables = {light: f"var(--{name})" for name, (light, _) in _COLOURS.items()}

    def recolour(style: re.Match[str]) -> str:
        return re.sub(r"#[0-9a-f]{6}\b", lambda colour: variables.get(colour.group(), colour.group()), style.group())

    svg = re.sub(r'\bstyle="[^"]*"', recolour, svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{drawing.name}-", svg)
    label = f'role="img" aria-label="{escape(drawing.caption)}"'
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', label, svg, count=1)


def page(title: str, sections: Sequence[Section], drawings: Sequence[Drawing]) -> str:
    """The whole of report.html."""
    inline = {drawing.name: replace(drawing, svg=Markup(inline_svg(drawing))) for drawing in drawings}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        sections=sections,
        figures={section.name: [inline[name] for name in section.figures if name in inline] for section in sections},
        colours=_COLOURS,
        BEST=BEST,
        SECOND=SECOND,
    )
