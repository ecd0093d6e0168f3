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
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.kernels import compute_dtype
from spheret.retractions import P, Retraction

# the share of a retraction's largest angle that a row's own step size is asked to reach. At the largest angle itself
# the step size would be infinite
REACH = 0.98
_BISECTIONS = 60


def norm(x: Tensor) -> Tensor:
    """|x| of each row, (..., 1), in float32 or better. Its gradient is 0 at a row of zeros."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute_dtype(x))


def scaled(u: Tensor, factor: Tensor) -> Tensor:
    """factor u in the dtype of u."""
    wide = compute_dtype(u, factor)
    return (u.to(wide) * factor.to(wide)).to(u.dtype)


def with_unused(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x itself, which gives each of the parameters a gradient, 0: DDP waits for the gradient of every parameter."""
    # softplus of a parameter at -inf is 0, and 0 times it no NaN
    zeros = [0 * torch.nn.functional.softplus(p).sum() for p in parameters if p.requires_grad]
    return x + sum(zeros).to(x) if zeros and torch.is_grad_enabled() else x  # type: ignore[union-attr]


def on_sphere(x: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """u and rho of a stream: x = rho u."""
    ratio = norm(x) / radius
    return (x.to(ratio.dtype) * _inverse(ratio)).to(x.dtype), ratio


def _inverse(ratio: Tensor) -> Tensor:
    """1/ratio, and 0 for a row of zeros, which has no direction and stays zero."""
    return torch.where(ratio == 0, 0.0, torch.where(ratio == 0, 1.0, ratio).reciprocal())


def exact(h: Tensor, f: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """u' and rho' of the residual sum itself: h + f = rho' u'."""
    return on_sphere(h + f, radius)


def reader_input(u: Tensor, ratio: Tensor, length: Tensor | None, t: Tensor) -> Tensor:
    """rho^(1-t) length^t u: what a reader of the stream is given. A row of zeros stays zero."""
    own = torch.where(ratio == 0, 1.0, ratio).log()
    t = t.to(own.dtype)
    return scaled(u, torch.exp((1 - t) * own + (0.0 if length is None else t * length.to(own.dtype).log())))


def compress(h: Tensor, radius: Tensor) -> Tensor:
    """The rows with the lengths sqrt(R |h|)/2, from which `expand` finds h again. No other reader of them does."""
    u, ratio = on_sphere(h, radius)
    return scaled(u, ratio.sqrt() / 2)


def expand(x: Tensor, radius: Tensor) -> Tensor:
    """h from the rows of `compress`."""
    return scaled(x, 4 * norm(x) / radius)


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


def inverse_angle(retraction: Retraction, p: P, angle: Tensor) -> Tensor:
    """beta with theta(beta) = angle, for angles below the retraction's largest."""
    if retraction.angle_function is None:
        if not isinstance(p, Tensor) and math.isinf(p):
            return angle
        return p * torch.tan(angle / p)
    # a retraction that is known only by its angle is inverted by bisection. It has no gradient here
    with torch.no_grad():
        low = torch.zeros_like(angle)
        high = torch.full_like(angle, min(retraction.largest_step, 1e6))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = retraction.theta(middle, p) < angle
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


class OwnStep(NamedTuple):
    """The step size that is each row's own, (..., 1), and the angle that the retraction cannot reach with it."""

    log_alpha: Tensor
    excess: Tensor  # 0 for rows within reach
    beta: Tensor  # alpha |z|/R


def own_step(turned: Turn, radius: Tensor, retraction: Retraction, p: P, cap: float | None) -> OwnStep:
    """The alpha of each row with theta(alpha |z|/R) = angle, as far as the retraction and its cap reach.

    For the projection it is R/((1 + c)|h|).
    """
    angle = turned.angle
    largest = p * (math.pi / 2) if isinstance(p, Tensor) else retraction.largest_angle
    most = torch.as_tensor(REACH * largest, dtype=angle.dtype, device=angle.device)
    within = torch.minimum(angle, most if cap is None else most.clamp(max=cap))
    beta = inverse_angle(retraction, p, within)
    eta = turned.size / radius
    still = eta <= torch.finfo(eta.dtype).tiny
    # for z = 0 the limit is R/along; a row that its branch exactly undoes has none, and counts as long
    limit = radius / torch.where(turned.along > 0, turned.along, radius)
    alpha = torch.where(still, limit, beta / torch.where(still, 1.0, eta))
    tiny = torch.finfo(alpha.dtype).tiny
    return OwnStep(alpha.clamp(min=tiny).log(), angle - within, beta)


def blend(
    u: Tensor,
    f: Tensor,
    ratio: Tensor,
    radius: Tensor,
    alpha: Tensor,
    t: Tensor,
    retraction: Retraction,
    p: P,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """u' and rho' between the two ends: log alpha is interpolated from each row's own to log `alpha` by t.

    What a row turns beyond the retraction's reach is taken back in proportion.
    """
    turned = turn(u, f, ratio, radius)
    own = own_step(turned, radius, retraction, p, cap)
    step = torch.exp((1 - t) * own.log_alpha + t * alpha.log())
    theta = retraction.theta(step * turned.size / radius, p)
    theta = (theta if cap is None else theta.clamp(max=cap)) + (1 - t) * own.excess
    still = turned.size <= torch.finfo(theta.dtype).tiny
    sine = torch.where(still, step, radius * torch.sin(theta) / torch.where(still, 1.0, turned.size))
    out = torch.cos(theta) * u + sine * turned.z
    # where f is nearly parallel to u, what rounding left in z is not orthogonal to u
    return out * (radius * _inverse(norm(out))), turned.ratio


def slope(retraction: Retraction, p: P, beta: Tensor) -> Tensor:
    """d theta/d log alpha = beta theta'(beta): how much the turn answers to the step size."""
    if retraction.angle_function is not None or (not isinstance(p, Tensor) and math.isinf(p)):
        return beta
    return beta / (1 + (beta / p) ** 2)
