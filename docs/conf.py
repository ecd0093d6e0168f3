"""The site of these pages. `make docs` builds it; CONTRIBUTING.md says how to extend it.

The pages are plain Markdown, to be read without the site too. Their source directory is the root of the repository,
so that a relative link means the same on the site as beside the files. Two pages get more on the site than their
text: the sections of docs/index.md become the navigation, and the names in docs/api.md get their docstrings.
A notebook is shown with the outputs that it holds. Nothing in it is run.
"""

import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import spheret

project = "spheret"
version = release = spheret.__version__
copyright = "the authors of spheret, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# a picture may have a class
myst_enable_extensions = ["attrs_inline"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["docs/**.md", "docs/**.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "dist", "runs", "spheret", "tests", "benchmarks"]

# as on GitHub: headings have anchors, and a code block without a language is plain text
myst_heading_anchors = 4
highlight_language = "text"
# furo's own style shows removed and added lines of a diff alike
pygments_style, pygments_dark_style = "default", "github-dark"

# the list of modules would hold three names
html_domain_indices = False

# docstrings are plain text with `names`; a name that the reference holds becomes a link
default_role = "py:obj"
autodoc_inherit_docstrings = False
add_module_names = False
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "spheret"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_theme_options = {"navigation_with_keys": True}

SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ENTRY, PAGE = re.compile(r"^- \[.*", re.MULTILINE), re.compile(r"\]\(([^)#]+)\.(?:md|ipynb)\)")
NAME = re.compile(r"^- `([\w.]+)`: (.+)", re.MULTILINE)
PICTURE = re.compile(r"!\[([^\]]*)\]\((\S+)\.png\)")
EXPLORER = re.compile(r"\[([^\]]+)\]\(static/explorer\.html\)")


def navigation(page: str) -> str:
    """A tree of contents for every section of a page that lists pages."""
    trees = ((title, PAGE.findall("\n".join(ENTRY.findall(body)))) for title, body in SECTION.findall(page))
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in trees
        if pages
    )


def directive(name: str, summary: str) -> str:
    """What shows the docstring of a name. A table has none: its summary and the names of its rows are shown."""
    found = pkgutil.resolve_name(name)
    if inspect.ismodule(found):
        return f".. py:module:: {name}"
    if inspect.isclass(found):
        return f".. autoclass:: {name}\n   :members:"
    if callable(found):
        return f".. autofunction:: {name}"
    rows = ", ".join(f"``{row}``" for row in found)
    return f".. py:data:: {name}\n\n   {summary}\n\n   {rows}"


def reference(page: str) -> str:
    """The page with the docstrings of the names that a section lists, after the section."""

    def extended(section: re.Match[str]) -> str:
        blocks = "\n\n".join(directive(name, summary) for name, summary in NAME.findall(section.group(2)))
        return section.group() + (f"\n```{{eval-rst}}\n{blocks}\n```\n\n" if blocks else "")

    return SECTION.sub(extended, page)


def block(text: str, language: str = "text") -> str:
    """A code block. Its fence is longer than any in the text."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def shown(output: dict[str, Any]) -> str:
    """An output of a cell: a picture if it has one, otherwise its text."""
    if "text" in output:
        return block("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        # it stays within the page
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        return f"![{alt}](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    return block("".join(data["text/plain"]))


def notebook_page(name: str, text: str) -> str:
    """A notebook as Markdown, with a link to the file behind its title."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else block(source, "python"))
        parts += [shown(output) for output in cell.get("outputs", [])]
    title, _, rest = parts[0].partition("\n")
    link = f"This page is a notebook: {{download}}`{name} <{name}>`."
    return "\n\n".join([title, link, rest.strip(), *parts[1:]]) + "\n"


def in_both_themes(page: str, folder: Path) -> str:
    """The page with the dark twin of every picture that has one. The theme shows one of the two."""

    def both(picture: re.Match[str]) -> str:
        if not (folder / f"{picture[2]}-dark.png").exists():
            return picture.group()
        return f"{picture.group()}{{.only-light}} ![{picture[1]}]({picture[2]}-dark.png){{.only-dark}}"

    return PICTURE.sub(both, page)


def extend(app: Sphinx, docname: str, source: list[str]) -> None:
    path = app.env.doc2path(docname)
    if path.suffix == ".ipynb":
        source[0] = notebook_page(path.name, source[0])
    if docname == "docs/index":
        source[0] += navigation(source[0])
    if docname == "docs/api":
        source[0] = reference(source[0])
    # the site has static/ in a different place, and would offer the page as a download
    link = r'<a href="../_static/explorer.html">\1</a>'
    source[0] = in_both_themes(EXPLORER.sub(link, source[0]), path.parent)


def add_first_page(app: Sphinx, error: Exception | None) -> None:
    """Write a first page that leads to the index."""
    if error is None:
        (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app: Sphinx) -> None:
    app.connect("source-read", extend)
    app.connect("build-finished", add_first_page)
