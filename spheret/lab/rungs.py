"""The rungs of a part of a plan: the same contestants at several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.lab.answers import GroupAnswer

# the settings that are a size
SIZES = ("layers", "width", "steps")


def by_part(answers: Sequence[GroupAnswer]) -> list[list[GroupAnswer]]:
    """The rungs of each part, in the order of the plan."""
    parts: dict[str, list[GroupAnswer]] = {}
    for answer in answers:
        parts.setdefault(answer.group.part.name, []).append(answer)
    return list(parts.values())


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
    values = tuple(float(answer.group.value(key)) for answer in answers)
    return (key, values) if len(set(values)) == len(values) else (None, ())
