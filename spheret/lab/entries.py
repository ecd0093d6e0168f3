"""One contestant of a group: its search for a learning rate, its seeds, and why it cannot be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from spheret.lab.plan import Contestant, Group, Plan
from spheret.lab.rows import FINAL, STRESS, Key, Row, mean_loss, sound
from spheret.lab.stages import (
    Rows,
    Tuning,
    distances,
    final_rates,
    is_near,
    rows_at,
    start_rates,
    stress_rate,
    tuning,
)

# tuned: its best rate lies between two others. edge: it does not. hopeless: no rate gave a loss.
# tuning: some rates have not ended. waiting: the rung below is not tuned.
State = Literal["tuned", "edge", "hopeless", "tuning", "waiting"]
# an estimate of the noise needs so many seeds
FEWEST_SEEDS = 2
# how many rates a contestant whose grid is not known yet will get at least
START = 3


@dataclass(frozen=True)
class Entry:
    """One contestant of a group: its search for a learning rate, and the seeds that it is compared on.

    These are fresh seeds at the best rate, or, if the part has no fresh ones, the seeds of the search at that rate.

    rates: the rates of these seeds; a seed failed at all but the last, which counts.
    tries: the runs of the search. finals: the runs with the seeds that have ended, at the reported rate.
    abandoned: the runs with fresh seeds at the higher rates.
    stressed: the runs at the part's multiple of the best rate that have ended, by seed.
    reason: why it is not compared; empty if it is.
    planned: how many seeds it is to be compared on.
    missing: how many runs are still to come, about.
    behind: whether the search left it so far behind that it got no more seeds.
    """

    label: str
    scheme: str
    search: Tuning
    state: State
    tries: tuple[Row, ...]
    rates: tuple[float, ...]
    finals: dict[int, Row]
    abandoned: tuple[Row, ...]
    stressed: dict[int, Row]
    reason: str
    planned: int
    missing: int
    behind: bool = False

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
        """The reported learning rate: the fresh seeds' rate, or else the best one so far."""
        return self.rates[-1] if self.rates else self.search.best

    @property
    def step_down(self) -> str:
        """What happened at the higher rates; empty if the best one counts."""
        at = {rate: [row for row in self.abandoned if row.rate == rate] for rate in self.rates[:-1]}
        return "; ".join(f"at {rate:g} {failures(rows, self.planned)}" for rate, rows in at.items())

    @property
    def failure(self) -> str:
        """How many of the fresh seeds failed at the reported rate; empty if none did."""
        return failures(list(self.finals.values()), self.planned, _where(self.rates))

    @property
    def step_seconds(self) -> float | None:
        """The seconds of an update in its fastest run, beside whatever else ran; None if no run has ended.

        Older rows have seconds that were measured side by side.
        """
        return min((row.step_seconds or row.seconds / row.steps for row in self.finals.values()), default=None)

    @property
    def mean(self) -> float:
        """The mean loss of the fresh seeds; infinity if one of them failed or none has ended."""
        return mean_loss(self.finals.values())


def entry_of_plan(plan: Plan, group: Group, contestant: Contestant, rows: Rows) -> Entry:
    search = tuning(plan, group, contestant, rows)
    label, part = contestant.label, group.part
    state = _state(plan, group, contestant, search, rows)
    rates = sorted({*search.losses, *(key.rate for _, key in search.missing)})
    keys = [Key(group.name, label, rate, seed) for rate in rates for seed in part.tuned_with]
    tries = [rows[key] for key in keys if key in rows]
    near = is_near(plan, group, contestant, rows)
    above = 0.0 if near else distances(plan, group, rows).get(label, math.inf)
    far = f"clearly behind: {above:.3f} above the lowest" if 0 < above < math.inf else ""
    if not part.fresh:
        entry = _entry(group, contestant, search, state, tries, len(search.missing))
        return replace(entry, reason=far or entry.reason, behind=bool(far))
    used = final_rates(plan, group, contestant, search, rows)
    fresh_rows = [rows_at(group, label, rate, FINAL, rows) for rate in used]
    finals = fresh_rows[-1] if fresh_rows else {}
    stress = stress_rate(group, search)
    stressed = {} if stress is None else rows_at(group, label, stress, STRESS, rows)
    hopeful = not far and state in ("tuned", "tuning", "waiting")
    fresh_missing = part.seeds - len(finals) + (part.seeds - len(stressed) if part.stress else 0) if hopeful else 0
    return replace(
        _entry(group, contestant, search, state, tries, len(search.missing)),
        rates=tuple(used),
        finals=finals,
        abandoned=tuple(row for found in fresh_rows[:-1] for row in found.values()),
        stressed=stressed,
        reason=far or _reason(group, search, state, finals, used, tries),
        behind=bool(far),
        missing=(START * len(part.tuned_with) if state == "waiting" else len(search.missing)) + fresh_missing,
    )


def runs_left(plan: Plan, rows: Rows) -> int:
    """About how many runs of a plan are still to come."""
    entries = [entry_of_plan(plan, group, each, rows) for group in plan.groups for each in group.contestants]
    return sum(entry.missing for entry in entries)


def entry_of_runs(contestant: Contestant, rows: Sequence[Row], unfinished: int, group: Group) -> Entry:
    """A contestant of runs that no plan asked for: at the best of its rates, on the seeds that it has there."""
    rates = sorted({row.rate for row in rows})
    losses = {rate: mean_loss([row for row in rows if row.rate == rate]) for rate in rates}
    lowest = min(losses, key=lambda rate: (losses[rate], rate), default=None)
    best = None if lowest is None or losses[lowest] == math.inf else lowest
    inside = best is not None and (len(losses) == 1 or min(losses) < best < max(losses))
    state: State = "tuning" if unfinished else "hopeless" if best is None else "tuned" if inside else "edge"
    return _entry(group, contestant, Tuning(losses, (), best, inside), state, rows, unfinished)


def _entry(
    group: Group, contestant: Contestant, search: Tuning, state: State, tries: Sequence[Row], missing: int
) -> Entry:
    """A contestant on the seeds of its search. missing: runs that are still to come."""
    finals = {} if search.best is None else {row.seed: row for row in tries if row.rate == search.best}
    # a plan knows the rates that are to come
    unfinished = 0 if search.missing else missing
    return Entry(
        label=contestant.label,
        scheme=contestant.given["model"]["scheme"],
        search=search,
        state=state,
        tries=tuple(tries),
        rates=() if search.best is None else (search.best,),
        finals=finals,
        abandoned=(),
        stressed={},
        reason=_reason(group, search, state, finals, [], tries, unfinished),
        planned=group.part.compared_with,
        missing=missing,
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
        return f"not tuned yet: {len(rates)} of {len(rates) + count} learning rates have ended"
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
    others = f", loss {math.fsum(losses) / len(losses):.3f} in the others" if losses else ""
    return f"{' and '.join(words)} of {_seeds(len(rows), planned)}{where}{others}" if words else ""
