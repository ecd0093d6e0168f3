"""Sampling of the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# a logit divided by less may be infinite in float32
LEAST_TEMPERATURE = 1e-6


def check_prompt(tokens: Tensor, new: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise an error for invalid arguments of `GPT.generate`."""
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"a prompt is (batch, time) with at least one token, got {tuple(tokens.shape)}.")
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= 1 / LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0, which takes the likeliest token, or lie between {LEAST_TEMPERATURE:g} and "
            f"{1 / LEAST_TEMPERATURE:g}, got {temperature}."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}.")
    if new < 0:
        raise ValueError(f"new must be at least 0, got {new}.")


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One token per row, (batch, 1), from logits (batch, vocab)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        # keep the smallest set of tokens whose probability is at least top_p
        outside = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) >= top_p
        # the likeliest token is always inside, also if float32 has no number as small as top_p
        outside[..., 0] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
