"""float64, on the devices that have it."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def wide(x: Tensor) -> Tensor:
    """The tensor in the widest dtype of its device."""
    return x.to(widest(x.device))
