"""What a model achieves, which a certificate says before anything else: a model that does nothing is stable too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import is_inactive, moved
from spheret.model.monitor import ENTROPY_MARGIN, mean_cosine
from spheret.model.probes import Sublayer
from spheret.support.documents import Positive, Record


class AchievedSublayer(Record):
    """What one sublayer does to the stream."""

    sublayer: Positive
    angle: float
    moved: float | None
    inactive: bool


class AchievementRecord(Record):
    """What the model achieves. `learned` is null if the loss of token frequencies alone is not known."""

    loss: float | None
    tokens: Positive
    unigram_entropy: float | None
    learned: bool | None
    token_cosine: float
    sublayers: list[AchievedSublayer]
    # by number
    inactive: list[Positive]

    def __post_init__(self) -> None:
        if not self.sublayers:
            raise ValueError("sublayers has at least one row")
        if (self.learned is None) != (self.unigram_entropy is None):
            raise ValueError("learned and unigram_entropy belong together: both or none is null")


@torch.no_grad()
def achievement(model: Decoder, x: Tensor, y: Tensor, unigram_entropy: float | None) -> AchievementRecord:
    """The loss on inputs x with targets y, (windows, time), and what every sublayer does to the stream there.

    unigram_entropy: the loss of token frequencies alone, in nats; None if it is not known.
    learned: whether the loss is below it; None if it is not known.
    """
    sublayers: list[AchievedSublayer] = []
    cosine = math.nan

    def measure(s: Sublayer) -> None:
        nonlocal cosine
        share = moved(s)
        sublayers.append(
            AchievedSublayer(
                sublayer=s.number,
                angle=float(s.angle.median()),
                moved=float(share.median()),
                inactive=is_inactive(share),
            )
        )
        cosine = float(mean_cosine(s.out))

    with model.probe(measure):
        loss = float(model.token_losses(x, y).double().mean())
    learned = None if unigram_entropy is None else bool(loss < (1 - ENTROPY_MARGIN) * unigram_entropy)
    return AchievementRecord(
        loss=loss if math.isfinite(loss) else None,
        tokens=y.numel(),
        unigram_entropy=unigram_entropy,
        learned=learned,
        token_cosine=cosine,
        sublayers=sublayers,
        inactive=[row.sublayer for row in sublayers if row.inactive],
    )


def sentences(achieved: AchievementRecord) -> list[str]:
    """What is achieved, in words, beginning with what is wrong."""
    loss = "not finite" if achieved.loss is None else f"{achieved.loss:.4g}"
    entropy, learned = achieved.unigram_entropy, achieved.learned
    if learned is None:
        first = f"The loss is {loss} on {achieved.tokens:,} tokens. The loss of token frequencies alone is not known."
    elif learned:
        first = f"The model has learned: its loss is {loss}, and token frequencies alone give {entropy:.4g}."
    else:
        first = (
            f"The model predicts no better than token frequencies: its loss is {loss}, and these give {entropy:.4g}."
        )
    dead = inactive_sentence(achieved.inactive, len(achieved.sublayers))
    angles = [row.angle for row in achieved.sublayers]
    rest = (
        f"The mean cosine between tokens after the last sublayer is {achieved.token_cosine:.3g}. "
        f"A sublayer turns the stream by {min(angles):.2g} to {max(angles):.2g} radians (median of the tokens)."
    )
    if learned is False or not dead:
        return [first, *([dead] if dead else []), rest]
    return [dead, first, rest]


def inactive_sentence(inactive: list[int], count: int) -> str:
    """Which of `count` sublayers do nothing; empty if all do something."""
    if not inactive:
        return ""
    names = "all of them" if len(inactive) == count else ", ".join(map(str, inactive))
    return (
        f"{len(inactive)} of {count} sublayers are inactive: their branch moves the stream by less than float32 "
        f"resolves ({names})."
    )
