"""What every section is made of: paragraphs, tables, quotes and names of figures. page.html.jinja shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import SourcedNumber
from spheret.lab.statistics import mean_and_deviation


@dataclass(frozen=True)
class Quote:
    """A text that is shown as it stands, under a name. source: where it is from."""

    name: str
    text: str
    source: str


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, figures and quotes.

    A folded section is closed until the reader opens it. An opening section is a first screen: its paragraphs are
    set large, and its figure and its table stand side by side.
    """

    name: str
    title: str
    paragraphs: Sequence[str] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)
    figures: Sequence[str] = field(default_factory=tuple)
    quotes: Sequence[Quote] = field(default_factory=tuple)
    folded: bool = False
    opening: bool = False


def format_loss(value: float) -> str:
    return f"{value:.3f}"


def format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def perplexity(loss: SourcedNumber | None) -> SourcedNumber | None:
    """exp(loss), or None if there is no loss or the result would overflow a float."""
    if loss is None or loss.value > 700:
        return None
    return SourcedNumber(math.exp(loss.value), f"exp({loss.source})")


def number_cell(
    numbers: Sequence[SourcedNumber | None], format_number: Callable[[float], str], missing: str = "-"
) -> TableCell:
    """A cell from one number per seed: the number itself, or the mean and standard deviation of several.

    The cell shows `missing` if a number is missing.
    """
    present = [number for number in numbers if number is not None]
    if not present or len(present) < len(numbers):
        return TableCell(missing)
    if len(present) == 1:
        return TableCell(format_number(present[0].value), present[0].value, present[0].source)
    mean, deviation = mean_and_deviation([number.value for number in present])
    sources = ", ".join(number.source for number in present)
    text = f"{format_number(mean)} \u00b1 {format_number(deviation)}"
    return TableCell(text, mean, f"mean({sources}) \u00b1 sd({sources})")
