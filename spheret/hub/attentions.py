"""The attention weights of every layer, for `output_attentions=True`. The model itself never holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spheret.model.gpt import GPT


def attention_weights(
    gpt: GPT, states: Sequence[Tensor], cache: Any, mask: Tensor | None, positions: Tensor
) -> tuple[Tensor, ...]:
    """One tensor (batch, heads, time, keys) per layer, as transformers' eager attention returns them.

    The queries and keys are computed a second time. The weights are those before dropout.

    states: the stream before each block.
    cache: transformers' cache after the forward pass, or None. It holds the keys of earlier tokens too.
    mask: as the model saw it: boolean, or added to the scores, or None for causal attention.
    positions: those of the tokens, (batch or 1, time).
    """
    weights = []
    for index, (block, h) in enumerate(zip(gpt.each_block(), states, strict=True)):
        attention, x = block.attention, block.attention_connection.read(h)
        q, k, _ = attention.queries_keys_values(x, attention.rotation(positions))
        if cache is not None:
            k = cache.layers[index].keys
        scores = q @ attention.for_every_head(k).mT / math.sqrt(q.shape[-1])
        allowed = mask
        if mask is None and q.shape[2] > 1:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=h.device).tril()
        if allowed is not None and allowed.dtype == torch.bool:
            # a row of padding attends to nothing: the lowest number gives it equal weights, where -inf gives NaN
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        elif allowed is not None:
            scores = scores + allowed
        weights.append(scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype))
    return tuple(weights)
