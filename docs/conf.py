"""The site of these pages. `make docs` builds it; CONTRIBUTING.md says how to extend it.

The pages are plain Markdown, to be read without the site too. Their source directory is the root of the repository,
so that a relative link means the same on the site as beside the files. Two pages get more on the site than their
text: the sections of docs/index.md become the navigation, and the names in docs/api.md get their docstrings.
"""

import inspect
import pkgutil
import re

from sphinx.application import Sphinx

import spheret
from spheret.report.explore import explorer_page

project = "spheret"
version = release = spheret.__version__
copyright = "the authors of spheret, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "dist", "runs", "spheret", "tests", "benchmarks"]

# as on GitHub: headings have anchors, and a code block without a language is plain text
myst_heading_anchors = 4
highlight_language = "text"
# furo's own style shows removed and added lines of a diff alike
pygments_style, pygments_dark_style = "default", "github-dark"

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
html_theme_options = {"navigation_with_keys": True}

SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"^- \[[^\]]+\]\(([^)]+)\.md\)", re.MULTILINE)
NAME = re.compile(r"^- `([\w.]+)`: (.+)", re.MULTILINE)
EXPLORER = re.compile(r"^!\[.*\]\(figures/explorer\.png\)$", re.MULTILINE)


def navigation(page: str) -> str:
    """A tree of contents for every section of a page that lists pages."""
    trees = ((title, PAGE.findall(body)) for title, body in SECTION.findall(page))
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


def extend(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == "docs/index":
        source[0] += navigation(source[0])
    if docname == "docs/api":
        source[0] = reference(source[0])
    # beside the files there is no explorer to open
    link = '<p><a href="explorer-page.html">Open the explorer</a></p>'
    source[0] = EXPLORER.sub(rf"\g<0>\n\n{link}", source[0])


def add_files(app: Sphinx, error: Exception | None) -> None:
    """Write what is no page: the explorer, and a first page that leads to the index."""
    if error is None:
        (app.outdir / "docs" / "explorer-page.html").write_bytes(explorer_page())
        (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app: Sphinx) -> None:
    app.connect("source-read", extend)
    app.connect("build-finished", add_files)
