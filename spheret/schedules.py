"""Depth schedules: the fixed factor lambda_l of the l-th update's step size, l = 1 ... M.

Their sums decide how much a whole stack can turn (paper, Propositions 4 and 5):

    schedule   lambda_l       sum lambda   sum lambda^2   a dyadic interval's share of the squares
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
    # as printed in the paper's code: its last sublayer is a no-op, so no default uses it
    "linear-paper": lambda l, m: (m - l) / m,
}

# those that cannot be told without the number of layers
_RELATIVE = frozenset({"linear", "linear-paper"})


def factor(schedule: str, sublayer: int, num_sublayers: int | None = None) -> float:
    """lambda of update `sublayer` (1-based) out of `num_sublayers`."""
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if isinstance(sublayer, bool) or not isinstance(sublayer, int) or sublayer < 1:
        raise ValueError(f"sublayer counts from 1, got {sublayer!r}.")
    if num_sublayers is None:
        if schedule in _RELATIVE:
            raise ValueError(f"the {schedule!r} schedule needs num_sublayers, the number of updates in the stack.")
        return SCHEDULES[schedule](sublayer, sublayer)
    if sublayer > num_sublayers:
        raise ValueError(f"sublayer {sublayer} lies beyond num_sublayers = {num_sublayers} (two sublayers a block).")
    return SCHEDULES[schedule](sublayer, num_sublayers)
