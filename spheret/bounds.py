r"""A learnable scalar that is kept in an interval: clamp(softplus(x), low, high) of a parameter x.

torch.clamp has a trap here. Both scalars of the paper start exactly on their upper bound. One step beyond it, the
gradient of torch.clamp is 0 and stays 0. So here every gradient passes, wherever x is, as in
scale softplus(x). It is linear in the incoming gradient, so the gradients of micro-batches and of processes add up to
the gradient of the whole batch. What is stopped is the update: after each optimiser step x is put back on the bound
that it crossed (see spheret.connections.bounded). `exact_clamp` gives the paper's torch.clamp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spheret.support.autograd import needs_torch_ops, recorded, transformed


def inverse_softplus(y: float) -> float:
    """The x with softplus(x) = y, for y > 0; -inf for y = 0.

    From 20 on it is the identity, like torch's softplus.
    """
    if y == 0:
        return -math.inf
    return y if y >= 20 else math.log(math.expm1(y))


def _value(x: Tensor, low: float, high: float, scale: float | Tensor) -> Tensor:
    """The value of the clamp with the gradient of the softplus, in plain torch ops: the difference is exactly 0."""
    y = F.softplus(x)
    return scale * (y.clamp(low, high).detach() + (y - y.detach()))


def _number(x: Tensor, low: float, high: float, scale: float) -> Tensor:
    # max and min keep a NaN that is their first argument
    return torch.full_like(x, min(max(F.softplus(x).item(), low), high) * scale)


class _BoundedNumber(torch.autograd.Function):
    """The same for one number on the CPU, in Python arithmetic, which is much cheaper than tensor ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return _number(x, low, high, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if needs_torch_ops(g):
            return g * (ctx.scale * torch.sigmoid(x)), None, None, None
        # the slope of softplus is 1 - exp(-softplus)
        y = F.softplus(x).item()
        return torch.full_like(x, g.item() * ctx.scale * -math.expm1(-y)), None, None, None


def bounded_softplus(
    x: Tensor, low: float, high: float, exact_clamp: bool = False, scale: float | Tensor = 1.0
) -> Tensor:
    """scale clamp(softplus(x), low, high) in float32 or better.

    The gradient is that of scale softplus(x), also on the bounds and beyond. With `exact_clamp` it is that of
    torch.clamp.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if exact_clamp:
        return scale * torch.clamp(F.softplus(x), low, high)
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not transformed()
    if plain and not isinstance(scale, Tensor) and x.numel() == 1 and x.device.type == "cpu" and not recorded():
        if not torch.is_grad_enabled():
            return _number(x, low, high, scale)
        return _BoundedNumber.apply(x, low, high, scale)
    return _value(x, low, high, scale)
