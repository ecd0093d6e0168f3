"""Tables on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def terminal(otherwise: int = 140) -> Console:
    """The terminal, which COLUMNS makes narrower. A file has no width of its own, and is as wide as is said."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else otherwise, highlight=False)


def print_in_parts(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    first: int,
    left: Collection[str] = (),
) -> None:
    """Print a table as one or, if it is wider than the terminal, as several below each other. No cell is cut.

    first: how many columns name the row; every part begins with them. left: columns that hold words.
    """
    from rich.table import Table

    # a column has a space on both sides and a line behind it, the last one has no line
    widths = [3 + max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    names = list(range(first))
    parts: list[list[int]] = []
    for index in range(first, len(columns)):
        if not parts or sum(widths[i] for i in (*names, *parts[-1], index)) - 1 > console.width:
            parts.append([])
        parts[-1].append(index)
    console.print(title, markup=False)
    for part in parts:
        table = Table(show_edge=False)
        for index in (*names, *part):
            table.add_column(columns[index], justify="left" if columns[index] in left else "right")
        for row in rows:
            table.add_row(*(row[index] for index in (*names, *part)))
        print_whole(console, table)
        console.print()


def print_whole(console: Console, table: Table) -> None:
    """Print a table with every cell whole. Lines may run on beyond the width of the terminal."""
    before = console.width
    # wider than any table
    console.width = 10_000
    try:
        console.width = max(before, console.measure(table).maximum)
        console.print(table)
    finally:
        console.width = before
