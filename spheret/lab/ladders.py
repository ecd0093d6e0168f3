"""How a gap changes with size: the rungs of a part beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spheret.lab.answers import Gap, GroupAnswer
from spheret.lab.curves import ComputeGain, compute_gain
from spheret.lab.endpoints import PairedComparison, slope_per_doubling
from spheret.lab.rungs import by_part, in_order


@dataclass(frozen=True)
class RungGap:
    """One contestant on one rung. gap: to the reference, None if it is not compared. gain: None without a number."""

    answer: GroupAnswer
    gap: Gap | None
    gain: ComputeGain | None


@dataclass(frozen=True)
class Climb:
    """One contestant on all rungs. slope: the change of its gap per doubling of the size; None without sizes."""

    label: str
    scheme: str
    steps: tuple[RungGap, ...]
    slope: PairedComparison | None


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
        slope = slope_per_doubling(answers, label, reference)
        climbs.append(Climb(label, contestant.given["model"]["scheme"], steps, slope))
    return Ladder(part.name, part.title or part.name, reference, key, sizes, tuple(answers), tuple(climbs))


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
    return compute_gain(reference, float(flops), answer.seed_table.means[label])
