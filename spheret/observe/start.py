"""What an untrained GPT predicts, and what may go wrong with it: docs/collapse.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from spheret.model.gpt import GPT
from spheret.model.head import own_logit
from spheret.observe.calls import quietly
from spheret.observe.records import Start
from spheret.observe.remedies import Advice, flags_of
from spheret.observe.rules import HIGH_OWN_LOGIT
from spheret.support.precision import wide

# nats; of bytes of English they are worth 2.5
HIGH_FREQUENCIES = 0.5


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


def start_warning(model: GPT, start: Start, entropy: float | None, advice: Iterable[Advice]) -> str | None:
    """What to know before the first update about a stream of constant norm.

    entropy: the entropy of the token frequencies, if it is known.
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
        f"norm may stay collapsed there. What helps, {flags_of(advice)}. docs/collapse.md explains it"
    )
