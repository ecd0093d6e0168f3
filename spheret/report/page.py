"""A report as one self-contained page: no script, no network, light and dark, every string of a run escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from spheret.report.drawing import GRID, INK, PALETTE, Drawing
from spheret.report.sections import Section
from spheret.report.tables import to_html

# colours of a figure by the name of the variable that stands for them: (on white, on black)
_VARIABLES = {
    "ink": (INK, "#e6e6e6"),
    "grid": (GRID, "#3a3f47"),
    "paper": ("#ffffff", "#15181c"),
    **{f"line-{index}": pair for index, pair in enumerate(PALETTE)},
}
_CSS = """
:root { color-scheme: light dark; %(light)s --muted: #555; --stripe: #f4f5f7; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { %(dark)s --muted: #a5abb3; --stripe: #1e2228; --link: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; } a { color: var(--link); }
nav a { margin-right: 1rem; }
.scroll { overflow-x: auto; margin: 1rem 0 .5rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th[scope=row], th:first-child, .text { text-align: left; } th[scope=row] { font-weight: 500; }
td.long { white-space: normal; min-width: 60rem; }
thead th { border-bottom: 2px solid var(--ink); } tbody tr:nth-child(even) { background: var(--stripe); }
td[data-source] { cursor: help; } u { text-underline-offset: .2em; }
.notes { color: var(--muted); font-size: .85rem; padding-left: 1.1rem; max-width: 60rem; margin: 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 33rem), 1fr)); gap: 1.5rem; }
figure { margin: 1rem 0 0; min-width: 0; } figcaption { font-size: .85rem; color: var(--muted); }
figure svg { width: 100%%; min-width: 21rem; max-width: 42rem; height: auto; display: block; }
summary { cursor: pointer; font-size: 1.25rem; font-weight: 600; margin-top: 2.5rem; }
@media print { details { display: block; } body { max-width: none; } }
"""


def _style() -> str:
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in _VARIABLES.items()) for i in (0, 1))
    return _CSS % {"light": light, "dark": dark}


def inline_svg(drawing: Drawing) -> str:
    """The figure for the page: its colours are the page's variables, its ids its own."""
    svg = drawing.svg
    colours = {pair[0]: f"var(--{name})" for name, pair in _VARIABLES.items()}

    def recolour(found: re.Match[str]) -> str:
        return re.sub(r"#[0-9a-f]{6}\b", lambda c: colours.get(c.group(), c.group()), found.group())

    svg = re.sub(r'\bstyle="[^"]*"', recolour, svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{drawing.name}-", svg)
    label = html.escape(drawing.caption)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{label}"', svg, count=1)


def _figures(drawings: Sequence[Drawing]) -> str:
    figures = "".join(
        f'<figure id="figure-{d.name}"><div class="scroll" tabindex="0">{inline_svg(d)}</div>'
        f"<figcaption>{html.escape(d.caption)}</figcaption></figure>"
        for d in drawings
    )
    return f'<div class="figures">{figures}</div>' if figures else ""


def _section(section: Section, drawings: Mapping[str, Drawing]) -> str:
    title = html.escape(section.title)
    inside = "".join(f"<p>{html.escape(text)}</p>" for text in section.paragraphs)
    inside += "".join(map(to_html, section.tables))
    inside += _figures([drawings[name] for name in section.figures if name in drawings])
    name = html.escape(section.name)
    if section.folded:
        return f'<section id="{name}"><details><summary>{title}</summary>{inside}</details></section>'
    return f'<section id="{name}"><h2>{title}</h2>{inside}</section>'


def page(title: str, sections: Sequence[Section], drawings: Sequence[Drawing]) -> str:
    """The whole of report.html. Its policy allows inline style and data images, and forbids all else."""
    by_name = {drawing.name: drawing for drawing in drawings}
    links = "".join(f'<a href="#{html.escape(s.name)}">{html.escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(section, by_name) for section in sections)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{_style()}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""
