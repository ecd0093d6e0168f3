"""The paper's own pseudocode (its Appendix C) for comparison, with its clamps at 1e-12.

`alpha` is the step size. The paper's listings compute it in the same function, from softplus, clamp and schedule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def proj_spheretnorm(h_in: Tensor, fh: Tensor, alpha: Tensor) -> Tensor:
    h_in_norm_sq = (h_in * h_in).sum(dim=-1, keepdim=True).clamp(min=1e-12)
    h_in_norm = h_in_norm_sq.sqrt()
    h_in_trs_dot_fh = (h_in * fh).sum(dim=-1, keepdim=True)
    z = fh - (h_in_trs_dot_fh / h_in_norm_sq) * h_in
    h_plus = h_in + alpha * z
    h_plus_norm_sq = (h_plus * h_plus).sum(dim=-1, keepdim=True).clamp(min=1e-12)
    return h_in_norm * (h_plus / h_plus_norm_sq.sqrt())


def _tangent(h_in: Tensor, fh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h_in_norm_sq = (h_in * h_in).sum(dim=-1, keepdim=True).clamp(min=1e-12)
    h_in_trs_dot_fh = (h_in * fh).sum(dim=-1, keepdim=True)
    z = fh - (h_in_trs_dot_fh / h_in_norm_sq) * h_in
    z_norm_sq = (z * z).sum(dim=-1, keepdim=True).clamp(min=1e-12)
    return h_in_norm_sq.sqrt(), z, z_norm_sq.sqrt()


def cay_spheretnorm(h_in: Tensor, fh: Tensor, alpha: Tensor) -> Tensor:
    h_in_norm, z, z_norm = _tangent(h_in, fh)
    beta_max = math.tan(math.pi / 4 * 0.5) * 2.0
    gamma = torch.minimum(alpha, beta_max * (h_in_norm / z_norm))
    beta = gamma * (z_norm / h_in_norm)
    beta_sq = beta * beta
    return ((4 - beta_sq) * h_in + 4 * gamma * z) / (4 + beta_sq)


def p_spheretnorm(h_in: Tensor, fh: Tensor, alpha: Tensor, p: float = 0.5) -> Tensor:
    h_in_norm, z, z_norm = _tangent(h_in, fh)
    z_hs = z / z_norm
    theta = p * torch.arctan(alpha * (z_norm / h_in_norm) / p)
    return torch.cos(theta) * h_in + (h_in_norm * torch.sin(theta)) * z_hs


def geonorm(h_in: Tensor, fh: Tensor, alpha: Tensor) -> Tensor:
    h_in_norm, z, z_norm = _tangent(h_in, fh)
    z_hs = z / z_norm
    beta = (alpha * (z_norm / h_in_norm)).clamp(max=math.pi / 4)
    return torch.cos(beta) * h_in + h_in_norm * torch.sin(beta) * z_hs


# by the name of the retraction; each has the automatic cap of its row
PSEUDOCODE = {
    "projection": proj_spheretnorm,
    "cayley": cay_spheretnorm,
    "angular": p_spheretnorm,
    "exponential": geonorm,
}
