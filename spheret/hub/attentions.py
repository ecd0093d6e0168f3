"""The attention weights of every layer, for `output_attentions=True`. The model itself never holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spheret.connections import State
from spheret.model.gpt import GPT


def attention_weights(
    gpt: GPT, states: Sequence[State], cache: Any, mask: Tensor | None, positions: Tensor
) -> tuple[Tensor, ...]:
    """One tensor (batch, heads, time, keys) per layer, as transformers' eager attention returns them.

    The queries and keys are computed a second time. The weights are those before dropout.

    states: the scheme's state before each block.
    cache: transformers' cache after the forward pass, or None. It holds the keys of earlier tokens too.
    mask: as the model saw it: boolean, or added to the scores, or None for causal attention.
    positions: those of the tokens, (batch or 1, time).
    """
    weights = []
    for index, (block, state) in enumerate(zip(gpt.each_block(), states, strict=True)):
        attention, x = block.attention, block.attention_connection.read(state)
        keys = None if cache is None else cache.layers[index].keys
        weights.append(attention.weights(x, attention.rotation(positions), keys, mask))
    return tuple(weights)
