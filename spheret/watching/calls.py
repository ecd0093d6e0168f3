"""What a model is called with, and what it returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# the rows of a batch that the trial forward pass is given
_TRIAL_ROWS = 2


def token_ids(args: Any, kwargs: Any) -> Tensor | None:
    """The tokens that a model is called with: the first tensor of integers with two dimensions."""
    given = [kwargs["input_ids"]] if isinstance(kwargs.get("input_ids"), Tensor) else [*args, *kwargs.values()]
    return next(
        (x for x in given if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)), None
    )


def loss_of(output: Any) -> Tensor | None:
    """A loss that a model returns: a scalar, `.loss`, ["loss"], or the first of several."""
    first = output[0] if isinstance(output, tuple) and output else output
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    for each in (named, first):
        if isinstance(each, Tensor) and each.is_floating_point() and each.numel() == 1:
            return each
    return None


def logits_of(output: Any) -> Tensor | None:
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    for each in (named, output):
        if isinstance(each, Tensor) and each.dim() == 3:
            return each
    return None


def has_tied_head(model: nn.Module, vocab: int) -> bool:
    """Whether the matrix of an embedding is also the head: two modules hold it, or no other one is of its shape."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and len(m.weight) == vocab]
    for weight in weights:
        owners = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
        alike = [p for p in model.parameters() if p.shape == weight.shape]
        if len(owners) > 1 or len(alike) == 1:
            return True
    return False


def first_rows(given: Any) -> Any:
    """The same arguments with the first rows of every tensor, if all have as many; None if one is of another kind."""
    tensors: list[Tensor] = []

    def gather(x: Any) -> bool:
        if isinstance(x, Tensor):
            tensors.append(x)
            return True
        if isinstance(x, dict):
            return all(map(gather, x.values()))
        if isinstance(x, (list, tuple)):
            return all(map(gather, x))
        return x is None or isinstance(x, (bool, int, float, str))

    if not gather(given):
        return None
    lengths = {len(x) for x in tensors if x.dim()}
    if len(lengths) != 1:
        return given

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[:_TRIAL_ROWS] if x.dim() else x
        if isinstance(x, dict):
            return {key: cut(value) for key, value in x.items()}
        return type(x)(map(cut, x)) if type(x) in (list, tuple) else x

    return cut(given)
