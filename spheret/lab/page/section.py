"""What the sections of a page are made of: paragraphs, tables, which can be written as Markdown, and charts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spheret.support.charts import Chart


@dataclass(frozen=True)
class TableCell:
    """The text that is shown, the unrounded number, and the source of the number."""

    text: str
    value: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Table:
    """Named columns and rows of cells. The first cell of a row is its name.

    A folded table is closed on the page until the reader opens it.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str] = field(default_factory=tuple)
    folded: bool = False

    @property
    def text_columns(self) -> list[bool]:
        """For each column, whether it holds text and no number."""
        return [all(row[i].value is None for row in self.rows) for i in range(len(self.columns))]

    @property
    def without_empty_columns(self) -> Table:
        """The same table without the columns that hold a dash in every row."""
        kept = [i for i in range(len(self.columns)) if not i or any(row[i].text != "-" for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and figures.

    A folded section is closed until the reader opens it. An opening section is a first screen: its paragraphs are
    set large, and its figure and its table stand side by side.
    """

    name: str
    title: str
    paragraphs: Sequence[str] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)
    charts: Sequence[Chart] = field(default_factory=tuple)
    folded: bool = False
    opening: bool = False

    def renamed(self, suffix: str, name: str) -> Section:
        """The same section of one of several groups: all its names end in the suffix."""

        def own(each: Any) -> Any:
            return replace(each, name=each.name + suffix, caption=f"{each.caption}: {name}")

        tables, charts = list(map(own, self.tables)), list(map(own, self.charts))
        return replace(self, name=self.name + suffix, title=f"{self.title}: {name}", tables=tables, charts=charts)


def _escape_markdown(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def to_markdown(tables: Iterable[Table]) -> str:
    parts = []
    for table in tables:
        head = "| " + " | ".join(map(_escape_markdown, table.columns)) + " |"
        line = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|"
        body = ["| " + " | ".join(_escape_markdown(cell.text) for cell in row) + " |" for row in table.rows]
        notes = [f"- {_escape_markdown(note)}" for note in table.notes]
        title = f"## {_escape_markdown(table.caption)}"
        parts.append("\n".join([title, "", head, line, *body, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"
