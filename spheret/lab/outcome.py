"""What a race has shown, for the terminal: the contestants, best first, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.lab.runs import RunGroup
from spheret.lab.sections.answer import conclusion, ranking_table
from spheret.lab.verdicts import comparisons
from spheret.support.tables import print_whole


def print_outcome(groups: Sequence[RunGroup]) -> None:
    """Print the table and the sentence of a race, whose runs all have the same data and so are one group."""
    from rich.console import Console
    from rich.table import Table

    for group in groups:
        compared = comparisons(group)
        ranking = ranking_table(group, compared)
        name, *numbers = ranking.columns
        table = Table()
        for column in ("", name, *([] if group.bowls else ["lr"]), *numbers):
            table.add_column(column, justify="left" if column == name else "right", no_wrap=True)
        for place, (label, *cells) in enumerate(ranking.rows, start=1):
            # the table of the page leaves out a rate that all share
            rate = [] if group.bowls else [f"{group.contestants[label.text][0].rate:g}"]
            table.add_row(str(place), label.text, *rate, *(cell.text for cell in cells))
        console = Console()
        print_whole(console, table)
        console.print(conclusion(group, compared), highlight=False, soft_wrap=True, markup=False)
