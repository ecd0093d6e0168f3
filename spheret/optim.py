"""What an optimiser needs to know about a model with connections."""

from __future__ import annotations

from typing import Any

from torch import nn


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
