"""The paper's arithmetic in torch ops: the truth that every other backend is tested against in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from spheret.kernels.closed import EPS, compute_dtype, power_of_two, ratio_of, scales
from spheret.retractions import P, Retraction


def retract(
    h: Tensor, f: Tensor, alpha: P, retraction: Retraction, p: P, cap: float | None, gain: Tensor | None = None
) -> Tensor:
    r"""h' = cos(theta) h + |h| sin(theta) z/|z|,  theta = theta(alpha |z|/|h|),  z = f - <h,f>/|h|^2 h.

    The paper clamps a squared norm at 1e-12. This clamps at the smallest normal number, and scales rows of extreme
    size by powers of two, so that it holds for rows of any size. A row of zeros has no direction and stays as it is.
    With a gain the branch's output is normed first.
    """
    dtype, wide = h.dtype, compute_dtype(h, f)
    h, f = h.to(wide), f.to(wide)
    if gain is not None:
        small = power_of_two(f).clamp(max=1.0)
        f = small * f
        f = gain.to(f.dtype) * f / (f.square().mean(-1, keepdim=True) + EPS * small**2).sqrt()
    s, t = scales(h, f)
    h, f = s * h, t * f
    tiny = torch.finfo(h.dtype).tiny
    h_norm_sq = (h * h).sum(-1, keepdim=True)
    h_norm = h_norm_sq.clamp(min=tiny).sqrt()
    z = f - ((h * f).sum(-1, keepdim=True) / h_norm_sq.clamp(min=tiny)) * h
    z_norm = (z * z).sum(-1, keepdim=True).clamp(min=tiny).sqrt()
    theta = retraction.theta(alpha * (z_norm / h_norm) * ratio_of(s, t), p)
    if cap is not None:
        theta = theta.clamp(min=-cap, max=cap)
    out = theta.cos() * h + (h_norm * theta.sin()) * (z / z_norm)
    return (torch.where(h_norm_sq == 0, h, out) / s).to(dtype)
