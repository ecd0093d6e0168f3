"""How a gap changes with size: the rungs of a part beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spheret.lab import curves
from spheret.lab.answers import Gap, GroupAnswer, by_part, setting_of
from spheret.lab.curves import ComputeGain, Trend

# the settings that are a size
SIZES = ("layers", "width", "steps")


@dataclass(frozen=True)
class RungGap:
    """One contestant on one rung. gap: to the reference, None if it is not compared. gain: None without a number."""

    answer: GroupAnswer
    gap: Gap | None
    gain: ComputeGain | None


@dataclass(frozen=True)
class Climb:
    """One contestant on all rungs. trend: the change of its gap per doubling of the size."""

    label: str
    scheme: str
    steps: tuple[RungGap, ...]
    trend: Trend | None


@dataclass(frozen=True)
class Ladder:
    """The rungs of a part, from the lowest to the highest.

    key: the setting that is the size, None if the rungs differ in something else. sizes: its values.
    """

    part: str
    title: str
    reference: str
    key: str | None
    sizes: tuple[float, ...]
    answers: tuple[GroupAnswer, ...]
    climbs: tuple[Climb, ...]


def ladders(answers: Sequence[GroupAnswer]) -> list[Ladder]:
    """The ladder of every part that has one and that compares contestants."""
    return [_ladder(same) for same in by_part(answers) if len(same) > 1 and same[0].group.part.compared_with]


def _ladder(answers: Sequence[GroupAnswer]) -> Ladder:
    key, answers, sizes = in_order(answers)
    part, reference = answers[0].group.part, answers[0].reference
    compute = _reference_compute(answers, reference) if key else []
    climbs = []
    for contestant in answers[0].group.contestants:
        label = contestant.label
        if label == reference:
            continue
        steps = tuple(RungGap(each, each.gap(label, reference), _gain(each, label, compute)) for each in answers)
        known = [(size, step.gap) for size, step in zip(sizes, steps, strict=False) if step.gap is not None]
        trend = None
        if len(known) > 1:
            trend = curves.gap_by_size([(size, (g.estimate, g.pair.error, g.pair.degrees)) for size, g in known])
        climbs.append(Climb(label, contestant.given["model"]["scheme"], steps, trend))
    return Ladder(part.name, part.title or part.name, reference, key, sizes, tuple(answers), tuple(climbs))


def in_order(
    answers: Sequence[GroupAnswer],
) -> tuple[str | None, tuple[GroupAnswer, ...], tuple[float, ...]]:
    """The rungs of a part from the smallest to the largest; as in the plan if they have no size."""
    key, sizes = size_of(answers)
    if key is None:
        return None, tuple(answers), ()
    ordered = sorted(zip(sizes, answers, strict=True), key=lambda each: each[0])
    return key, tuple(answer for _, answer in ordered), tuple(size for size, _ in ordered)


def size_of(answers: Sequence[GroupAnswer]) -> tuple[str | None, tuple[float, ...]]:
    """The setting that is the size of a rung, with its value on each; None if the rungs differ in something else."""
    changed = {name for answer in answers for name in answer.group.setting if name in SIZES}
    if len(changed) != 1:
        return None, ()
    (key,) = changed
    values = tuple(float(setting_of(answer.group, key)) for answer in answers)
    return (key, values) if len(set(values)) == len(values) else (None, ())


def _reference_compute(answers: Sequence[GroupAnswer], reference: str) -> list[tuple[float, float]]:
    """The FLOPs and the loss of the reference on every rung where it is compared."""
    points = {}
    for answer in answers:
        if answer.seed_table is not None and reference in answer.seed_table.means:
            flops = answer.by_label[reference].finals[answer.seed_table.seeds[0]].flops
            points[float(flops)] = answer.seed_table.means[reference]
    return list(points.items())


def _gain(answer: GroupAnswer, label: str, reference: Sequence[tuple[float, float]]) -> ComputeGain | None:
    if len(reference) < 2 or answer.seed_table is None or label not in answer.seed_table.means:
        return None
    flops = answer.by_label[label].finals[answer.seed_table.seeds[0]].flops
    return curves.compute_gain(reference, float(flops), answer.seed_table.means[label])
