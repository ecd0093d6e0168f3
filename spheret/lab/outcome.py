"""What a race, a study or a report has found, for the terminal: a table per group, then the verdicts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry
from spheret.lab.words import answer_sentence, p_words, short_reason
from spheret.support.tables import print_whole

if TYPE_CHECKING:
    from rich.table import Table

# tables of a large study are for its page
MOST_TABLES = 3


def print_outcome(answers: Sequence[GroupAnswer], page: Path, quiet: bool = False) -> None:
    """Print the tables, the path of the page, and last the verdict. quiet: only the path."""
    from rich.console import Console

    if quiet:
        print(page)
        return
    begun = [answer for answer in answers if answer.rows]
    console = Console()
    for answer in begun if len(begun) <= MOST_TABLES else ():
        print_whole(console, _table(answer))
    print(page)
    for answer in begun:
        name = f"{answer.group.title}. " if len(begun) > 1 else ""
        console.print(name + answer_sentence(answer), highlight=False, soft_wrap=True, markup=False)
    sys.stdout.flush()


def _table(answer: GroupAnswer) -> Table:
    from rich.table import Table

    table = Table(title=answer.group.title, title_justify="left")
    for column in ("", "contestant", "lr", "val loss", f"minus {answer.reference}", "p", "state", "ms per step"):
        table.add_column(column, justify="left" if column in ("contestant", "state") else "right")
    for place, entry in enumerate(answer.entries, start=1):
        table.add_row(str(place), *_cells(answer, entry))
    for name, loss in answer.ngrams.items():
        table.add_row("", name, "-", f"{loss:.3f}", "-", "-", "counts the same tokens", "-")
    return table


def _cells(answer: GroupAnswer, entry: Entry) -> list[str]:
    gap, mean = answer.gap(entry.label, answer.reference), answer.means.get(entry.label, entry.mean)
    return [
        entry.label,
        "-" if entry.rate is None else f"{entry.rate:g}",
        f"{mean:.3f}" if mean < float("inf") else "-",
        "-" if gap is None else f"{gap.estimate:+.3f}",
        "-" if gap is None else p_words(gap.adjusted).removeprefix("p ").removeprefix("= "),
        "compared" if entry.label in answer.means else short_reason(answer, entry),
        "-" if entry.step_seconds is None else f"{1000 * entry.step_seconds:.1f}",
    ]
