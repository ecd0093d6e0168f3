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

from spheret.errors import unknown

# (layer, num_layers) -> lambda
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda l, m: 1.0,
    "sqrt": lambda l, m: 1 / math.sqrt(l),
    "harmonic": lambda l, m: 1 / l,
    "linear": lambda l, m: (m - l + 1) / m,
    # as printed in the paper's code: its last layer is a no-op, so no default uses it
    "linear-paper": lambda l, m: (m - l) / m,
}

# those that cannot be told without the number of layers
_RELATIVE = frozenset({"linear", "linear-paper"})


def factor(schedule: str, layer: int, num_layers: int | None = None) -> float:
    """lambda of update `layer` (1-based) out of `num_layers`."""
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 1:
        raise ValueError(f"layer counts from 1, got {layer!r}.")
    if num_layers is None:
        if schedule in _RELATIVE:
            raise ValueError(f"the {schedule!r} schedule needs num_layers, the number of updates in the stack.")
        return SCHEDULES[schedule](layer, layer)
    if layer > num_layers:
        raise ValueError(f"layer {layer} lies beyond num_layers = {num_layers} (two sublayers a block).")
    return SCHEDULES[schedule](layer, num_layers)
