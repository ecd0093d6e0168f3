"""By how much the measures of each sublayer changed, for the place of a divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spheret.observe.records import Measure, SublayerObservation

# smaller angles and shares of the gradient are noise
LEAST_ANGLE, LEAST_SHARE, TINY = 0.01, 1e-3, 1e-30
# what a sublayer did before and does now, by measure
_SENTENCES = {
    "angle": "it turned the stream by {:.2g} radians and now turns it by {:.2g}",
    "gradient share": "it had {:.1%} of the gradient norm and now has {:.1%}",
    "norm factor": "it multiplied the norm of the stream by {:.3g} and now by {:.3g}",
}


@dataclass(frozen=True, slots=True)
class Change:
    """A measure of a sublayer before and now. size: the logarithm of the change."""

    size: float
    sublayer: int
    measured: Measure
    before: float
    now: float

    @property
    def sentence(self) -> str:
        return _SENTENCES[self.measured].format(self.before, self.now)


def changes(before: Sequence[SublayerObservation], now: Sequence[SublayerObservation]) -> list[Change]:
    """One change for every sublayer and measure.

    Each measure is the sublayer's own. The norm is divided by the norm of the sublayer before, as later sublayers
    inherit it. The gradient norm is divided by the norm over all sublayers, and only a rise counts: where one share
    rises, others fall.
    """
    found: list[Change] = []
    all_gradients = [math.hypot(*(_number(record.grad_norm) for record in records)) for records in (before, now)]
    for index, pair in enumerate(zip(before, now, strict=True)):
        number = pair[0].sublayer
        first, last = (_number(record.angle_mean) for record in pair)
        found.append(Change(abs(_log_ratio(first, last, LEAST_ANGLE)), number, "angle", first, last))
        first, last = (
            _number(record.grad_norm) / max(total, TINY) for record, total in zip(pair, all_gradients, strict=True)
        )
        found.append(Change(_log_ratio(first, last, LEAST_SHARE), number, "gradient share", first, last))
        if index:
            first, last = (
                _number(records[index].norm) / max(_number(records[index - 1].norm), TINY)
                for records in (before, now)
            )
            found.append(Change(abs(_log_ratio(first, last, TINY)), number, "norm factor", first, last))
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _log_ratio(first: float, last: float, least: float) -> float:
    """log(last / first), with values below `least` raised to it; 0 if one is not finite."""
    if not (math.isfinite(first) and math.isfinite(last)):
        return 0.0
    return math.log(max(last, least) / max(first, least))
