r"""The Jacobian of one spherical update in closed form, and the bounds that the paper proves for it.

With r = |h|, z = (I - hh'/r^2) f, s = |z|, eta = s/r, beta = |alpha| eta, u = h/r, v = z/s (0 where s = 0) and

    A = DF(h)    c = <h,f>/r^2    B = A - c I    P = I - uu'

the update h' = cos(theta) h + r sin(theta) v has the Jacobian J = Q + E (paper, appendix: Full Jacobian):

    Q = cos(theta) I + sin(theta) (vu' - uv')
    E = |alpha| sin(theta)/beta (P - vv') B + theta'(beta) (cos(theta) v - sin(theta) u) (|alpha| v'B - beta u')

    |E| <= delta = |alpha| |sin(theta)/beta| |B| + |theta'(beta)| (|alpha| |B| + beta)
        <= Delta = |alpha| (2 |B| + eta)
    sigma_max(J) <= 1 + Delta        sigma_min(J) >= m = max(0, q - Delta),    q = |cos(theta)|

At s = 0 these are Q = I and E = alpha P B, the paper's zero-tangent case. At the angle cap theta' = 0. The paper
writes theta' = p^2/(p^2 + beta^2) for its angular family; here theta' is that of the retraction's own angle.
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
    """The plane and the angle of an update; u and v are (..., d), the other fields (...)."""

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
    """The two terms of J = Q + E, and the B inside E: (..., d, d) each."""

    Q: Tensor
    E: Tensor
    B: Tensor

    @property
    def J(self) -> Tensor:
        return self.Q + self.E


class Bounds(NamedTuple):
    """What follows from an upper bound on |B|; every field is (...)."""

    Delta: Tensor
    delta: Tensor
    q: Tensor
    m: Tensor
    m_exact: Tensor  # m with delta in place of Delta

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
    """The plane and the angle by which each row of h (..., d) turns towards f.

    Args:
        h: the states.
        f: the branch's outputs.
        alpha: a number, or one number per row with last dimension 1.
        retraction: as in `spheret.retract`.
        max_angle: as in `spheret.retract`.
        p: used in place of the retraction's own p, for a learned p.
    """
    row = as_retraction(retraction)
    check_rows(h, f)
    check_cap(max_angle)
    r = h.norm(dim=-1, keepdim=True)
    if (r == 0).any():
        raise ValueError(
            "a row of zeros lies on no sphere, so the update has no Jacobian there: leave such rows out."
        )
    u = h / r
    along = (u * f).sum(-1, keepdim=True)
    z = f - along * u
    # a second pass removes what rounding left along h
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
    # a negative step is a positive step in the opposite direction
    v = torch.where(s > 0, z / torch.where(s > 0, s, 1.0), 0.0) * torch.where(step < 0, -1.0, 1.0)
    scalars = (along / r, step.expand_as(s), eta, beta, theta, slope, gain, at_cap)
    return Turn(u, v, *(x.squeeze(-1) for x in scalars))


def _with_slope(theta: Callable[[Tensor], Tensor], beta: Tensor) -> tuple[Tensor, Tensor]:
    """theta(beta) and its derivative."""
    result = torch.func.jvp(theta, (beta,), (torch.ones_like(beta),))
    return result[0], result[1]


def closed_form(t: Turn, A: Tensor) -> Parts:
    """Q, E and B of an update, whose sum Q + E is its Jacobian.

    Args:
        t: the turn.
        A: the Jacobian of the branch at h, (..., d, d).
    """
    u, v = t.u[..., None], t.v[..., None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    B = A - _lift(t.c) * eye
    cos, sin = _lift(t.theta.cos()), _lift(t.theta.sin())
    Q = cos * eye + sin * (v @ u.mT - u @ v.mT)
    # B takes the sign of alpha, as v already does
    signed = torch.where(_lift(t.alpha) < 0, -B, B)
    size, slope = _lift(t.alpha.abs()), _lift(t.slope)
    across = signed - u @ (u.mT @ signed) - v @ (v.mT @ signed)
    away = slope * (cos * v - sin * u) @ (size * (v.mT @ signed) - _lift(t.beta) * u.mT)
    return Parts(Q, size * _lift(t.gain) * across + away, B)


def _lift(x: Tensor) -> Tensor:
    return x[..., None, None]


def bounds(t: Turn, norm: Tensor) -> Bounds:
    """The bounds of each row.

    Args:
        t: the turns.
        norm: the norm of each row's own B, or an upper bound on it, (...).
    """
    return _bounds(t.alpha.abs(), t.gain.abs(), t.slope.abs(), t.beta, t.eta, t.theta.cos().abs(), norm)


def sequence_bounds(t: Turn, norm: Tensor) -> Bounds:
    r"""The bounds for rows whose branch mixes them: t is (rows,), and norm is that of B as an operator on all rows.

    Q and the factors of E other than B are block diagonal, so the norm of each is that of its largest block:

        |E| <= max |alpha gain| |B| + max |theta'| |alpha| |B| + max |theta' beta|  <=  |alpha| (2 |B| + max eta)
    """
    alpha, gain = t.alpha.abs().amax(-1), t.gain.abs().amax(-1)
    slope, turned = t.slope.abs().amax(-1), (t.slope.abs() * t.beta).amax(-1)
    # _bounds multiplies slope by beta, and that product must be the largest of the rows
    beta = torch.where(slope > 0, turned / torch.where(slope > 0, slope, 1.0), 0.0)
    return _bounds(alpha, gain, slope, beta, t.eta.amax(-1), t.theta.cos().abs().amin(-1), norm)


def _bounds(alpha: Tensor, gain: Tensor, slope: Tensor, beta: Tensor, eta: Tensor, q: Tensor, norm: Tensor) -> Bounds:
    delta = alpha * gain * norm + slope * (alpha * norm + beta)
    # Delta >= delta holds for the paper's angles, but not for an angle that grows faster than its step
    Delta = torch.maximum(alpha * (2 * norm + eta), delta)
    return Bounds(Delta, delta, q, (q - Delta).clamp(min=0), (q - delta).clamp(min=0))


def counterexample(alpha: float, sensitivity: float, mu: float = 0.0) -> tuple[Tensor, Tensor]:
    """The state h = e1 and the matrix A = diag(mu, mu + K) of F(x) = A x; K is `sensitivity`.

    The angle is 0, and J = diag(1, 1 + alpha K). It is the paper's proof that a small angle is not enough:
    K = (R-1)/alpha gives J the norm R for any R, and K = -1/alpha makes J singular.
    """
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return h, torch.diag(torch.tensor([mu, mu + sensitivity], dtype=torch.float64))
