"""The norms that schemes are made of. All compute in float32 or better and return their input's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.bounds import bounded_softplus, inverse_softplus
from spheret.connections.base import check_dim
from spheret.kernels import compute_dtype, normalize
from spheret.support.errors import unknown


class Norm(nn.Module):
    """A map of rows (..., dim) to rows; subclasses say what it is in the computing dtype."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = check_dim(dim)

    def apply_wide(self, x: Tensor) -> Tensor:
        raise AssertionError("a norm defines apply_wide")

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"this norm was built for rows of width {self.dim}, got shape {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"a norm takes floating-point rows, got {x.dtype}.")
        return self.apply_wide(x.to(compute_dtype(x))).to(x.dtype)

    def extra_repr(self) -> str:
        return str(self.dim)


def _affine(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = weight.to(y.dtype) * y
    return y if bias is None else y + bias.to(y.dtype)


class LayerNorm(Norm):
    """nanoGPT's: gain 1, optional bias 0, eps 1e-5."""

    def __init__(self, dim: int, bias: bool = True, eps: float = 1e-5):
        super().__init__(dim)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def apply_wide(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (self.dim,), self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(Norm):
    """gain x / sqrt(mean x^2 + eps), no bias."""

    def __init__(self, dim: int, bias: bool = False, eps: float = 1e-5):
        super().__init__(dim)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def apply_wide(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


NORMS: dict[str, Callable[[int, bool], Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(norm: str, dim: int, bias: bool) -> Norm:
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    return NORMS[norm](dim, bias)


class DynamicTanh(Norm):
    """w tanh(a x) + b (arXiv 2503.10622)."""

    def __init__(self, dim: int, slope: float = 1.0, bias: bool = True):
        super().__init__(dim)
        self.a = nn.Parameter(torch.full((1,), slope))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def apply_wide(self, x: Tensor) -> Tensor:
        return _affine((self.a.to(x.dtype) * x).tanh(), self.weight, self.bias)


class DynamicErf(Norm):
    """w erf(a x + s) + b, a = 0.5 and s = 0 at the start (arXiv 2512.10938)."""

    def __init__(self, dim: int, bias: bool = True):
        super().__init__(dim)
        self.a = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def apply_wide(self, x: Tensor) -> Tensor:
        return _affine(torch.erf(self.a.to(x.dtype) * x + self.shift.to(x.dtype)), self.weight, self.bias)


class DynamicISRU(Norm):
    """w sqrt(d) x / sqrt(|b| + x^2), b = d at the start: RMSNorm's slope at 0 (arXiv 2503.21708).

    The source takes b > 0 for granted; |b| keeps a b that training pushes through 0 from making NaN.
    """

    def __init__(self, dim: int):
        super().__init__(dim)
        self.b = nn.Parameter(torch.full((1,), float(dim)))
        self.weight = nn.Parameter(torch.ones(dim))

    def apply_wide(self, x: Tensor) -> Tensor:
        return math.sqrt(self.dim) * self.weight.to(x.dtype) * x * (self.b.to(x.dtype).abs() + x * x).rsqrt()


class PlainScaleNorm(Norm):
    """g x/|x|, g = sqrt d at the start (arXiv 1910.05895)."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.g = nn.Parameter(torch.full((1,), math.sqrt(dim)))

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, self.g)


class ScaleNorm(Norm):
    r"""The modified ScaleNorm at the entry of a spherical stream: h = R h/|h| (paper, Eq. 10).

    R = clamp(softplus(gamma), 1, sqrt d) is learned and starts at sqrt d. It chooses the sphere; every
    spherical connection after it stays there. A row of zeros stays zero. `exact_clamp` takes torch.clamp with
    its dead gradient (see spheret.bounds).
    """

    def __init__(self, dim: int, exact_clamp: bool = False):
        super().__init__(dim)
        self.exact_clamp, self.passing = exact_clamp, False
        self.gamma = nn.Parameter(torch.full((1,), inverse_softplus(math.sqrt(dim))))

    @property
    def radius(self) -> Tensor:
        """R, a 1-element tensor."""
        return bounded_softplus(self.gamma, 1.0, math.sqrt(self.dim), self.exact_clamp, passing=self.passing)

    def bounded(self) -> tuple[nn.Parameter, float, float]:
        """The parameter whose softplus is kept in an interval, and that interval."""
        return self.gamma, 1.0, math.sqrt(self.dim)

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, self.radius)
