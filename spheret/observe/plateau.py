"""The plateau of the unigram entropy, where a model knows only token frequencies: is it on it, and does it move?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

# a loss this close to the unigram entropy, as a share of it, belongs to a model that knows only token frequencies
ENTROPY_MARGIN = 0.03
# the median of so many losses is compared, because one batch may be easier or harder than all
PLATEAU_WINDOW = 10
# while losses are there, the sublayers are measured this often, whenever else there are looks
LOOK = 10
# mean cosines of the states of tokens: worth a word, and worth an alarm
ALIKE, STUCK_COSINE = 0.95, 0.999
# a model is stuck if nothing has moved for this share of all updates, and at least for so many
STUCK_SHARE, STUCK_LEAST = 0.4, 30
# what counts as a move: a factor of the distance between tokens, 1 - cosine, and a share of the loss
_APART, _FALLS = 1.5, 0.02
# a distance is lost in rounding below; so large a part of all pairs in order is a rise nevertheless
_ROUNDING, _ORDERED = 1e-6, 0.6
# so many looks are remembered; where there are more, every second one
_MOST = 64


def on_plateau(losses: Sequence[float], unigram_entropy: float | None) -> bool:
    """Whether the median of the last PLATEAU_WINDOW losses, the newest last, lies at the unigram entropy."""
    if unigram_entropy is None or len(losses) < PLATEAU_WINDOW:
        return False
    return abs(statistics.median(losses[-PLATEAU_WINDOW:]) - unigram_entropy) < ENTROPY_MARGIN * unigram_entropy


def remembered(looks: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The looks at the plateau that are kept: of many, the first, the last and every second one between."""
    return [*looks[:-1:2], looks[-1]] if len(looks) > _MOST else looks


def lately(looks: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The looks (step, loss, cosine) of the last STUCK_SHARE of all updates; none if the plateau is shorter."""
    if not looks:
        return []
    last = looks[-1][0]
    start = last - max(STUCK_LEAST, STUCK_SHARE * last)
    return [] if looks[0][0] > start else [look for look in looks if look[0] >= start]


def is_stuck(looks: Sequence[tuple[int, float, float]]) -> bool:
    """Whether all states have been one for long, and neither the loss nor the distance between tokens moves."""
    window = lately(looks)
    if len(window) < 3 or min(cosine for _, _, cosine in window) < STUCK_COSINE:
        return False
    apart = [max(1 - cosine, 0.0) for _, _, cosine in window]
    losses = [loss for _, loss, _ in window]
    third = max(1, len(window) // 3)
    falls = statistics.fmean(losses[-third:]) < (1 - _FALLS) * statistics.fmean(losses[:third])
    visible = [max(each, _ROUNDING) for each in apart]
    return not (falls or max(visible) > _APART * min(visible) or _rises(apart))


def _rises(values: Sequence[float]) -> bool:
    """Whether most pairs ascend: a model that leaves a collapse does so exponentially, from 1e-8 on."""
    pairs = list(itertools.combinations(values, 2))
    return sum((b > a) - (b < a) for a, b in pairs) > _ORDERED * len(pairs)
