"""An optimiser by its name, the learning rate of its groups, and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Bounded
from spheret.optim.adamw import AdamW
from spheret.optim.groups import Factors, optimizer_groups
from spheret.optim.muon import Muon
from spheret.support.errors import unknown

OPTIMIZERS = ("adamw", "muon")


def build_optimizer(
    model: nn.Module,
    optimizer: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    device: torch.device,
    factors: Mapping[str, Factors] | None = None,
    rank: int = 0,
    size: int = 1,
) -> AdamW:
    """The optimiser of OPTIMIZERS for a model on a device. rank, size: as in `Muon`."""
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    groups = optimizer_groups(model, weight_decay, optimizer, factors)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "fused": device.type in ("cpu", "cuda")}
    return Muon(groups, rank=rank, size=size, **options) if optimizer == "muon" else AdamW(groups, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group: `lr` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


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
