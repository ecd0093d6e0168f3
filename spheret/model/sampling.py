"""Sampling of the next token, and padding of rows of different length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# a logit divided by less may be infinite in float32
LEAST_TEMPERATURE = 1e-6


def check_prompt(
    tokens: Tensor,
    new: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    padding: Tensor | None,
) -> None:
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
    if padding is not None and (padding.shape != tokens.shape[:1] or int(padding.max()) >= tokens.shape[1]):
        raise ValueError(f"padding must be one number below {tokens.shape[1]} per row, got {padding.tolist()}.")


def left_padded(time: int, keys: int, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (batch, time) and mask (batch, 1, time, keys) of the last `time` of `keys` left-padded tokens."""
    key = torch.arange(keys, device=padding.device)
    query = key[-time:, None]
    # padding attends to itself, because a softmax over nothing is NaN
    mask = ((key <= query) & (key >= padding[:, None, None])) | (key == query)
    return (key[-time:] - padding.clamp(min=0)[:, None]).clamp(min=0), mask[:, None]


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
