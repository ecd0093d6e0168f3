"""Arithmetic for derivatives of other people's models: float64 throughout, and attention of each token to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spheret.support.errors import need

OWN_PATH = "spheret_own_path"


class Float64(TorchFunctionMode):
    """Within the block, code that asks for float32 gets float64.

    Most models take their norms, softmax and rotary angles in float32 whatever their weights are. In a model of
    float64 this would round the stream to seven digits.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


def own_path_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention as transformers' eager function has it, with the keys and values of other tokens held fixed.

    So each token's output is a function of its own input alone: all tokens can be differentiated at once.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    time = query.shape[2]
    own = torch.eye(time, dtype=torch.bool, device=query.device)
    scores = torch.where(own, (query * key).sum(-1, keepdim=True), query @ key.detach().mT) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None:
        future = torch.ones(time, time, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    diagonal = weights.diagonal(dim1=-2, dim2=-1)[..., None]
    fixed = value.detach()
    output = weights @ fixed + diagonal * (value - fixed)
    return output.transpose(1, 2), weights


@contextmanager
def attention_on_own_paths(configs: list[Any]) -> Iterator[None]:
    """Within the block, every attention that goes through transformers' interface is `own_path_attention`.

    configs: those of the model's modules. The attention masks must have been made outside of the block.
    """
    interface = need("transformers", "hub").AttentionInterface
    interface.register(OWN_PATH, own_path_attention)
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = OWN_PATH
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
