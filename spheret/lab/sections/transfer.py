"""The section on transfer: the best learning rate at every size, and what keeping that of the first costs."""

from __future__ import annotations

import math

from spheret.lab.entries import sound
from spheret.lab.figures.parts import slug
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.sections.section import Section
from spheret.lab.transfer import BestRate, RateBySize, Transfer, tries_at


def transfer_sentences(transfer: Transfer) -> list[str]:
    """What is known of every contestant, a sentence each."""
    key, first, last = transfer.key, transfer.sizes[0], transfer.sizes[-1]
    sentences = []
    for contestant in transfer.contestants:
        words = []
        if contestant.power is not None:
            left_out = [
                f"{size:g}" for size, each in zip(transfer.sizes, contestant.rates, strict=True) if not each.vertex
            ]
            without = f" (without {key} {', '.join(left_out)})" if left_out else ""
            words.append(f"the best rate goes as {key} to the power {contestant.power:+.2f}{without}")
        largest = contestant.rates[-1]
        if largest.cost is not None:
            cost = "fails" if largest.cost == math.inf else f"costs {largest.cost:.3f} nats per token"
            words.append(f"keeping the best rate of {key} {first:g} {cost} at {key} {last:g}")
        losses = [each.entry.search.losses[each.rate] for each in (contestant.rates[0], largest) if each.rate]
        if len(losses) == 2:
            words.append(
                f"its lowest loss is {losses[0]:.3f} at {key} {first:g} and {losses[1]:.3f} at {key} {last:g}"
            )
        sentences.append(f"{contestant.label}: {'; '.join(words) or 'not run at all sizes'}.")
    return sentences


def transfer_section(transfer: Transfer, first: bool) -> Section:
    """The sentences, the picture and the table of one part."""
    names = [f"{transfer.key} {size:g}" for size in transfer.sizes]
    columns = [
        "contestant",
        *(f"best rate, {name}" for name in names),
        "power",
        *(f"cost of keeping, {name}" for name in names[1:]),
    ]
    seeds = max((len(each.kept or ()) for contestant in transfer.contestants for each in contestant.rates), default=0)
    notes = [
        "The best rate is where a parabola through the best rate of the grid and its neighbours is lowest. It is the "
        "grid's own where a neighbour failed or is missing; such a size does not count for the power.",
        f"The power is that of {transfer.key} which the best rate follows, by least squares: 0 is transfer. It has "
        f"no interval, because it rests on a few sizes and {seeds or 'no'} seed{'s' * (seeds != 1)} per rate.",
        f"The cost is the loss at the best grid rate of {names[0]} minus the lowest loss of this size, and the same "
        "of every seed in brackets. The lowest was chosen on the same runs, so that noise alone makes a cost "
        "positive.",
    ]
    rows = [_row(transfer, contestant) for contestant in transfer.contestants]
    name = slug(transfer.part)
    table = Table(f"transfer-{name}", f"{transfer.title}: transfer", columns, rows, notes)
    title = f"The answer: {transfer.title}" if first else transfer.title
    return Section(
        f"transfer-{name}", title, transfer_sentences(transfer), [table], [f"{name}-transfer"], opening=first
    )


def _row(transfer: Transfer, contestant: RateBySize) -> list[TableCell]:
    power = TableCell("-")
    if contestant.power is not None:
        source = f"least squares of log(best rate) over log({transfer.key})"
        some = (
            ""
            if contestant.fitted == len(contestant.rates)
            else f" ({contestant.fitted} of {len(contestant.rates)} sizes)"
        )
        power = TableCell(f"{contestant.power:+.2f}{some}", contestant.power, source)
    return [
        TableCell(contestant.label),
        *(_rate_cell(found) for found in contestant.rates),
        power,
        *(_cost_cell(found, contestant.rates[0].rate or 0.0) for found in contestant.rates[1:]),
    ]


def _rate_cell(found: BestRate) -> TableCell:
    if found.rate is None:
        hopeless = found.entry.state == "hopeless"
        return TableCell("no loss at any rate" if hopeless else "not run", source=found.entry.reason)
    source = ", ".join(f"{row.run}.val_loss" for row in found.entry.tries)
    if found.vertex is None:
        edge = "" if found.entry.search.bracketed else " (an edge)"
        return TableCell(f"{found.rate:g}{edge}", found.rate, f"argmin({source})")
    return TableCell(f"{found.vertex:.2g}", found.vertex, f"lowest point of a parabola through {source}")


def _cost_cell(found: BestRate, base: float) -> TableCell:
    if found.cost is None:
        return TableCell("not run")
    if found.kept is None:
        failed = [row for row in tries_at(found.entry, base) if not sound(row)]
        return TableCell("failed", source=", ".join(f"{row.run}.state" for row in failed))
    each = ", ".join(f"{cost:+.3f}" for cost in found.kept)
    source = ", ".join(f"{row.run}.val_loss" for row in found.entry.tries)
    return TableCell(f"{found.cost:+.3f} ({each})", found.cost, f"loss at the kept rate minus the lowest of {source}")
