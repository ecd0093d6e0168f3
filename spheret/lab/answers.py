"""What rows say: who is compared, who wins, who failed. Race, study and report all ask here.

An answer is a pure function of a plan and the runs that have ended, or of runs alone. Nothing is left out in silence:
a contestant that is not compared carries the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from spheret.lab import curves
from spheret.lab.curves import Bowl
from spheret.lab.plan import Contestant, Group, Plan
from spheret.lab.rows import FINAL, FINISHED, FLOOR, STRESS, TUNE, Key, Row
from spheret.lab.seed_table import (
    Pair,
    SeedTable,
    dominant,
    noise_floor,
    paired_p,
    pairs,
    seed_table,
    smallest_seen,
)
from spheret.lab.stages import Rows, Tuning, final_rates, seeds_of, start_rates, stress_rate, tuning
from spheret.lab.statistics import Interval

# tuned: its best rate lies between two others. edge: it does not. hopeless: no rate gave a loss.
# tuning: some rates have not ended. waiting: the rung below is not tuned.
State = Literal["tuned", "edge", "hopeless", "tuning", "waiting"]
# an estimate of the noise needs so many seeds
FEWEST_SEEDS = 2
# the contestant that the others are measured against, where it is one
REFERENCE = "pre-ln"
# how many rates a contestant whose grid is not known yet will get at least
START = 3


@dataclass(frozen=True)
class Entry:
    """One contestant of a group: its search for a learning rate, and the seeds that it is compared on.

    These are fresh seeds at the best rate, or, if the part has no fresh ones, those of the search at that rate.

    rates: the rates of these seeds; a seed failed at all but the last, which counts.
    tries: the runs of the search. finals: the runs with the seeds that have ended, at the rate that counts.
    abandoned: the runs with fresh seeds at the higher rates.
    stressed: the runs at the part's multiple of the best rate that have ended, by seed.
    reason: why it is not compared; empty if it is.
    planned: how many seeds it is to be compared on.
    missing: runs that are still to come, by stage.
    """

    label: str
    scheme: str
    search: Tuning
    state: State
    bowl: Bowl | None
    tries: tuple[Row, ...]
    rates: tuple[float, ...]
    finals: dict[int, Row]
    abandoned: tuple[Row, ...]
    stressed: dict[int, Row]
    reason: str
    planned: int
    missing: dict[str, int]

    @property
    def rows(self) -> list[Row]:
        """Every run that has ended, each once, but for those under stress."""
        every = (*self.tries, *self.abandoned, *self.finals.values())
        return list({row.key: row for row in every}.values())

    @property
    def failed(self) -> list[Row]:
        """The seeds that give no loss to compare."""
        return [row for row in self.finals.values() if not sound(row)]

    @property
    def rate(self) -> float | None:
        """The rate that counts: that of the fresh seeds, or else the best one so far."""
        return self.rates[-1] if self.rates else self.search.best

    @property
    def step_down(self) -> str:
        """What happened at the higher rates; empty if the best one counts."""
        at = {rate: [row for row in self.abandoned if row.rate == rate] for rate in self.rates[:-1]}
        return "; ".join(f"at {rate:g} {failures(rows, self.planned)}" for rate, rows in at.items())

    @property
    def failure(self) -> str:
        """How many of the fresh seeds failed at the rate that counts; empty if none did."""
        return failures(list(self.finals.values()), self.planned, _where(self.rates))

    @property
    def stalled(self) -> str:
        """How many of the fresh seeds stalled at the rate that counts; empty if none did."""
        count = sum(row.stalled for row in self.finals.values())
        return f"stalled in {count} of {_seeds(len(self.finals), self.planned)}" if count else ""

    @property
    def mean(self) -> float:
        """The mean loss of the fresh seeds; infinity if one of them failed or none has ended."""
        if self.failed or not self.finals:
            return math.inf
        return math.fsum(row.loss for row in self.finals.values()) / len(self.finals)


@dataclass(frozen=True)
class NoiseFloor:
    """The noise floor: a contestant against itself. rows: its runs on other seeds. interval: None without both."""

    label: str
    interval: Interval | None
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Gap:
    """The loss of one contestant minus that of another. p is corrected for the number of pairs."""

    pair: Pair
    sign: int

    @property
    def estimate(self) -> float:
        return self.sign * self.pair.estimate

    @property
    def low(self) -> float:
        return self.pair.low if self.sign > 0 else -self.pair.high

    @property
    def high(self) -> float:
        return self.pair.high if self.sign > 0 else -self.pair.low

    @property
    def p(self) -> float:
        return self.pair.adjusted

    @property
    def significant(self) -> bool:
        return self.pair.verdict != "none"


@dataclass(frozen=True)
class Cost:
    """What a contestant costs, relative to another one, and its loss where all have spent the same.

    A loss at an equal budget is read from the curve of the run; None if the run was not evaluated so early.
    """

    label: str
    flops: float
    seconds: float | None
    loss: float
    at_equal_flops: float | None
    at_equal_seconds: float | None


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
    seen: the smallest difference that would have been seen.
    """

    group: Group
    reference: str
    entries: tuple[Entry, ...]
    seed_table: SeedTable | None
    pairs: dict[tuple[str, str], Pair]
    seen: float | None
    floor: NoiseFloor | None
    missing: dict[str, int]

    @cached_property
    def by_label(self) -> dict[str, Entry]:
        return {entry.label: entry for entry in self.entries}

    @property
    def compared(self) -> list[Entry]:
        return (
            []
            if self.seed_table is None
            else [entry for entry in self.entries if entry.label in self.seed_table.means]
        )

    @property
    def others(self) -> list[Entry]:
        return [
            entry for entry in self.entries if self.seed_table is None or entry.label not in self.seed_table.means
        ]

    def gap(self, first: str, second: str) -> Gap | None:
        """The loss of the first minus that of the second; None if they are not compared."""
        if (first, second) in self.pairs:
            return Gap(self.pairs[first, second], 1)
        return Gap(self.pairs[second, first], -1) if (second, first) in self.pairs else None

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

    @cached_property
    def dominant(self) -> tuple[str, float] | None:
        """The contestant that has half of the pooled noise or more, and its share; None if none has."""
        return None if self.seed_table is None else dominant(self.seed_table)

    def paired_p(self, first: str, second: str) -> float:
        """The p-value of a pair by paired tests, which pool no noise, corrected for all pairs."""
        assert self.seed_table is not None
        return paired_p(self.seed_table)[frozenset((first, second))]

    @property
    def rows(self) -> list[Row]:
        """Every run of the group that the plan asks for and that has ended."""
        own = [row for entry in self.entries for row in entry.rows]
        stressed = [row for entry in self.entries for row in entry.stressed.values()]
        return [*own, *(self.floor.rows if self.floor else ()), *stressed]


def group_answers(plan: Plan, rows: Rows) -> list[GroupAnswer]:
    """What is known about every group, in the order of the plan."""
    return [_group_answer(plan, group, rows) for group in plan.groups]


def sound(row: Row) -> bool:
    """Whether a run gives a loss to compare."""
    return row.state == "finished" and row.val_loss is not None


def _group_answer(plan: Plan, group: Group, rows: Rows) -> GroupAnswer:
    entries = [_entry(plan, group, contestant, rows) for contestant in group.contestants]
    return _answer(group, entries, plan.reference, rows)


def answer_of_runs(
    group: Group, rows: Mapping[str, Sequence[Row]], unfinished: Mapping[str, int], reference: str = REFERENCE
) -> GroupAnswer:
    """What runs say that no plan asked for.

    group: the contestants, with a part that has no fresh seeds. rows: the runs of each contestant that have ended.
    unfinished: how many of each have not.
    """
    entries = [
        _entry_of_runs(contestant, rows[contestant.label], unfinished[contestant.label], group)
        for contestant in group.contestants
    ]
    return _answer(group, entries, reference, {})


def _answer(group: Group, entries: list[Entry], reference: str, rows: Rows) -> GroupAnswer:
    entries, table = _compared(entries)
    reference = reference if any(e.label == reference for e in entries) else entries[0].label
    means = {} if table is None else table.means
    # sorting keeps the order of the plan where nothing else decides
    entries.sort(key=lambda entry: (means.get(entry.label, math.inf), entry.mean))
    floor = _floor(group, {entry.label: entry for entry in entries}, rows)
    missing: Counter[str] = Counter()
    for entry in entries:
        missing.update(entry.missing)
    if floor is not None:
        state = next(entry.state for entry in entries if entry.label == floor.label)
        missing[FLOOR] = 0 if state in ("edge", "hopeless") else group.part.seeds - len(floor.rows)
    return GroupAnswer(
        group=group,
        reference=reference,
        entries=tuple(entries),
        seed_table=table,
        pairs={} if table is None else {(pair.first, pair.second): pair for pair in pairs(table)},
        seen=None if table is None else smallest_seen(table),
        floor=floor,
        missing={stage: missing[stage] for stage in (TUNE, FINAL, FLOOR, STRESS)},
    )


def _entry(plan: Plan, group: Group, contestant: Contestant, rows: Rows) -> Entry:
    search = tuning(plan, group, contestant, rows)
    label, part = contestant.label, group.part
    state = _state(plan, group, contestant, search, rows)
    rates = sorted({*search.losses, *(key.rate for _, key in search.missing)})
    keys = [Key(group.name, label, rate, seed) for rate in rates for seed in part.tuned_with]
    tries = tuple(rows[key] for key in keys if key in rows)
    used = final_rates(group, contestant, search, rows)
    fresh_rows = [_at(group, label, rate, FINAL, rows) for rate in used]
    finals = fresh_rows[-1] if fresh_rows else {}
    if not part.fresh and search.best is not None:
        used, finals = [search.best], {row.seed: row for row in tries if row.rate == search.best}
    stress = stress_rate(group, search)
    stressed = {} if stress is None else _at(group, label, stress, STRESS, rows)
    hopeful = state in ("tuned", "tuning", "waiting") and part.fresh
    missing = {
        TUNE: START * len(part.tuned_with) if state == "waiting" else len(search.missing),
        FINAL: part.seeds - len(finals) if hopeful else 0,
        STRESS: part.seeds - len(stressed) if hopeful and part.stress else 0,
    }
    return Entry(
        label=label,
        scheme=contestant.given["model"]["scheme"],
        search=search,
        state=state,
        bowl=_bowl(search),
        tries=tries,
        rates=tuple(used),
        finals=finals,
        abandoned=tuple(row for found in fresh_rows[:-1] for row in found.values()),
        stressed=stressed,
        reason=_reason(group, search, state, finals, used, tries),
        planned=part.compared_with,
        missing=missing,
    )


def _bowl(search: Tuning) -> Bowl | None:
    losses = {rate: None if loss == math.inf else loss for rate, loss in search.losses.items()}
    return curves.bowl(losses) if search.best is not None else None


def _entry_of_runs(contestant: Contestant, rows: Sequence[Row], unfinished: int, group: Group) -> Entry:
    """A contestant of runs that no plan asked for: at the best of its rates, on the seeds that it has there."""
    losses = {}
    for rate in sorted({row.rate for row in rows}):
        runs = [row for row in rows if row.rate == rate]
        finite = all(map(sound, runs))
        losses[rate] = math.fsum(row.loss for row in runs) / len(runs) if finite else math.inf
    lowest = min(losses, key=lambda rate: (losses[rate], rate), default=None)
    best = None if lowest is None or losses[lowest] == math.inf else lowest
    inside = best is not None and (len(losses) == 1 or min(losses) < best < max(losses))
    search = Tuning(losses, (), best, inside)
    state: State = "tuning" if unfinished else "hopeless" if best is None else "tuned" if inside else "edge"
    finals = {row.seed: row for row in rows if row.rate == best}
    return Entry(
        label=contestant.label,
        scheme=contestant.given["model"]["scheme"],
        search=search,
        state=state,
        bowl=_bowl(search),
        tries=tuple(rows),
        rates=() if best is None else (best,),
        finals=finals,
        abandoned=(),
        stressed={},
        reason=_reason(group, search, state, finals, [], rows, unfinished),
        planned=group.part.compared_with,
        missing={TUNE: unfinished, FINAL: 0, STRESS: 0},
    )


def _state(plan: Plan, group: Group, contestant: Contestant, search: Tuning, rows: Rows) -> State:
    if search.best is not None:
        return "tuned" if search.bracketed else "edge"
    if search.missing:
        return "tuning"
    if start_rates(plan, group, contestant, rows) is not None:
        return "hopeless"
    below = plan.rung(group, group.rung - 1)
    assert below is not None
    # what found no rate on the rung below never starts on this one
    state = _state(plan, below, contestant, tuning(plan, below, contestant, rows), rows)
    return "hopeless" if state == "hopeless" else "waiting"


def _at(group: Group, label: str, rate: float, stage: str, rows: Rows) -> dict[int, Row]:
    """The runs of a stage at a rate that have ended, by seed."""
    keys = [Key(group.name, label, rate, seed) for seed in seeds_of(stage, group.part.seeds)]
    return {key.seed: rows[key] for key in keys if key in rows}


def _reason(
    group: Group,
    search: Tuning,
    state: State,
    finals: Mapping[int, Row],
    fresh_rates: Sequence[float],
    tries: Sequence[Row],
    unfinished: int = 0,
) -> str:
    """Why a contestant cannot be compared, as far as it decides that itself."""
    rates, seeds = list(search.losses), group.part.compared_with
    if unfinished:
        return f"{unfinished} run{'s are' if unfinished > 1 else ' is'} not finished"
    if state == "waiting":
        return "not run: the size below is not tuned yet"
    if state == "tuning":
        count = len({key.rate for _, key in search.missing})
        return f"still tuning: {len(rates)} of {len(rates) + count} learning rates have ended"
    if state == "hopeless" and len(rates) == 1:
        return failures(tries, seeds)
    if state == "hopeless":
        where = f" ({rates[0]:g} to {rates[-1]:g})" if rates else " of the size below"
        return f"no learning rate gave a loss{where}"
    if state == "edge":
        end = "lowest" if search.best == rates[0] else "highest"
        return f"not bracketed: its best learning rate {search.best:g} is the {end} that was tried"
    words = failures(list(finals.values()), seeds, _where(fresh_rates))
    if words:
        return words
    if not seeds:
        return "the plan asks for no fresh seeds"
    if len(finals) < FEWEST_SEEDS:
        return "one seed" if seeds == 1 == len(finals) else f"{len(finals)} of {seeds} seeds"
    return ""


def _where(rates: Sequence[float]) -> str:
    """The rate of the fresh seeds, if it is not the best one."""
    steps = len(rates) - 1
    return f" at {rates[-1]:g}, {steps} step{'s' * (steps > 1)} below its best rate" if steps > 0 else ""


def _seeds(count: int, planned: int) -> str:
    """A number of seeds. A count that stopped at a failure says so."""
    return f"{count} seed{'s' * (count != 1)}" + (f" run, {planned} planned" if count < planned else "")


def failures(rows: Sequence[Row], planned: int = 0, where: str = "") -> str:
    """How many runs collapsed or diverged, and the mean loss of the others; empty if none did."""
    counts = Counter("gave no loss" if row.state == "finished" else row.state for row in rows if not sound(row))
    words = [f"{state} in {count}" for state, count in sorted(counts.items())]
    losses = [row.loss for row in rows if sound(row)]
    stalled = sum(row.stalled for row in rows)
    others = f", loss {math.fsum(losses) / len(losses):.3f} in the others" if losses else ""
    others += f", of which {stalled} stalled" if stalled else ""
    return f"{' and '.join(words)} of {_seeds(len(rows), planned)}{where}{others}" if words else ""


def _compared(entries: list[Entry]) -> tuple[list[Entry], SeedTable | None]:
    """The table of those that can be compared, and all entries with the reason of those that cannot.

    The seeds are those that all have. Who is compared does not depend on whose loss is lower.
    """
    able = [entry for entry in entries if not entry.reason]
    while able and len(_common(able)) < FEWEST_SEEDS:
        able.remove(min(reversed(able), key=lambda entry: len(entry.finals)))
    labels = {entry.label for entry in able}
    alone = "nothing to compare it with yet" if len(able) == 1 else "its seeds are not those of the others yet"
    if len(able) < 2:
        labels = set()
    entries = [replace(e, reason=alone) if not e.reason and e.label not in labels else e for e in entries]
    if not labels:
        return entries, None
    return entries, seed_table({e.label: {seed: row.loss for seed, row in e.finals.items()} for e in able})


def _common(entries: Sequence[Entry]) -> set[int]:
    return set.intersection(*(set(entry.finals) for entry in entries))


def _floor(group: Group, entries: Mapping[str, Entry], rows: Rows) -> NoiseFloor | None:
    label = group.part.noise_floor
    if not label or not group.part.seeds:
        return None
    entry = entries[label]
    found = tuple(_at(group, label, entry.rates[-1], FLOOR, rows).values()) if entry.rates else ()
    first, second = list(entry.finals.values()), list(found)
    if not first or not second or not all(map(sound, (*first, *second))):
        return NoiseFloor(label, None, found)
    return NoiseFloor(label, noise_floor([row.loss for row in second], [row.loss for row in first]), found)


def costs(answer: GroupAnswer) -> tuple[str, list[Cost]]:
    """What each compared contestant costs, relative to the one whose label comes first in the answer."""
    if answer.seed_table is None:
        return "", []
    compared, seeds = answer.compared, answer.seed_table.seeds
    first = {entry.label: entry.finals[seeds[0]] for entry in compared}
    base = answer.reference if answer.reference in first else compared[0].label
    flops = {label: float(row.flops) for label, row in first.items()}
    seconds = {label: row.steps * row.step_seconds for label, row in first.items() if row.step_seconds is not None}
    timed = len(seconds) == len(first)
    found = []
    for entry in compared:
        label, runs = entry.label, [entry.finals[seed] for seed in seeds]
        found.append(
            Cost(
                label=label,
                flops=flops[label] / flops[base],
                seconds=seconds[label] / seconds[base] if timed else None,
                loss=answer.seed_table.means[label],
                at_equal_flops=_early_loss(runs, min(flops.values()) / flops[label]),
                at_equal_seconds=_early_loss(runs, min(seconds.values()) / seconds[label]) if timed else None,
            )
        )
    return base, found


def _early_loss(runs: Sequence[Row], share: float) -> float | None:
    """The mean loss of some runs after a share of their steps, linear between evaluations."""
    losses = [_on_curve(row.curve, share * row.steps) for row in runs]
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) / len(known) if len(known) == len(losses) else None


def _on_curve(curve: Sequence[tuple[int, float | None]], step: float) -> float | None:
    for (before, first), (after, second) in pairwise(curve):
        if before <= step <= after and first is not None and second is not None:
            return first + (second - first) * (step - before) / (after - before)
    return next((loss for at, loss in curve if at == step), None)
