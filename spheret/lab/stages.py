"""What a study does next: a pure function of its plan and of the runs that have ended.

Every contestant is tuned: it gets the learning rates of its part, and more where the best one lies at an edge. Then
it is trained with fresh seeds at its best rate. If a seed collapses or diverges there, it gets the next lower rate. A
rung of a ladder starts from the rate of the rung before it. Last come the seeds at a multiple of the best rate, which
count who fails there and enter no mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spheret.lab.plan import Contestant, Group, Plan, rounded
from spheret.lab.rows import FINAL, FINISHED, STRESS, TUNE, Key, Row, mean_loss

# how often a contestant may take the next lower rate
STEPS_DOWN = 2
# the first seed of each stage, so that the seeds of a verdict are not those that chose the rate
SEEDS = {TUNE: 1, FINAL: 101, STRESS: 301}

Rows = Mapping[Key, Row]


@dataclass(frozen=True)
class Tuning:
    """How far the search for a learning rate is.

    losses: the mean validation loss of each rate all of whose runs have ended; infinity if one of them collapsed or
        diverged.
    missing: runs that the grid still needs, the most valuable first, each with its place among all contestants' runs.
    best: the rate of the lowest loss, once nothing is missing.
    bracketed: whether the best lies between two others, or is the only one that is to be tried.
    """

    losses: dict[float, float]
    missing: tuple[tuple[tuple[int, int], Key], ...]
    best: float | None
    bracketed: bool


def start_rates(plan: Plan, group: Group, contestant: Contestant, rows: Rows) -> list[float] | None:
    """The rates with which a contestant starts; None while the rung below is not tuned."""
    below = plan.rung(group, group.rung - 1)
    if below is None:
        return list(group.rates(contestant.label))
    best = tuning(plan, below, contestant, rows).best
    if best is None:
        return None
    return [group.beside(best, steps) for steps in (-1, 0, 1)]


def tuning(plan: Plan, group: Group, contestant: Contestant, rows: Rows) -> Tuning:
    """The search of one contestant. The grid grows at an edge as often as the part allows."""
    rates = start_rates(plan, group, contestant, rows)
    if rates is None:
        return Tuning({}, (), None, False)
    grown = {-1: 0, 1: 0}
    while True:
        losses, missing = _losses(plan, group, contestant, rates, rows)
        if missing:
            return Tuning(losses, tuple(missing), None, False)
        best = min(rates, key=lambda rate: (losses[rate], rate))
        # where no rate gave a loss, lower ones may
        side = -1 if best == rates[0] or losses[best] == math.inf else 1 if best == rates[-1] else 0
        if not side or grown[side] == group.part.extend:
            found = losses[best] < math.inf
            return Tuning(losses, (), best if found else None, found and (not side or len(rates) == 1))
        grown[side] += 1
        rates = sorted([*rates, group.beside(rates[0 if side < 0 else -1], side)])


def lowest_losses(plan: Plan, group: Group, rows: Rows) -> dict[str, float]:
    """The lowest loss of every contestant whose search has ended; without fresh seeds, of its first seed."""
    found = dict[str, float]()
    for each in group.contestants:
        if group.part.fresh:
            search = tuning(plan, group, each, rows)
            losses = None if search.missing else [*search.losses.values(), math.inf]
        else:
            keys = [Key(group.name, each.label, rate, group.part.tuned_with[0]) for rate in group.rates(each.label)]
            losses = [mean_loss([rows[key]]) for key in keys] if all(key in rows for key in keys) else None
        if losses is not None:
            found[each.label] = min(losses)
    return found


def distances(plan: Plan, group: Group, rows: Rows) -> dict[str, float]:
    """How far each contestant lies above the lowest loss of the search; empty while some of it is missing."""
    losses = lowest_losses(plan, group, rows)
    if len(losses) < len(group.contestants):
        return {}
    lowest = min(losses.values())
    return {label: loss - lowest if lowest < math.inf else 0.0 for label, loss in losses.items()}


def is_near(plan: Plan, group: Group, contestant: Contestant, rows: Rows) -> bool:
    """Whether a contestant gets more seeds: the reference, the best two, and who is not clearly behind them."""
    behind, label = group.part.behind, contestant.label
    if not behind or label == plan.reference:
        return True
    above = distances(plan, group, rows)
    return label in above and (above[label] <= behind or label in sorted(above, key=lambda each: above[each])[:2])


def _losses(
    plan: Plan, group: Group, contestant: Contestant, rates: Sequence[float], rows: Rows
) -> tuple[dict[float, float], list[tuple[tuple[int, int], Key]]]:
    losses, missing, seeds = {}, [], list(group.part.tuned_with)
    if not group.part.fresh and not is_near(plan, group, contestant, rows):
        seeds = seeds[:1]
    # the middle first: a search that is cut short has tried the likeliest
    from_the_middle = sorted(rates, key=lambda rate: (abs(rates.index(rate) - len(rates) // 2), rate))
    for place, rate in enumerate(from_the_middle):
        keys = [Key(group.name, contestant.label, rate, seed) for seed in seeds]
        absent = [key for key in keys if key not in rows]
        # without fresh seeds, a seed of all rates comes before the next: a race that is cut short compares all
        missing += [((0 if group.part.fresh else keys.index(key), place), key) for key in absent]
        if not absent:
            # the loss of a collapsed run is the unigram entropy, which says nothing about a rate
            losses[rate] = mean_loss([rows[key] for key in keys])
    return dict(sorted(losses.items())), missing


def final_rates(plan: Plan, group: Group, contestant: Contestant, search: Tuning, rows: Rows) -> list[float]:
    """The rates of the fresh seeds: the best one, and lower ones after it if a seed did not finish there.

    The last one counts. Empty for a contestant whose best rate is not known or not bracketed, or that is behind.
    """
    if search.best is None or not search.bracketed or not group.part.fresh:
        return []
    if not is_near(plan, group, contestant, rows):
        return []
    rates = [search.best]
    while len(rates) <= STEPS_DOWN and unfinished(group, contestant, rates[-1], rows):
        rates.append(group.beside(rates[-1], -1))
    return rates


def unfinished(group: Group, contestant: Contestant, rate: float, rows: Rows) -> list[Row]:
    """The fresh seeds that collapsed or diverged at a rate."""
    finals = rows_at(group, contestant.label, rate, FINAL, rows)
    return [row for row in finals.values() if row.state != FINISHED]


def rows_at(group: Group, label: str, rate: float, stage: str, rows: Rows) -> dict[int, Row]:
    """The runs of a stage at a rate that have ended, by seed."""
    keys = [Key(group.name, label, rate, SEEDS[stage] + turn) for turn in range(group.part.seeds)]
    return {key.seed: rows[key] for key in keys if key in rows}


def wanted(plan: Plan, rows: Rows) -> list[Key]:
    """The runs that can start now, the most valuable first. Empty if the study is done.

    Groups come in the order of the plan. In a group, the first contestants are tuned and get their first seeds; then
    the others; then come more seeds. After all groups come the seeds under stress. What was
    seen does not decide who gets more seeds, which would make the verdicts wrong, but for those far `behind`.
    """
    verdicts, stressed = list[Key](), list[Key]()
    for group in plan.groups:
        part, contestants = group.part, group.contestants
        search = {each: tuning(plan, group, each, rows) for each in contestants}
        rates = {each: final_rates(plan, group, each, search[each], rows) for each in contestants}
        for some in (contestants[: part.first], contestants[part.first :]):
            # one rate of every contestant before the next rate of any
            missing = [each for contestant in some for each in search[contestant].missing]
            verdicts += [key for _, key in sorted(missing, key=lambda each: each[0])]
            verdicts += _seeds(group, some, rates, FINAL, range(min(part.first_seeds, part.seeds)))
        verdicts += _seeds(group, contestants, rates, FINAL, range(part.first_seeds, part.seeds))
        hot = {each: [rate] if (rate := stress_rate(group, search[each])) else [] for each in contestants}
        stressed += _seeds(group, contestants, hot, STRESS, range(part.seeds))
    return [key for key in (*verdicts, *stressed) if key not in rows]


def stress_rate(group: Group, search: Tuning) -> float | None:
    """The multiple of the best rate at which fresh seeds count failures; None without one, or without fresh seeds."""
    if not group.part.stress or not group.part.seeds or search.best is None or not search.bracketed:
        return None
    return rounded(group.part.stress * search.best)


def _seeds(
    group: Group, contestants: Sequence[Contestant], rates: Mapping[Contestant, list[float]], stage: str, turns: range
) -> list[Key]:
    """Fresh seeds of the contestants whose rate is known, one seed of each before the next."""
    return [
        Key(group.name, contestant.label, rates[contestant][-1], SEEDS[stage] + turn)
        for turn in turns
        for contestant in contestants
        if rates[contestant]
    ]


def stage_of(key: Key, fresh: bool = True) -> str:
    """The stage that a run belongs to, by its seed. fresh: whether its part has fresh seeds."""
    return max((first, stage) for stage, first in SEEDS.items() if key.seed >= first)[1] if fresh else TUNE
