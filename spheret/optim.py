"""AdamW, weight decay and gradient clipping for a model with connections."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Bounded


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: matrices decay, all other parameters do not.

    Decay would pull the step sizes a_l, the radius gamma, a learned p, gains and biases towards 0, which is not a
    neutral value for them. Every learnable scalar of this library is a 1-element vector. So nanoGPT's rule applies:
    parameters of two or more dimensions decay. Shared parameters appear once. Frozen parameters are left out.

    Args:
        model: any module.
        weight_decay: that of the matrices, at least 0.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": float(weight_decay)},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the import of torch._dynamo, which takes a second at the start of every run.

    torch keeps these methods out of compiled graphs, and imports dynamo for it. No graph here holds an optimiser.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    # the first optimiser that is made puts the hooks of a step around it again
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`. Returns the norm before.

    A gradient that would push a bounded scalar beyond its bound is set to 0 first. The bound would take that push
    back after the step, so it counts neither in the norm nor in the optimiser's moments. Call this when the gradients
    are complete: summed over all micro-batches and processes.

    Args:
        model: any module.
        max_norm: the largest norm that is kept.
    """
    for module in model.modules():
        if isinstance(module, Bounded):
            module.drop_outward_gradients()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
