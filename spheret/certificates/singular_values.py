"""Estimates of the largest and smallest singular value of a large operator, from its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# v (..., n) -> (..., n), one operator per leading index
Product = Callable[[Tensor], Tensor]


class Extremes(NamedTuple):
    """sigma_max and sigma_min of each operator, (...), and the residual |J' u - sigma v| of each.

    sigma_max is a lower bound and sigma_min an upper bound. Some singular value lies within the residual of each.
    """

    largest: Tensor
    smallest: Tensor
    largest_residual: Tensor
    smallest_residual: Tensor


def lanczos(
    apply: Product, transpose: Product, like: Tensor, steps: int = 96, tolerance: float = 1e-6, seed: int = 0
) -> Extremes:
    """For square operators given by their products: Golub-Kahan bidiagonalisation with full reorthogonalisation.

    like: a tensor of the shape of the vectors, (..., n), with one operator per leading index.
    After n steps the result is exact up to rounding. The iteration stops once every residual is below `tolerance`
    times its value.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    size = like.shape[-1]
    steps = min(steps, size)
    diagonal: list[Tensor] = []
    above: list[Tensor] = []
    us: list[Tensor] = []
    vs: list[Tensor] = []
    v, _ = _next(torch.zeros_like(like), vs, generator)
    extremes = None
    for step in range(1, steps + 1):
        vs.append(v)
        w = apply(v)
        if us:
            w = w - above[-1][..., None] * us[-1]
        u, length = _next(w, us, generator)
        us.append(u)
        diagonal.append(length)
        w = transpose(u) - length[..., None] * v
        v, length = _next(w, vs, generator) if step < size else (v, torch.zeros_like(length))
        above.append(length)
        # the small problem is solved every eighth step, and at the end
        if step == steps or step % 8 == 0:
            extremes = _ritz(diagonal, above)
            limit = tolerance * torch.stack([extremes.largest, extremes.smallest])
            if (torch.stack([extremes.largest_residual, extremes.smallest_residual]) <= limit).all():
                break
    assert extremes is not None
    return extremes


def _next(w: Tensor, basis: list[Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The unit vector of w's part orthogonal to the basis, and that part's length.

    Where nothing is left of w, the length is 0 and the vector is a random direction orthogonal to the basis.
    """
    before = w.norm(dim=-1)
    w = _orthogonal(w, basis)
    length = w.norm(dim=-1)
    lost = length <= 1e-12 * before.clamp(min=torch.finfo(w.dtype).tiny)
    if lost.any():
        fresh = torch.randn(w.shape, dtype=w.dtype, device=w.device, generator=generator)
        w = torch.where(lost[..., None], _orthogonal(fresh, basis), w)
        length = torch.where(lost, 0.0, length)
    return w / w.norm(dim=-1, keepdim=True), length


def _orthogonal(w: Tensor, basis: list[Tensor]) -> Tensor:
    if basis:
        known = torch.stack(basis, -2)
        # rounding makes a second pass necessary; a third changes nothing
        for _ in range(2):
            w = w - (known.mT @ (known @ w[..., None])).squeeze(-1)
    return w


def _ritz(diagonal: list[Tensor], above: list[Tensor]) -> Extremes:
    """The extreme singular values of the bidiagonal matrix, and their residuals."""
    small = torch.diag_embed(torch.stack(diagonal, -1))
    if len(diagonal) > 1:
        small = small + torch.diag_embed(torch.stack(above[:-1], -1), offset=1)
    left, values, _ = torch.linalg.svd(small)
    # J'u - sigma v points along the next v, and its length is proportional to u's last coordinate
    residual = above[-1].abs()[..., None] * left[..., -1, :].abs()
    return Extremes(values[..., 0], values[..., -1], residual[..., 0], residual[..., -1])
