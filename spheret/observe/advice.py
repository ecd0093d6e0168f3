"""What an untrained GPT predicts, what may go wrong with it (docs/collapse.md), and which flags help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Advice:
    """Flags for a new run, and why they may help."""

    flags: str
    why: str


def flags_of(advice: Iterable[Advice]) -> str:
    """The flags of all of them, for a sentence."""
    return f"the most promising first: {', '.join(each.flags for each in advice)}"


def lower_rate(train: TrainConfig) -> Advice:
    """A lower learning rate."""
    if train.lr > HIGH_RATE:
        facts = "of 36 runs of ours at rates up to 0.3 none diverged, at 1 eight of nine did"
        return Advice(f"--lr {USUAL_RATE:g}", f"the usual rate instead of {train.lr:g}; {facts}.")
    # one digit that counts
    rate = float(f"{train.lr / 3:.0e}")
    return Advice(f"--lr {rate:g}", f"instead of {train.lr:g}. If it fails too, divide by three again.")


def longer_warmup(train: TrainConfig) -> Iterator[Advice]:
    """A longer warm-up, if half of the run is long enough for one."""
    updates = min(max(2 * train.warmup, LONG_WARMUP), train.steps // 2)
    if updates > train.warmup:
        yield Advice(f"--warmup {updates}", f"the learning rate rises more slowly than with {train.warmup} updates.")


def against_collapse(model: GPTConfig, train: TrainConfig) -> Iterator[Advice]:
    """What keeps tokens from collapsing, the most promising first: docs/collapse.md."""
    # at such a rate every connection collapses
    if train.lr > HIGH_RATE:
        yield lower_rate(train)
    if model.head_bias != "unigram":
        yield Advice("--head-bias unigram", "the head stores the token frequencies, so that the stream need not.")
    if model.head == "tied":
        yield Advice("--head shifted", "the head then does not read a token's own embedding.")
    yield from longer_warmup(train)
    if train.lr <= HIGH_RATE:
        yield lower_rate(train)


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
