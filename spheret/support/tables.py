"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
