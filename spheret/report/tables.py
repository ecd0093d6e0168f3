"""One table, four ways to write it: Markdown, LaTeX, HTML, and CSV with the source of every number."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

# what a rank looks like, as in the paper: the best bold, the second underlined
BEST, SECOND = 1, 2


@dataclass(frozen=True)
class Cell:
    """What is shown, the number behind it in full, and where that came from."""

    text: str
    value: float | None = None
    source: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """Named columns and rows of cells; the first cell of a row is its name."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default_factory=tuple)


def ranked(table: Table, columns: Iterable[str], excluded: Iterable[str] = (), largest: bool = False) -> Table:
    """The same table with the best and second-best number of each column marked; what is printed alike ties."""
    rows = [list(row) for row in table.rows]
    out = set(excluded)
    for index in (list(table.columns).index(column) for column in columns):
        entrants = [row for row in rows if row[0].text not in out and row[index].value is not None]
        printed = {id(row): _leading_number(row[index].text) for row in entrants}
        order = sorted({number for number in printed.values() if not math.isnan(number)}, reverse=largest)[:2]
        for row in entrants:
            if printed[id(row)] in order and len(entrants) > 1:
                row[index] = replace(row[index], rank=BEST + order.index(printed[id(row)]))
    return replace(table, rows=rows)


def _leading_number(text: str) -> float:
    found = re.match(r"-?\d[\d,]*\.?\d*", text.replace("\u2212", "-"))
    return float(found.group().replace(",", "")) if found else math.nan


def _styled(cell: Cell, escape: Callable[[str], str], best: str, second: str) -> str:
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


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\u00b1": r"$\pm$", "\u2212": r"$-$", "|": r"\textbar{}",
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def to_latex(tables: Iterable[Table]) -> str:
    """For \\usepackage{booktabs}."""
    parts = []
    for table in tables:
        body = [
            " & ".join(_styled(c, _escape_latex, r"\textbf{%s}", r"\underline{%s}") for c in row) + r" \\"
            for row in table.rows
        ]
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{_escape_latex(' '.join([table.caption + '.', *table.notes]))}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            " & ".join(map(_escape_latex, table.columns)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def to_html(table: Table) -> str:
    """A number's source is in `data-source`, and shown when pointed at."""
    words = [all(row[i].value is None for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_kind(word, column)}>{html.escape(column)}</th>'
        for column, word in zip(table.columns, words, strict=True)
    )
    rows = []
    for row in table.rows:
        cells = [f'<th scope="row">{html.escape(row[0].text)}</th>']
        for cell, word in zip(row[1:], words[1:], strict=True):
            source = html.escape(cell.source)
            where = f' data-source="{source}" title="{source}"' if source else ""
            text = _styled(cell, html.escape, "<b>%s</b>", "<u>%s</u>")
            cells.append(f"<td{_kind(word, cell.text)}{where}>{text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="scroll" tabindex="0"><table id="table-{html.escape(table.name)}">'
        f"<caption>{html.escape(table.caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>" + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _kind(word: bool, text: str) -> str:
    """Words stand left and long ones wrap, numbers stand right."""
    return "" if not word else ' class="text long"' if len(text) > 60 else ' class="text"'


def to_csv(tables: Iterable[Table]) -> str:
    """A line a cell: table, row, column, what is shown, the number in full, and its source."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "row", "column", "text", "value", "source"])
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns[1:], row[1:], strict=True):
                value = "" if cell.value is None else repr(cell.value)
                writer.writerow([table.name, row[0].text, column, cell.text, value, cell.source])
    return out.getvalue()
