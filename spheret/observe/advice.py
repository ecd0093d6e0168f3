"""What an untrained GPT predicts, what may go wrong with it (docs/collapse.md), and which flags help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from spheret.model.config import GPTConfig
from spheret.model.gpt import GPT
from spheret.model.head import own_logit
from spheret.observe.calls import quietly
from spheret.observe.records import Start
from spheret.observe.rules import HIGH_OWN_LOGIT
from spheret.support.precision import wide

if TYPE_CHECKING:
    from spheret.runs.config import TrainConfig

# nats; of bytes of English they are worth 2.5
HIGH_FREQUENCIES = 0.5
# a warm-up of this many updates kept runs from collapsing that collapsed with a few dozen
LONG_WARMUP = 100
# above this rate no run of ours was of use, and above 0.3 most diverged: docs/settings.md
HIGH_RATE, USUAL_RATE = 0.1, 1e-3


def against_collapse(model: GPTConfig, train: TrainConfig) -> str:
    """The flags that keep tokens from collapsing, for a sentence: docs/collapse.md."""
    high = train.lr > HIGH_RATE
    # one digit that counts
    lower = f"--lr {USUAL_RATE if high else float(f'{train.lr / 3:.0e}'):g}"
    # at a high rate every connection collapses
    flags = [lower] if high else []
    if model.head_bias != "unigram":
        flags.append("--head-bias unigram")
    if model.head == "tied":
        flags.append("--head shifted")
    updates = min(max(2 * train.warmup, LONG_WARMUP), train.steps // 2)
    if updates > train.warmup:
        flags.append(f"--warmup {updates}")
    return f"the most promising first: {', '.join(flags if high else [*flags, lower])}"


def own_logit_and_loss(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """`own_logit` without the head's bias, and the mean loss, from one forward pass in evaluation mode."""
    own: list[float] = []

    def measure(module: nn.Module, args: tuple[Tensor], h: Tensor) -> None:
        weight = model.head_weight()
        # one window at a time, because logits are large
        own.extend(
            own_logit(F.linear(model.read_out(states), weight), ids)
            for states, ids in zip(h.split(1), tokens.split(1), strict=True)
        )

    handle = model.final_norm.register_forward_hook(measure)
    try:
        with quietly(model):
            losses = model.token_losses(tokens, targets)
    finally:
        handle.remove()
    return statistics.fmean(own), float(wide(losses).mean())


def expected_start(model: GPT, unigram_entropy: float | None) -> float:
    """The loss of a model that knows nothing: ln(vocabulary), or the unigram entropy if its head's bias knows it."""
    if model.config.head_bias == "unigram" and unigram_entropy is not None:
        return unigram_entropy
    return math.log(model.config.vocab)


def start_of(model: GPT, tokens: Tensor, targets: Tensor, unigram_entropy: float | None) -> Start:
    """What the untrained model predicts."""
    own, loss = own_logit_and_loss(model, tokens, targets)
    return Start(own, loss, expected_start(model, unigram_entropy))


def radius_of(model: GPT) -> float | None:
    """The radius of the sphere on which the entry puts the stream, or None if the stream is not on one."""
    radius_value: Callable[[], float] | None = getattr(model.entry_norm, "radius_value", None)
    return None if radius_value is None else radius_value()


def start_warning(model: GPT, start: Start, entropy: float | None, advice: str) -> str | None:
    """What to know before the first update about a stream of constant norm.

    entropy: the entropy of the token frequencies, if it is known. advice: what helps.
    """
    own, loss, reasons = start.own_logit, start.loss, []
    if radius_of(model) is None or own is None or loss is None:
        return None
    if model.config.head == "tied" and own >= HIGH_OWN_LOGIT:
        reasons.append(
            f"the model starts by predicting the current token, because its head is the transposed embedding: the "
            f"token's own logit is {own:.1f} above the mean, and the loss {loss:.2f} is {start.distance}"
        )
    if entropy is not None and start.expected - entropy >= HIGH_FREQUENCIES:
        reasons.append(
            f"the stream has to carry the token frequencies, which are worth {start.expected - entropy:.2f} nats, "
            "because the head has no bias that starts at them"
        )
    if not reasons:
        return None
    return (
        f"{'; and '.join(reasons)}. Training then moves all tokens in one direction first, and a stream of constant "
        f"norm may stay collapsed there. What helps, {advice}. docs/collapse.md explains it"
    )
