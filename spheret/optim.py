"""Weight decay and gradients of bounded scalars: what an optimiser needs to handle in a model with connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spheret.bounds import stop_outward
from spheret.connections import Bounded


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: matrices decay, all other parameters do not.

    Decay would pull the step sizes a_l, the radius gamma, a learned p, gains and biases towards 0, which is not a
    neutral value for them. Every learnable scalar of this library is a 1-element vector. So nanoGPT's rule applies:
    parameters of two or more dimensions decay. Shared parameters appear once. Frozen parameters are left out.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": float(weight_decay)},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _bounded(model: nn.Module) -> Iterator[Bounded]:
    # torch.clamp stops a gradient by the value alone, so its gradients add up as they are
    return (m for m in model.modules() if isinstance(m, Bounded) and not m.exact_clamp)


def sum_bounded_gradients(model: nn.Module) -> None:
    """Let every gradient of the bounded scalars through from now on.

    A loop that sums several backward passes calls this once, and `stop_outward_gradients` before each optimiser
    step. Then gradient accumulation and data parallelism give the gradient of the whole batch (see spheret.bounds).
    Bounded scalars are those of every `Bounded` module of the model.
    """
    for module in _bounded(model):
        module.passing = True


@torch.no_grad()
def stop_outward_gradients(model: nn.Module) -> None:
    """Set the gradient of each bounded scalar to 0 if a step along it would leave the interval."""
    for module in _bounded(model):
        for _, parameter, low, high in module.bounded_scalars():
            if parameter.grad is not None:
                parameter.grad = stop_outward(parameter, parameter.grad, low, high)
