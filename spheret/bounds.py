r"""A learnable scalar that lives in an interval: value clamp(softplus(x), low, high).

torch.clamp has a trap here. Both scalars of the paper start exactly on their upper bound; one step over it,
and clamp's gradient is 0 for ever. So the backward stops only a gradient that points outward: on a bound or
beyond it the outward gradient is 0 and the inward one passes. `exact_clamp` gives the paper's torch.clamp.

That choice looks at the sign of a gradient, so a sum of micro-batches, each stopped by itself, is not the gradient
of their batch. Whoever sums several backward passes lets all of it through (`passing`) and stops what points outward
once, in the sum: `stop_outward`, which `spheret.optim` does for a whole model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spheret.support.autograd import Function, needs_torch_ops, transformed


def inverse_softplus(y: float) -> float:
    """x with softplus(x) = y > 0; like torch's softplus it is the identity from 20 on."""
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
        # a descent step is -g: a negative gradient pushes up
        return _inward(ctx.saved_tensors[0], -g, *ctx.options).neg(), None, None, None, None

    @staticmethod
    def pushforward(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        return _inward(ctx.saved_tensors[0], t, *ctx.options)


def _number(x: Tensor, low: float, high: float, scale: float) -> Tensor:
    y = F.softplus(x).item()
    return torch.full_like(x, min(max(y, low), high) * scale) if y == y else torch.full_like(x, y)


class _BoundedNumber(torch.autograd.Function):
    """The same for one number on the CPU, in Python's own arithmetic: much cheaper than as many tensor ops."""

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
    """The softplus's slope times t, and 0 where x is on a bound or beyond and t points outward."""
    y = F.softplus(x)
    outward = ((y >= high) & (t > 0)) | ((y <= low) & (t < 0))
    return torch.where(outward, 0.0, t * (scale * torch.sigmoid(x)))


def stop_outward(x: Tensor, gradient: Tensor, low: float, high: float) -> Tensor:
    """The gradient with respect to x, 0 where x is on a bound or beyond and descent would go further."""
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
    """scale clamp(softplus(x), low, high) in float32 or better; alive on its bounds unless `exact_clamp`."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if exact_clamp:
        return scale * torch.clamp(F.softplus(x), low, high)
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not transformed()
    if plain and x.numel() == 1 and x.device.type == "cpu":
        if not torch.is_grad_enabled():
            return _number(x, low, high, scale)
        return _BoundedNumber.apply(x, low, high, scale, passing)
    return _BoundedSoftplus.call(x, low, high, scale, passing)
