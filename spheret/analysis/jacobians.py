r"""The Jacobian of one spherical update in closed form, and the bounds that the paper proves of it.

With r = |h|, z = (I - hh'/r^2) f, s = |z|, eta = s/r, beta = |alpha| eta, u = h/r, v = z/s (0 where s = 0) and

    A = DF(h)    c = <h,f>/r^2    B = A - c I    P = I - uu'

the update h' = cos(theta) h + r sin(theta) v has the Jacobian J = Q + E (paper, appendix: Full Jacobian):

    Q = cos(theta) I + sin(theta) (vu' - uv')
    E = |alpha| sin(theta)/beta (P - vv') B + theta'(beta) (cos(theta) v - sin(theta) u) (|alpha| v'B - beta u')

    |E| <= delta = |alpha| |sin(theta)/beta| |B| + |theta'(beta)| (|alpha| |B| + beta)
        <= Delta = |alpha| (2 |B| + eta)
    sigma_max(J) <= 1 + Delta        sigma_min(J) >= m = max(0, q - Delta),    q = |cos(theta)|

At s = 0 these are Q = I and E = alpha P B, the paper's zero-tangent case. At the angle cap theta' = 0. The paper has
theta' = p^2/(p^2 + beta^2); here it is the derivative of whatever angle the retraction has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.kernels import check_cap, check_rows
from spheret.kernels.closed import capped
from spheret.retractions import P, Retraction, as_retraction


class Turn(NamedTuple):
    """The plane and the angle of an update: u and v are (..., d), all else (...)."""

    u: Tensor
    v: Tensor
    c: Tensor
    alpha: Tensor
    eta: Tensor
    beta: Tensor
    theta: Tensor
    slope: Tensor  # dtheta/dbeta, 0 at the cap
    gain: Tensor  # sin(theta)/beta
    at_cap: Tensor


class Parts(NamedTuple):
    """J = Q + E, and the B that E is made of: (..., d, d)."""

    Q: Tensor
    E: Tensor
    B: Tensor

    @property
    def J(self) -> Tensor:
        return self.Q + self.E


class Bounds(NamedTuple):
    """What follows from an upper bound on |B|; all (...)."""

    Delta: Tensor
    delta: Tensor
    q: Tensor
    m: Tensor
    m_exact: Tensor  # the same with delta in place of Delta

    @property
    def largest(self) -> Tensor:
        """The bound on sigma_max(J)."""
        return 1 + self.Delta


def turn(
    h: Tensor,
    f: Tensor,
    alpha: float | Tensor = 1.0,
    retraction: str | float | Retraction | Callable[[Tensor], Tensor] = "projection",
    max_angle: float | None = None,
    p: P | None = None,
) -> Turn:
    """How far and in which plane each row of h (..., d) turns towards f.

    alpha: a number, or one a row with last dimension 1. p: in place of the retraction's own, where it is learned.
    """
    row = as_retraction(retraction)
    check_rows(h, f)
    check_cap(max_angle)
    r = h.norm(dim=-1, keepdim=True)
    if (r == 0).any():
        raise ValueError("a row of zeros lies on no sphere and has no Jacobian there: leave such rows out.")
    u = h / r
    along = (u * f).sum(-1, keepdim=True)
    z = f - along * u
    # what rounding left along h goes in a second pass
    z = z - (u * z).sum(-1, keepdim=True) * u
    s = z.norm(dim=-1, keepdim=True)
    step = torch.as_tensor(alpha, dtype=h.dtype, device=h.device)
    eta = s / r
    beta = step.abs() * eta
    own_p = row.p if p is None else p
    (_, gain), over = capped(row, beta * beta, own_p, max_angle)
    theta, slope = _with_slope(lambda beta: row.theta(beta, own_p), beta)
    at_cap = torch.zeros_like(beta, dtype=torch.bool) if over is None else over
    if max_angle is not None:
        theta = torch.where(at_cap, max_angle, theta)
    slope = torch.where(at_cap, 0.0, slope)
    # a negative step is a positive one the other way
    v = torch.where(s > 0, z / torch.where(s > 0, s, 1.0), 0.0) * torch.where(step < 0, -1.0, 1.0)
    scalars = (along / r, step.expand_as(s), eta, beta, theta, slope, gain, at_cap)
    return Turn(u, v, *(x.squeeze(-1) for x in scalars))


def _with_slope(theta: Callable[[Tensor], Tensor], beta: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.func.jvp(theta, (beta,), (torch.ones_like(beta),))
    return found[0], found[1]


def closed_form(t: Turn, A: Tensor) -> Parts:
    """Q, E and B of the turn t, from A = DF(h), (..., d, d)."""
    u, v = t.u[..., None], t.v[..., None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    B = A - _lift(t.c) * eye
    cos, sin = _lift(t.theta.cos()), _lift(t.theta.sin())
    Q = cos * eye + sin * (v @ u.mT - u @ v.mT)
    # B and v carry the sign of alpha together
    signed = torch.where(_lift(t.alpha) < 0, -B, B)
    size, slope = _lift(t.alpha.abs()), _lift(t.slope)
    across = signed - u @ (u.mT @ signed) - v @ (v.mT @ signed)
    away = slope * (cos * v - sin * u) @ (size * (v.mT @ signed) - _lift(t.beta) * u.mT)
    return Parts(Q, size * _lift(t.gain) * across + away, B)


def _lift(x: Tensor) -> Tensor:
    return x[..., None, None]


def bounds(t: Turn, norm: Tensor) -> Bounds:
    """Delta, delta, q and m of each row, from the norm of its own B or anything above it, (...)."""
    return _bounds(t.alpha.abs(), t.gain.abs(), t.slope.abs(), t.beta, t.eta, t.theta.cos().abs(), norm)


def sequence_bounds(t: Turn, norm: Tensor) -> Bounds:
    r"""The same for rows that hear each other: t is (rows,), norm that of the operator B on all rows together.

    Q and the factors of E beside B are block diagonal, so each is as large as its largest block:

        |E| <= max |alpha gain| |B| + max |theta'| |alpha| |B| + max |theta' beta|  <=  |alpha| (2 |B| + max eta)
    """
    alpha, gain = t.alpha.abs().amax(-1), t.gain.abs().amax(-1)
    slope, turned = t.slope.abs().amax(-1), (t.slope.abs() * t.beta).amax(-1)
    # one slope stands for all, so the product slope * beta must stay what it was
    beta = torch.where(slope > 0, turned / torch.where(slope > 0, slope, 1.0), 0.0)
    return _bounds(alpha, gain, slope, beta, t.eta.amax(-1), t.theta.cos().abs().amin(-1), norm)


def _bounds(alpha: Tensor, gain: Tensor, slope: Tensor, beta: Tensor, eta: Tensor, q: Tensor, norm: Tensor) -> Bounds:
    delta = alpha * gain * norm + slope * (alpha * norm + beta)
    # Delta is above delta for every angle of the paper; one that turns faster than its step would break that
    Delta = torch.maximum(alpha * (2 * norm + eta), delta)
    return Bounds(Delta, delta, q, (q - Delta).clamp(min=0), (q - delta).clamp(min=0))


def counterexample(alpha: float, sensitivity: float, mu: float = 0.0) -> tuple[Tensor, Tensor]:
    """The state h = e1 and A = diag(mu, mu + K) of F(x) = A x: the angle is 0, and J = diag(1, 1 + alpha K).

    The paper's proof that control of the angle is not enough: K = (R-1)/alpha makes |J| = R, however large, and
    K = -1/alpha makes J singular.
    """
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return h, torch.diag(torch.tensor([mu, mu + sensitivity], dtype=torch.float64))
