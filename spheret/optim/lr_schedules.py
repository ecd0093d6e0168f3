"""The learning rate of each update: one row of LR_SCHEDULES per shape. This is the only place that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from spheret.support.errors import unknown


class Course(NamedTuple):
    """What a schedule needs to know. `decay_steps`: the last updates, over which `wsd` decays."""

    lr: float
    min_lr: float
    warmup: int
    steps: int
    decay_steps: int


def cosine(course: Course, done: int) -> float:
    """Half a cosine from lr to min_lr (nanoGPT's)."""
    ratio = (done - course.warmup) / max(1, course.steps - course.warmup)
    return course.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (course.lr - course.min_lr)


def wsd(course: Course, done: int) -> float:
    """lr, and over the last `decay_steps` updates lr (1 - sqrt(x)) + min_lr sqrt(x).

    Of D updates of decay the first has x = 0, and the last x = (D - 1)/D: what follows it would have min_lr.
    """
    ratio = max(0, done - (course.steps - course.decay_steps)) / max(1, course.decay_steps)
    return course.lr + (course.min_lr - course.lr) * math.sqrt(ratio)


# the learning rate after the warm-up, from the number of updates that are done
LR_SCHEDULES: dict[str, Callable[[Course, int], float]] = {"cosine": cosine, "wsd": wsd}


def check_schedule(schedule: str, course: Course) -> None:
    """Raise unless there is such a schedule, with as many updates of decay as it can have."""
    if schedule not in LR_SCHEDULES:
        raise unknown("lr_schedule", schedule, LR_SCHEDULES)
    decay, most = course.decay_steps, max(1, course.steps - course.warmup)
    if schedule != "wsd" and decay:
        raise ValueError(f"decay_steps {decay} belongs to lr_schedule wsd: leave it out.")
    if schedule == "wsd" and not 1 <= decay <= most:
        raise ValueError(f"decay_steps must lie between 1 and {most}, the updates after the warm-up, got {decay}.")


def learning_rate(schedule: str, course: Course, step: int) -> float:
    """The learning rate of update `step`, counted from 1: a linear warm-up, then the schedule."""
    done = step - 1
    if done < course.warmup:
        return course.lr * step / (course.warmup + 1)
    return LR_SCHEDULES[schedule](course, done)
