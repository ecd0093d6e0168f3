"""What an optimiser needs to know about a model with connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spheret.bounds import stop_outward
from spheret.connections import ScaleNorm, SpheretNorm


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: matrices decay, everything else does not.

    Decay would pull the step sizes a_l, the radius gamma, a learned p, gains and biases towards 0, which is no
    neutral value for them. Every learnable scalar here is a 1-element vector, so nanoGPT's rule serves: what
    has two dimensions or more decays. Parameters that are shared appear once, frozen ones not at all.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": float(weight_decay)},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _bounded(model: nn.Module) -> Iterator[SpheretNorm | ScaleNorm]:
    # torch.clamp stops by value alone, so its gradients add up as they are
    return (m for m in model.modules() if isinstance(m, (SpheretNorm, ScaleNorm)) and not m.exact_clamp)


def sum_bounded_gradients(model: nn.Module) -> None:
    """Let every gradient of the bounded scalars through from now on: for a loop that sums several backward passes.

    Call `stop_outward_gradients` on the sum before each optimiser step; then accumulation, and data in parallel, give
    the gradient of the whole batch (see spheret.bounds).
    """
    for module in _bounded(model):
        module.passing = True


@torch.no_grad()
def stop_outward_gradients(model: nn.Module) -> None:
    """Set the gradients of bounded scalars to 0 where a step along them would leave the interval."""
    for module in _bounded(model):
        parameter, low, high = module.bounded()
        if parameter.grad is not None:
            parameter.grad = stop_outward(parameter, parameter.grad, low, high)
