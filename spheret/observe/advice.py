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
from spheret.support.precision import wide

if TYPE_CHECKING:
    from spheret.runs.config import TrainConfig

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


def start_of(model: GPT, tokens: Tensor, targets: Tensor, unigram_entropy: float | None) -> Start:
    """What the untrained model predicts, and the loss of a model that knows only what its head's bias starts at."""
    own, loss = own_logit_and_loss(model, tokens, targets)
    known = unigram_entropy if model.config.head_bias == "unigram" else None
    return Start(own, loss, math.log(model.config.vocab) if known is None else known)


def radius_of(model: GPT) -> float | None:
    """The radius of the sphere on which the entry puts the stream, or None if the stream is not on one."""
    radius_value: Callable[[], float] | None = getattr(model.entry_norm, "radius_value", None)
    return None if radius_value is None else radius_value()
