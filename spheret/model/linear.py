"""nn.Linear, with a way of its own for the single rows that generation is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; a single row on the CPU, without a gradient, goes to all cores.

    A matrix times a vector is bound by memory, and BLAS gives it to one core; cut into a batch it goes to all.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows, width = weight.shape
    parts = torch.get_num_threads()
    if x.numel() != width or parts == 1 or rows % parts or not weight.is_contiguous() or type(weight) not in PLAIN:
        return F.linear(x, weight, bias)
    pieces = torch.bmm(x.reshape(1, 1, width).expand(parts, 1, width), weight.view(parts, -1, width).mT)
    y = pieces.view(*x.shape[:-1], rows)
    return y if bias is None else y + bias.to(y.dtype)


PLAIN = (Tensor, nn.Parameter)


class Linear(nn.Linear):
    """y = W x + b."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
