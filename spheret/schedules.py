"""Depth schedules: the fixed factor lambda_l of the l-th sublayer's step size, l = 1 ... M.

The sums of a schedule bound how far the whole stack can turn. Paper: Proposition 8 (growth) and Proposition 10
(dyadic budget).

    schedule   lambda_l       sum lambda   sum lambda^2   sum lambda^2 over m <= l < 2m
    constant   1              O(M)         O(M)           grows
    sqrt       1/sqrt(l)      O(sqrt M)    O(log M)       Theta(1)
    harmonic   1/l            O(log M)     O(1)           Theta(1/m)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spheret.support.errors import unknown

# (sublayer, num_sublayers) -> lambda
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda l, m: 1.0,
    "sqrt": lambda l, m: 1 / math.sqrt(l),
    "harmonic": lambda l, m: 1 / l,
    "linear": lambda l, m: (m - l + 1) / m,
    # as in the paper's code; no default uses it, because the last sublayer gets a step of 0
    "linear-paper": lambda l, m: (m - l) / m,
}

# the schedules that depend on the number of sublayers
_RELATIVE = frozenset({"linear", "linear-paper"})


def check_sublayer(sublayer: int, num_sublayers: int | None) -> None:
    """Raise unless sublayer counts from 1, up to the number of sublayers if that is given."""
    if isinstance(sublayer, bool) or not isinstance(sublayer, int) or sublayer < 1:
        raise ValueError(f"sublayer counts from 1, got {sublayer!r}.")
    if num_sublayers is not None and sublayer > num_sublayers:
        raise ValueError(
            f"sublayer {sublayer} lies beyond num_sublayers = {num_sublayers} (two sublayers per block)."
        )


def factor(schedule: str, sublayer: int, num_sublayers: int | None = None) -> float:
    """lambda of sublayer `sublayer`, counted from 1, out of `num_sublayers`."""
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    check_sublayer(sublayer, num_sublayers)
    if num_sublayers is None:
        if schedule in _RELATIVE:
            raise ValueError(f"the {schedule!r} schedule needs num_sublayers, the number of sublayers in the stack.")
        num_sublayers = sublayer
    return SCHEDULES[schedule](sublayer, num_sublayers)
