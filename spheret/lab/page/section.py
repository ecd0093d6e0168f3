"""What the sections of a page are made of: paragraphs, tables, which can be written as Markdown, and charts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spheret.support.charts import Chart

# ranks of a number in its column; as in the paper, the best is bold and the second best underlined
BEST, SECOND = 1, 2


@dataclass(frozen=True)
class TableCell:
    """The text that is shown, the unrounded number, and the source of the number."""

    text: str
    value: float | None = None
    source: str = ""
    rank: int = 0


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


def ranked(table: Table, columns: Iterable[str], excluded: Iterable[str] = ()) -> Table:
    """The same table with the best and second-best number of these columns marked.

    Numbers that are equal after rounding are tied. Rows named in `excluded` get no rank.
    """
    rows = [list(row) for row in table.rows]
    excluded_names = set(excluded)
    for index in (list(table.columns).index(column) for column in columns):
        candidates = [row for row in rows if row[0].text not in excluded_names and row[index].value is not None]
        rounded = {id(row): _leading_number(row[index].text) for row in candidates}
        best_two = sorted({number for number in rounded.values() if not math.isnan(number)})[:2]
        for row in candidates:
            if rounded[id(row)] in best_two and len(candidates) > 1:
                row[index] = replace(row[index], rank=BEST + best_two.index(rounded[id(row)]))
    return replace(table, rows=rows)


def _leading_number(text: str) -> float:
    match = re.match(r"-?\d[\d,]*\.?\d*", text.replace("\u2212", "-"))
    return float(match.group().replace(",", "")) if match else math.nan


def _markdown_cell(cell: TableCell) -> str:
    return {BEST: "**%s**", SECOND: "<u>%s</u>"}.get(cell.rank, "%s") % _escape_markdown(cell.text)


def _escape_markdown(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def to_markdown(tables: Iterable[Table]) -> str:
    parts = []
    for table in tables:
        head = "| " + " | ".join(map(_escape_markdown, table.columns)) + " |"
        line = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|"
        body = ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in table.rows]
        notes = [f"- {_escape_markdown(note)}" for note in table.notes]
        title = f"## {_escape_markdown(table.caption)}"
        parts.append("\n".join([title, "", head, line, *body, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"
