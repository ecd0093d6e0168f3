"""An optimiser by its name, and the learning rate of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

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
