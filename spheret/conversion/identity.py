r"""The mathematics of a conversion, as functions of rows: how a residual sum looks from the sphere.

A stream h is kept as a point u on the sphere of radius R and one number per row, the ratio rho = |h|/R: h = rho u.
With L = |h|, c = <h,f>/L^2 and z = f - c h, a residual sum turns u and changes rho:

    along = (1 + c) L            tan theta = |z|/along,  theta in [0, pi]
    u' = cos(theta) u + R sin(theta) z/|z|               rho' = sqrt(along^2 + |z|^2)/R

For the projection retraction, theta = atan(alpha |z|/R), this is a step of size alpha = R/along, if along > 0.
docs/convert.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spheret.kernels import compute_dtype
from spheret.retractions import P, Retraction
from spheret.support.autograd import recorded, transformed

# the share of a retraction's largest angle that a row's own step size is asked to reach. At the largest angle itself
# the step size would be infinite
REACH = 0.98
_BISECTIONS = 60


def norm(x: Tensor) -> Tensor:
    """|x| of each row, (..., 1), in float32 or better. Its gradient is 0 at a row of zeros."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute_dtype(x))


class _Lengthened(torch.autograd.Function):
    """ratio u, whose gradient for the ratio needs no row of its own."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, ratio: Tensor) -> Tensor:
        ctx.save_for_backward(u, ratio)
        return u * ratio

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        u, ratio = ctx.saved_tensors
        return g * ratio, torch.linalg.vecdot(g, u).unsqueeze(-1).sum_to_size(ratio.shape)


def _plain_ops() -> bool:
    """Whether the formulas must run as torch ops. torch.compile fuses them by itself."""
    return torch.compiler.is_compiling() or recorded() or transformed()


def lengthened(u: Tensor, ratio: Tensor) -> Tensor:
    """ratio u in the dtype of u: the stream as its reader knows it."""
    if u.dtype != ratio.dtype:
        return (u.to(ratio.dtype) * ratio).to(u.dtype)
    return u * ratio if _plain_ops() else _Lengthened.apply(u, ratio)


class _WithUnused(torch.autograd.Function):
    """A tensor, and a gradient of zeros for parameters that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def with_unused(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x itself, which gives each of the parameters a gradient, 0: DDP waits for the gradient of every parameter."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return x
    if _plain_ops():
        # softplus of a parameter at -inf is 0, and 0 times it no NaN
        return x + sum(0 * torch.nn.functional.softplus(parameter) for parameter in trained)
    return _WithUnused.apply(x, *trained)


def on_sphere(x: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """u and rho of a stream that is not on the sphere yet: x = rho u."""
    ratio = norm(x) / radius
    return (x.to(ratio.dtype) * _inverse(ratio)).to(x.dtype), ratio


def _inverse(ratio: Tensor) -> Tensor:
    """1/ratio, and 0 for a row of zeros, which has no direction and stays zero."""
    return torch.where(ratio == 0, 0.0, torch.where(ratio == 0, 1.0, ratio).reciprocal())


def _delta(x: Tensor, h: Tensor, f: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    total = h + f
    ratio = norm(total) / radius
    return total * _inverse(ratio) - x, ratio


class _ExactDelta(torch.autograd.Function):
    """`exact_delta` with a backward that makes few passes over the rows and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, f: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        total = h + f
        ratio = norm(total) / radius
        ctx.save_for_backward(h, f, radius, ratio)
        # in place: on CPUs, fresh memory costs more than the arithmetic
        return total.mul_(_inverse(ratio)).sub_(x), ratio

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_ratio: Tensor) -> tuple[Tensor | None, ...]:
        h, f, radius, ratio = ctx.saved_tensors
        total, inverse = h + f, _inverse(ratio)
        dot = torch.linalg.vecdot(g, total).unsqueeze(-1)
        # u' = total/ratio and ratio = |total|/R
        slope = (g_ratio - dot * inverse * inverse) * inverse / (radius * radius)
        if torch.is_grad_enabled():
            g_total = g * inverse + total * slope
        else:
            g_total = total.mul_(slope).addcmul_(g, inverse)
        g_radius = ((dot * inverse - g_ratio * ratio).sum() / radius).reshape(radius.shape)
        return -g, g_total, g_total, g_radius


def exact_delta(x: Tensor, h: Tensor, f: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """u' - x and rho' of the residual sum h + f = rho' u', where x is what the layer itself will add to.

    All rows are in one dtype, float32 or float64.
    """
    return _delta(x, h, f, radius) if _plain_ops() else _ExactDelta.apply(x, h, f, radius)


class Turn(NamedTuple):
    """The parts of a residual sum, seen from u; all but z are (..., 1)."""

    z: Tensor  # the part of f that is orthogonal to u
    size: Tensor  # |z|
    along: Tensor  # (1 + c) |h|, which is negative if the sum turns by more than pi/2
    ratio: Tensor  # rho'

    @property
    def angle(self) -> Tensor:
        """theta, from 0 to pi."""
        return torch.atan2(self.size, self.along)


def turn(u: Tensor, f: Tensor, ratio: Tensor, radius: Tensor) -> Turn:
    """What the sum rho u + f does, for u of norm `radius`. All rows are in float32 or float64."""
    part = torch.linalg.vecdot(u, f).unsqueeze(-1) / radius
    z = f - u * (part / radius)
    zz = torch.linalg.vecdot(z, z).unsqueeze(-1)
    # the square root has no finite gradient at 0
    size = torch.where(zz == 0, 0.0, torch.where(zz == 0, 1.0, zz).sqrt())
    along = ratio * radius + part
    square = along.square() + zz
    length = torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())
    return Turn(z, size, along, length / radius)


def inverse_angle(row: Retraction, p: P, angle: Tensor) -> Tensor:
    """beta with theta(beta) = angle, for angles below the retraction's largest."""
    if row.angle_function is None:
        if not isinstance(p, Tensor) and math.isinf(p):
            return angle
        return p * torch.tan(angle / p)
    # a retraction that is known by its angle alone is inverted by bisection. It has no gradient here
    with torch.no_grad():
        low = torch.zeros_like(angle)
        high = torch.full_like(angle, min(row.largest_step, 1e6))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = row.theta(middle, p) < angle
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


class OwnStep(NamedTuple):
    """The step size that is each row's own, (..., 1), and the angle that the retraction cannot reach with it."""

    log_alpha: Tensor
    excess: Tensor  # 0 for rows within reach
    beta: Tensor  # alpha |z|/R


def own_step(turned: Turn, radius: Tensor, row: Retraction, p: P, cap: float | None) -> OwnStep:
    """The alpha of each row with theta(alpha |z|/R) = angle, as far as the retraction and its cap reach.

    For the projection it is R/((1 + c)|h|).
    """
    angle = turned.angle
    largest = p * (math.pi / 2) if isinstance(p, Tensor) else row.largest_angle
    most = torch.as_tensor(REACH * largest, dtype=angle.dtype, device=angle.device)
    within = torch.minimum(angle, most if cap is None else most.clamp(max=cap))
    beta = inverse_angle(row, p, within)
    eta = turned.size / radius
    still = eta <= torch.finfo(eta.dtype).tiny
    # for z = 0 the limit is R/along; a row that its branch exactly undoes has none, and counts as long
    limit = radius / torch.where(turned.along > 0, turned.along, radius)
    alpha = torch.where(still, limit, beta / torch.where(still, 1.0, eta))
    tiny = torch.finfo(alpha.dtype).tiny
    return OwnStep(alpha.clamp(min=tiny).log(), angle - within, beta)


def blended(
    u: Tensor,
    f: Tensor,
    ratio: Tensor,
    radius: Tensor,
    alpha: Tensor,
    t: Tensor,
    row: Retraction,
    p: P,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """u' and rho' between the two ends: log alpha is interpolated from each row's own to log `alpha` by t.

    What a row turns beyond the retraction's reach is taken back in proportion.
    """
    turned = turn(u, f, ratio, radius)
    own = own_step(turned, radius, row, p, cap)
    step = torch.exp((1 - t) * own.log_alpha + t * alpha.log())
    theta = row.theta(step * turned.size / radius, p)
    theta = (theta if cap is None else theta.clamp(max=cap)) + (1 - t) * own.excess
    still = turned.size <= torch.finfo(theta.dtype).tiny
    sine = torch.where(still, step, radius * torch.sin(theta) / torch.where(still, 1.0, turned.size))
    out = torch.cos(theta) * u + sine * turned.z
    # where f is nearly parallel to u, what rounding left in z is not orthogonal to u
    return out * (radius * _inverse(norm(out))), turned.ratio


def slope(row: Retraction, p: P, beta: Tensor) -> Tensor:
    """d theta/d log alpha = beta theta'(beta): how much the turn answers to the step size."""
    if row.angle_function is not None or (not isinstance(p, Tensor) and math.isinf(p)):
        return beta
    return beta / (1 + (beta / p) ** 2)
