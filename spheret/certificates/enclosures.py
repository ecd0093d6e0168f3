r"""Proven intervals for the extreme singular values of Jacobians, and of products of them.

Let J be a float64 matrix. Take any V, nearly orthogonal, and any positive numbers s. Then J V = U diag(s) defines U.
With a >= |I - U'U| and b >= |I - V'V|, every singular value of J lies in

    s_i [sqrt((1 - a)/(1 + b)), sqrt((1 + a)/(1 - b))]        s sorted

because a factor on either side of diag(s) changes its singular values by at most its own (Ostrowski). V comes from an
eigenvalue or singular value decomposition, which need not be accurate. s are the norms of the columns of J V. Only a,
b and the columns must be bounded with their rounding errors. A vector v gives sigma_min <= |J v|/|v| <= sigma_max. A
matrix within r of J has singular values within r of J's (Weyl).

For a product G = J_L ... J_1, let P_k be the float64 product of J_k and P_(k-1), and |J_k P_(k-1) - P_k| <= d_k. Then
J_k P_(k-1) = P_k (I + H_k) with |H_k| <= h_k = d_k/sigma_min(P_k), so that G = P_L (I + H_L) ... (I + H_1), and

    sigma_i(G)  lies in  sigma_i(P_L) [prod (1 - h_k), prod (1 + h_k)]

The loss of digits is that of the condition number, not that of the product of all norms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.certificates.midpoint_radius import U, gamma

# above this condition number an eigenvalue decomposition of M'M has lost too many digits to the squaring
_SQUARED = 1e3
# the roundings of the few scalar operations that follow
_UP, _DOWN = 1 + 64 * U, 1 - 64 * U
_TINY = 1e-300
# how many times shorter than the longest a column is before it is scaled down
_SHORT = 1e2


class Enclosure(NamedTuple):
    """Intervals that hold sigma_max and sigma_min of each matrix, (...) each, and the values between them."""

    sigma_max: Tensor
    sigma_min: Tensor
    max_low: Tensor
    max_high: Tensor
    min_low: Tensor
    min_high: Tensor


class Matrices(NamedTuple):
    """Matrices (n, rows, rows), each within `radius` (n,) of its midpoint in the spectral norm."""

    mid: Tensor
    radius: Tensor


def frobenius_norm(x: Tensor) -> Tensor:
    """An upper bound on the Frobenius norm of each matrix of (..., rows, columns)."""
    size = x.abs().amax((-2, -1)).clamp(min=1e-150)
    n = x.shape[-1] * x.shape[-2]
    return (x / size[..., None, None]).square().sum((-2, -1)).sqrt() * size * (1 + 2 * gamma(n)) + _TINY


def absolute_norm(x: Tensor) -> Tensor:
    """An upper bound on the spectral norm of |x|, the absolute values, of each matrix of (..., rows, columns)."""
    size = x.abs()
    sums = size.sum(-1).amax(-1), size.sum(-2).amax(-1)
    product = (sums[0].sqrt() * sums[1].sqrt()) * (1 + 2 * gamma(max(x.shape[-2:])))
    return torch.minimum(frobenius_norm(x), product + _TINY)


def singular_values(m: Matrices, poor: Tensor | None = None) -> Enclosure:
    """The extreme singular values of each matrix; an interval that reaches 0 or infinity proves nothing there.

    poor: a boolean per matrix, if it is known already which have a large condition number. It saves time.
    """
    # a power of 2 brings the entries near 1 without rounding, so that no square overflows
    exponent = torch.frexp(torch.where(m.mid.isfinite(), m.mid, 0.0).abs().amax((-2, -1))).exponent
    scale = torch.ldexp(torch.ones_like(m.radius), exponent)
    e = _of_midpoints(m.mid / scale[:, None, None], poor)
    r = (m.radius / scale + _TINY) * _UP
    widened = (e.max_low - r).clamp(min=0), e.max_high + r, (e.min_low - r).clamp(min=0), e.min_high + r
    rounded = (x * y for x, y in zip(widened, (_DOWN, _UP, _DOWN, _UP), strict=True))
    return Enclosure(*(x * scale for x in (e.sigma_max, e.sigma_min, *rounded)))


def _of_midpoints(J: Tensor, poor: Tensor | None) -> Enclosure:
    """The extreme singular values of matrices that are known exactly, with entries of about 1 or less."""
    n = J.shape[-1]
    g = gamma(n)
    V = _right_vectors(J, poor)
    W = J @ V
    columns, norms = W.norm(dim=-2), V.norm(dim=-2)
    # no column of J V - fl(J V) is longer than this
    error = (g * absolute_norm(J) * norms.amax(-1) * (1 + g) * _UP)[:, None]
    # a column that is shorter than its error has no direction: it counts as being that long
    s = torch.maximum(columns, error).clamp(min=_TINY)
    X = W / s[:, None, :]
    gram, rounding = _gram(X)
    a = _widened((frobenius_norm(gram) * _UP + rounding) * _UP, error / s, X)
    # for sigma_max short columns need no direction of their own: scaled down by t, they disturb less
    t = (s / s.amax(-1, keepdim=True) * _SHORT).clamp(max=1.0)
    small = _widened((frobenius_norm(t[:, :, None] * gram * t[:, None, :]) * _UP + rounding) * _UP, t * error / s, X)
    gram, rounding = _gram(V)
    b = (frobenius_norm(gram) * _UP + rounding) * _UP
    known = (b < 1) & J.isfinite().all(-1).all(-1)
    over, under = ((1 - b).clamp(min=_TINY).sqrt() * _DOWN), ((1 + b).sqrt() * _UP)
    longest, shortest = s.amax(-1), s.amin(-1)
    max_high = longest * (1 + small).sqrt() / over * _UP
    min_low = shortest * (1 - a).clamp(min=0).sqrt() / under * _DOWN
    # |Jv|/|v| of the vectors at hand
    max_low = ((columns * (1 - g) - error) / (norms * (1 + g))).amax(-1).clamp(min=0) * _DOWN
    min_high = ((columns * (1 + g) + error) / (norms * (1 - g))).amin(-1) * _UP
    nothing = (0.0, math.inf, 0.0, math.inf)
    proven = (max_low, max_high, min_low, min_high)
    bounds = [torch.where(known & ~x.isnan(), x, y) for x, y in zip(proven, nothing, strict=True)]
    return Enclosure(columns.amax(-1), columns.amin(-1), *bounds)


def _gram(X: Tensor) -> tuple[Tensor, Tensor]:
    """X'X - I in float64, and an upper bound on the Frobenius norm of its rounding error."""
    n = X.shape[-1]
    size = frobenius_norm(X)
    eye = torch.eye(n, dtype=X.dtype, device=X.device)
    return X.mT @ X - eye, (gamma(X.shape[-2]) * size * size + 2 * U * n) * _UP


def _widened(defect: Tensor, error: Tensor, X: Tensor) -> Tensor:
    """A bound on |I - Y'Y| from that of X; Y's columns differ from X's by at most `error` and the rounding of X."""
    D = (error.square().sum(-1).sqrt() * (1 + gamma(error.shape[-1])) + 2 * U * frobenius_norm(X)) * _UP
    return (defect + 2 * D * (1 + defect).sqrt() + D * D) * _UP


def _safe(x: Tensor, otherwise: float) -> Tensor:
    """x, and what is true without any knowledge where x is NaN."""
    return torch.where(x.isnan(), otherwise, x)


def _right_vectors(J: Tensor, poor: Tensor | None) -> Tensor:
    """Approximate right singular vectors. Their accuracy decides the width of the intervals, never their truth."""
    usable = torch.where(J.isfinite().all(-1).all(-1)[:, None, None], J, 0.0)
    scale = usable.abs().amax((-2, -1)).clamp(min=1e-150)
    unit = usable / scale[:, None, None]
    V = torch.empty_like(unit)
    known = torch.zeros(len(J), dtype=torch.bool, device=J.device) if poor is None else poor
    if not known.all():
        values, V[~known] = torch.linalg.eigh(unit[~known].mT @ unit[~known])
        lost = values[:, 0] * _SQUARED**2 < values[:, -1]
        known = known.masked_scatter(~known, lost)
    if known.any():
        V[known] = torch.linalg.svd(unit[known])[2].mT
    return V


class Chain:
    """The product of matrices that are given one after the other, each multiplied from the left."""

    def __init__(self, like: Tensor) -> None:
        """like: a vector of each matrix, (count, rows)."""
        (count, rows), device = like.shape, like.device
        eye = torch.eye(rows, dtype=torch.float64, device=device)
        self.product = eye.expand(count, rows, rows)
        one = torch.ones(count, dtype=torch.float64, device=device)
        # G = product (I + H_L) ... (I + H_1), as long as `relative`; |G - product| <= distance always
        self.low, self.high = one, one
        self.distance = torch.zeros_like(one)
        self.norm = one
        self.poor = torch.zeros_like(one, dtype=torch.bool)

    def times(self, m: Matrices, norm: Tensor) -> Enclosure:
        """Multiply by the next matrices, of at most the given norm, and enclose the product's singular values."""
        before, rows = self.product, m.mid.shape[-1]
        self.product = m.mid @ before
        step = (m.radius * self.norm + gamma(rows) * absolute_norm(m.mid) * absolute_norm(before)) * _UP
        self.distance = _safe((norm * self.distance + step) * _UP, math.inf)
        own = singular_values(Matrices(self.product, torch.zeros_like(step)), self.poor)
        # a product that has lost its condition seldom regains it
        self.poor = own.sigma_min * _SQUARED < own.sigma_max
        self.norm = own.max_high
        # beyond 1/2 the factor says nothing, and the distance takes over
        h = torch.where(own.min_low > 0, step / own.min_low, math.inf) * _UP
        lost = h > 0.5
        self.low = torch.where(lost, 0.0, self.low * (1 - h) * _DOWN)
        self.high = torch.where(lost, math.inf, self.high * (1 + h) * _UP)
        d = self.distance
        return Enclosure(
            own.sigma_max,
            own.sigma_min,
            torch.maximum(own.max_low * self.low, own.max_low - d).clamp(min=0) * _DOWN,
            torch.minimum(_safe(own.max_high * self.high, math.inf), own.max_high + d) * _UP,
            torch.maximum(own.min_low * self.low, own.min_low - d).clamp(min=0) * _DOWN,
            torch.minimum(_safe(own.min_high * self.high, math.inf), own.min_high + d) * _UP,
        )


def condition(e: Enclosure) -> tuple[Tensor, Tensor]:
    """An interval that holds sigma_max/sigma_min of each matrix."""
    low = e.max_low / e.min_high * _DOWN
    return _safe(low, 1.0).clamp(min=1.0), torch.where(e.min_low > 0, e.max_high / e.min_low, math.inf) * _UP
