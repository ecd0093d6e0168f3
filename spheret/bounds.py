r"""A learnable scalar that is kept in an interval: clamp(softplus(x), low, high) of a parameter x.

torch.clamp has a trap here. Both scalars of the paper start exactly on their upper bound. One step beyond it, the
gradient of torch.clamp is 0 and stays 0. So the backward pass here stops only gradients that point outward: on a
bound or beyond it, the outward gradient is 0 and the inward gradient passes. `exact_clamp` gives the paper's
torch.clamp.

This rule depends on the sign of the gradient. If each micro-batch applies it alone, the sum over micro-batches is not
the gradient of the whole batch. A loop that sums several backward passes therefore lets every gradient through
(`passing`) and stops the outward part of the sum once (`stop_outward`). `spheret.optim` does both for a whole model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spheret.support.autograd import Function, needs_torch_ops, transformed


def inverse_softplus(y: float) -> float:
    """The x with softplus(x) = y, for y > 0. From 20 on it is the identity, like torch's softplus."""
    return y if y >= 20 else math.log(math.expm1(y))


class _BoundedSoftplus(Function):
    @staticmethod
    def forward(x: Tensor, low: float, high: float, scale: float, passing: bool) -> Tensor:
        return F.softplus(x).clamp(low, high) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, low, high, scale, passing = inputs
        ctx.options = (-math.inf, math.inf, scale) if passing else (low, high, scale)
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # a descent step moves along -g
        return _inward(ctx.saved_tensors[0], -g, *ctx.options).neg(), None, None, None, None

    @staticmethod
    def pushforward(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        return _inward(ctx.saved_tensors[0], t, *ctx.options)


def _number(x: Tensor, low: float, high: float, scale: float) -> Tensor:
    y = F.softplus(x).item()
    return torch.full_like(x, min(max(y, low), high) * scale) if y == y else torch.full_like(x, y)


class _BoundedNumber(torch.autograd.Function):
    """The same for one number on the CPU, in Python arithmetic, which is much cheaper than tensor ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float, scale: float, passing: bool) -> Tensor:
        ctx.options = (-math.inf, math.inf, scale) if passing else (low, high, scale)
        ctx.save_for_backward(x)
        return _number(x, low, high, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rest = (None, None, None, None)
        if needs_torch_ops(g):
            return _inward(x, -g, *ctx.options).neg(), *rest
        low, high, scale = ctx.options
        y, push = F.softplus(x).item(), g.item()
        outward = (y >= high and push < 0) or (y <= low and push > 0)
        # the slope of softplus is 1 - exp(-softplus)
        return torch.full_like(x, 0.0 if outward else push * scale * -math.expm1(-y)), *rest


def _inward(x: Tensor, t: Tensor, low: float, high: float, scale: float) -> Tensor:
    """The slope of the softplus times t; 0 where x is on a bound or beyond it and t points outward."""
    y = F.softplus(x)
    outward = ((y >= high) & (t > 0)) | ((y <= low) & (t < 0))
    return torch.where(outward, 0.0, t * (scale * torch.sigmoid(x)))


def stop_outward(x: Tensor, gradient: Tensor, low: float, high: float) -> Tensor:
    """The gradient with respect to x, set to 0 where x is on a bound or beyond it and descent would move outward."""
    y = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))
    outward = ((y >= high) & (gradient < 0)) | ((y <= low) & (gradient > 0))
    return torch.where(outward, torch.zeros_like(gradient), gradient)


def bounded_softplus(
    x: Tensor,
    low: float,
    high: float,
    exact_clamp: bool = False,
    scale: float = 1.0,
    passing: bool = False,
) -> Tensor:
    """scale clamp(softplus(x), low, high) in float32 or better.

    Inward gradients pass on the bounds and beyond, unless `exact_clamp`. With `passing` all gradients pass.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if exact_clamp:
        return scale * torch.clamp(F.softplus(x), low, high)
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not transformed()
    if plain and x.numel() == 1 and x.device.type == "cpu":
        if not torch.is_grad_enabled():
            return _number(x, low, high, scale)
        return _BoundedNumber.apply(x, low, high, scale, passing)
    return _BoundedSoftplus.call(x, low, high, scale, passing)
