"""Tables, and how to write them as Markdown, as LaTeX, and as CSV with the source of every number."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from spheret.support.latex import escape_latex

# ranks of a number in its column; as in the paper, the best is bold and the second best underlined
BEST, SECOND = 1, 2


@dataclass(frozen=True)
class TableCell:
    """The text that is shown, the unrounded number, and the source of the number. href: where the text leads."""

    text: str
    value: float | None = None
    source: str = ""
    rank: int = 0
    href: str = ""


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


def ranked(table: Table, columns: Iterable[str], excluded: Iterable[str] = (), largest: bool = False) -> Table:
    """The same table with the best and second-best number of these columns marked.

    Numbers that are equal after rounding are tied. Rows named in `excluded` get no rank.
    """
    rows = [list(row) for row in table.rows]
    excluded_names = set(excluded)
    for index in (list(table.columns).index(column) for column in columns):
        candidates = [row for row in rows if row[0].text not in excluded_names and row[index].value is not None]
        rounded = {id(row): _leading_number(row[index].text) for row in candidates}
        best_two = sorted({number for number in rounded.values() if not math.isnan(number)}, reverse=largest)[:2]
        for row in candidates:
            if rounded[id(row)] in best_two and len(candidates) > 1:
                row[index] = replace(row[index], rank=BEST + best_two.index(rounded[id(row)]))
    return replace(table, rows=rows)


def _leading_number(text: str) -> float:
    match = re.match(r"-?\d[\d,]*\.?\d*", text.replace("\u2212", "-"))
    return float(match.group().replace(",", "")) if match else math.nan


def _styled(cell: TableCell, escape: Callable[[str], str], best: str, second: str) -> str:
    text = escape(cell.text)
    return {BEST: best, SECOND: second}.get(cell.rank, "%s") % text


def _escape_markdown(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def to_markdown(tables: Iterable[Table]) -> str:
    parts = []
    for table in tables:
        head = "| " + " | ".join(map(_escape_markdown, table.columns)) + " |"
        line = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|"
        body = [
            "| " + " | ".join(_styled(c, _escape_markdown, "**%s**", "<u>%s</u>") for c in row) + " |"
            for row in table.rows
        ]
        notes = [f"- {_escape_markdown(note)}" for note in table.notes]
        title = f"## {_escape_markdown(table.caption)}"
        parts.append("\n".join([title, "", head, line, *body, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def to_latex(tables: Iterable[Table]) -> str:
    """LaTeX tables. They need \\usepackage{booktabs}."""
    parts = []
    for table in tables:
        body = [
            " & ".join(_styled(c, escape_latex, r"\textbf{%s}", r"\underline{%s}") for c in row) + r" \\"
            for row in table.rows
        ]
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{escape_latex(' '.join([table.caption + '.', *table.notes]))}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            " & ".join(map(escape_latex, table.columns)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


# a spreadsheet takes a cell that begins so for a formula
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
# unless it is a dash, a number, a number with its error, or an interval
_ONE = r"[-+]?[\d.,]+(?:e[-+]?\d+)?(?: ?%)?"
_NUMBERS = re.compile(rf"-|{_ONE}(?: (?:\u00b1|to) {_ONE})?", re.ASCII | re.IGNORECASE)


def _escape_csv(text: str) -> str:
    """A text that no spreadsheet computes: an apostrophe before what would be a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBERS.fullmatch(text) else text


CSV_COLUMNS = ("table", "row", "column", "text", "value", "source")


def to_csv(tables: Iterable[Table]) -> str:
    """One line per cell: table, row, column, the text that is shown, the unrounded number, and its source."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns[1:], row[1:], strict=True):
                value = "" if cell.value is None else repr(cell.value)
                texts = map(_escape_csv, (table.name, row[0].text, column, cell.text, cell.source))
                name, row_name, column_name, shown, source = texts
                writer.writerow([name, row_name, column_name, shown, value, source])
    return text.getvalue()
