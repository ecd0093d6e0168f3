"""Gradient clipping for a model with bounded scalars."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spheret.connections import Bounded


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
