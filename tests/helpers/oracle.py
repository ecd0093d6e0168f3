"""The definitions, written out a second time and literally; nothing here imports spheret."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

PS = (1e-3, 0.1, 0.5, 1.0, 2.0, 3.7, 50.0, 1e6, math.inf)
CAPS = (None, math.pi / 4, 0.01)


def definition(
    h: Tensor, f: Tensor, alpha: float, p: float | Callable[[Tensor], Tensor], cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gram-Schmidt and a rotation in float64: the next state, its angle and c = <h,f>/|h|^2.

    The angle is theta = p arctan(beta/p), or p(beta) if p is a function.
    """
    h, f = h.double(), f.double()
    r = h.norm(dim=-1, keepdim=True)
    e1 = h / r
    along = (e1 * f).sum(-1, keepdim=True)
    z = f - along * e1
    # a second pass removes the part along h that rounding left
    z = z - (e1 * z).sum(-1, keepdim=True) * e1
    s = z.norm(dim=-1, keepdim=True)
    e2 = torch.where(s > 0, z / torch.where(s > 0, s, 1.0), 0.0)
    beta = alpha * s / r
    theta = p(beta) if callable(p) else beta if math.isinf(p) else p * torch.atan(beta / p)
    if cap is not None:
        theta = theta.clamp(max=cap)
    return r * (theta.cos() * e1 + theta.sin() * e2), theta, along / r


def rows(n: int, d: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def normwise(result: Tensor, truth: Tensor) -> Tensor:
    """The error of each row relative to the norm of the true row."""
    return (result.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
