r"""A learnable scalar that lives in an interval: value clamp(softplus(x), low, high).

torch.clamp has a trap here. Both scalars of the paper start exactly on their upper bound; one step over it,
and clamp's gradient is 0 for ever. So the backward stops only a gradient that points outward: on a bound or
beyond it the outward gradient is 0 and the inward one passes. `exact_clamp` gives the paper's torch.clamp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse_softplus(y: float) -> float:
    """x with softplus(x) = y > 0; like torch's softplus it is the identity from 20 on."""
    return y if y >= 20 else math.log(math.expm1(y))


class _Bound(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, low: float, high: float) -> Tensor:
        return y.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, ctx.low, ctx.high = inputs
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        # a descent step is -g: a negative gradient pushes up
        outward = ((y >= ctx.high) & (g < 0)) | ((y <= ctx.low) & (g > 0))
        return torch.where(outward, 0.0, g), None, None


class _BoundForwardMode(_Bound):
    # apart from its base because torch.compile refuses a Function that has a jvp

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        outward = ((y >= ctx.high) & (t > 0)) | ((y <= ctx.low) & (t < 0))
        return torch.where(outward, 0.0, t)


def bounded_softplus(x: Tensor, low: float, high: float, exact_clamp: bool = False) -> Tensor:
    """clamp(softplus(x), low, high) in float32 or better, alive on its bounds unless `exact_clamp`."""
    y = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))
    if exact_clamp:
        return torch.clamp(y, low, high)
    function = _Bound if torch.compiler.is_compiling() else _BoundForwardMode
    return function.apply(y, low, high)
