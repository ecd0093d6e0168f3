"""What rows say: who is compared, who wins, who failed. Race, study and report all ask here.

An answer is a pure function of a plan and the runs that have ended, or only of runs. Nothing is left out in silence:
a contestant that is not compared carries the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spheret.lab.entries import FEWEST_SEEDS, Entry, entry_of_plan
from spheret.lab.ngrams import NgramRecord
from spheret.lab.plan import Group, Plan
from spheret.lab.rows import FINISHED, Row
from spheret.lab.seed_table import Pair, SeedTable, pairs, seed_table, smallest_seen
from spheret.lab.stages import Rows

# the contestant that the others are measured against, where it is one
REFERENCE = "pre-ln"


@dataclass(frozen=True)
class Standing:
    """Who is ahead. leaders: the lowest loss, and those with no significant difference to it. behind: the others."""

    leaders: tuple[str, ...]
    behind: tuple[str, ...]

    @property
    def winner(self) -> str | None:
        """The contestant that is significantly better than every other; None if there is no such one."""
        return self.leaders[0] if len(self.leaders) == 1 and self.behind else None


@dataclass(frozen=True)
class GroupAnswer:
    """What is known about one group. entries: the compared ones first, the best before the others.

    reference: what the others are measured against. seed_table, seen: None if nothing can be compared yet.
    seen: the smallest difference that would have been seen. ngrams: the losses of n-gram models, by name.
    """

    group: Group
    reference: str
    entries: tuple[Entry, ...]
    seed_table: SeedTable | None
    pairs: dict[tuple[str, str], Pair]
    seen: float | None
    missing: int
    ngrams: Mapping[str, float]

    @cached_property
    def by_label(self) -> dict[str, Entry]:
        return {entry.label: entry for entry in self.entries}

    @property
    def means(self) -> Mapping[str, float]:
        """The mean losses of those that are compared."""
        return {} if self.seed_table is None else self.seed_table.means

    @property
    def compared(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.label in self.means]

    @property
    def others(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.label not in self.means]

    def gap(self, first: str, second: str) -> Pair | None:
        """The first loss minus the second; None if they are not compared."""
        if (first, second) in self.pairs:
            return self.pairs[first, second]
        return self.pairs[second, first].mirrored if (second, first) in self.pairs else None

    @cached_property
    def standing(self) -> Standing | None:
        """Who is ahead of the contestants that are compared; None if nothing can be compared yet."""
        if self.seed_table is None:
            return None
        best, *others = (entry.label for entry in self.compared)
        behind = [label for label in others if (gap := self.gap(best, label)) is not None and gap.significant]
        return Standing((best, *(label for label in others if label not in behind)), tuple(behind))

    @property
    def failures(self) -> dict[str, dict[str, list[float]]]:
        """The rates at which a run collapsed or diverged, by what happened and by contestant; without stress."""
        found: dict[str, dict[str, list[float]]] = {}
        for entry in self.entries:
            for row in sorted(entry.rows, key=lambda row: row.rate):
                if row.state != FINISHED:
                    rates = found.setdefault(row.state, {}).setdefault(entry.label, [])
                    rates += [] if row.rate in rates else [row.rate]
        return found

    @property
    def rows(self) -> list[Row]:
        """Every run of the group that the plan asks for and that has ended."""
        own = [row for entry in self.entries for row in entry.rows]
        stressed = [row for entry in self.entries for row in entry.stressed.values()]
        return [*own, *stressed]


def group_answers(plan: Plan, rows: Rows, ngrams: Iterable[NgramRecord] = ()) -> list[GroupAnswer]:
    """What is known about every group, in the order of the plan."""
    losses, answers = {record.group: record.losses for record in ngrams}, []
    for group in plan.groups:
        entries = [entry_of_plan(plan, group, each, rows) for each in group.contestants]
        answers.append(answer_of(group, entries, plan.reference, losses.get(group.name, {})))
    return answers


def answer_of(group: Group, entries: list[Entry], reference: str, ngrams: Mapping[str, float]) -> GroupAnswer:
    """What the entries of one group say. ngrams: the losses of n-gram models, by name."""
    entries, table = _compared(entries)
    reference = reference if any(e.label == reference for e in entries) else entries[0].label
    means = {} if table is None else table.means
    # sorting keeps the order of the plan where nothing else decides
    entries.sort(key=lambda entry: (means.get(entry.label, math.inf), entry.mean))
    return GroupAnswer(
        group=group,
        reference=reference,
        entries=tuple(entries),
        seed_table=table,
        pairs={} if table is None else {(pair.first, pair.second): pair for pair in pairs(table)},
        seen=None if table is None else smallest_seen(table),
        missing=sum(entry.missing for entry in entries),
        # a bigram first
        ngrams=dict(sorted(ngrams.items(), key=lambda each: -each[1])),
    )


def _compared(entries: list[Entry]) -> tuple[list[Entry], SeedTable | None]:
    """The table of those that can be compared, and all entries with the reason of those that cannot.

    The seeds are those that all have. Who is compared does not depend on whose loss is lower.
    """
    able = [entry for entry in entries if not entry.reason]
    while able and len(_common(able)) < FEWEST_SEEDS:
        able.remove(min(reversed(able), key=lambda entry: len(entry.finals)))
    labels = {entry.label for entry in able}
    alone = "nothing to compare it with yet" if len(able) == 1 else "it does not have the others' seeds yet"
    if len(able) < 2:
        labels = set()
    entries = [replace(e, reason=alone) if not e.reason and e.label not in labels else e for e in entries]
    if not labels:
        return entries, None
    return entries, seed_table({e.label: {seed: row.loss for seed, row in e.finals.items()} for e in able})


def _common(entries: Sequence[Entry]) -> set[int]:
    return set.intersection(*(set(entry.finals) for entry in entries))
