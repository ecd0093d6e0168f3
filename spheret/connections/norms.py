"""The norms that schemes are made of. All compute in float32 or better and return their input's dtype."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.bounds import inverse_softplus
from spheret.connections.base import channels_last, check_dim, check_state_type
from spheret.connections.bounded import Bounded, BoundedScalar
from spheret.kernels import compute_dtype, normalize
from spheret.kernels.closed import EPS
from spheret.kernels.streams import normed_products
from spheret.support.autograd import needs_torch_ops, plain_backward
from spheret.support.errors import unknown

Device = torch.device | str | int | None


class Norm(nn.Module):
    """A map of rows (..., dim) to rows. Subclasses define it in the computing dtype, in `apply_wide`.

    channel_dim: the dimension that holds the rows' `dim` entries. (N, C, H, W) has channel_dim=1.
    """

    def __init__(self, dim: int, channel_dim: int = -1):
        super().__init__()
        self.dim, self.channel_dim = check_dim(dim), channel_dim

    def apply_wide(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define apply_wide.")

    def forward(self, x: Tensor) -> Tensor:
        check_state_type(x, Tensor)
        if self.channel_dim != -1:
            x = channels_last(x, self.dim, self.channel_dim)
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"this norm was built for rows of width {self.dim}, got shape {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"a norm takes floating-point rows, got {x.dtype}.")
        out = self.apply_wide(x.to(compute_dtype(x))).to(x.dtype)
        return out if self.channel_dim == -1 else out.movedim(-1, self.channel_dim)

    def project(self, x: Tensor, vectors: Tensor) -> Tensor:
        """The products of the normed rows with vectors (m, dim), (..., m), where no one needs the normed rows."""
        raise NotImplementedError(f"{type(self).__name__} must define project.")

    def extra_repr(self) -> str:
        return str(self.dim) if self.channel_dim == -1 else f"{self.dim}, channel_dim={self.channel_dim}"


def empty_parameter(size: int, device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """A vector that `reset_parameters` fills."""
    return nn.Parameter(torch.empty(size, device=device, dtype=dtype))


class Gain(nn.Module):
    """x times a learned vector of `size` entries, each `start` at the start, times the number `fixed`.

    A gain of size 1 is a learned scalar.
    """

    def __init__(
        self,
        size: int,
        start: float,
        fixed: float = 1.0,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.start, self.fixed = start, fixed
        self.weight = empty_parameter(size, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        # torch multiplies in the wider dtype of the two and keeps x in its own
        gain = self.weight.to(compute_dtype(x))
        return (x * (gain if self.fixed == 1 else self.fixed * gain)).to(x.dtype)


class LayerNorm(Norm):
    """nanoGPT's LayerNorm: gain 1 and, if there is one, bias 0 at the start; eps 1e-5."""

    def __init__(
        self,
        dim: int,
        bias: bool = True,
        eps: float = 1e-5,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim)
        self.eps = eps
        self.weight = empty_parameter(dim, device, dtype)
        self.bias = empty_parameter(dim, device, dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def apply_wide(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (self.dim,), self.weight.to(x.dtype), bias, self.eps)

    def project(self, x: Tensor, vectors: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        products = normed_products(x, vectors * weight, self.eps, centre=True)
        return products if self.bias is None else products + vectors @ self.bias.to(x.dtype)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * _inverse_rms(x, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class _RMS(torch.autograd.Function):
    """`_rms` that keeps its input and one number per row. autograd would keep weight x as well.

    Every product and sum of the backward is autograd's own. x is given twice, because autograd adds its two gradients
    to that of the residual path one after the other. So the gradients are the same, bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse, ctx.eps = _inverse_rms(x, eps), eps
        ctx.save_for_backward(x, weight, inverse)
        return (weight * x).mul_(inverse)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if needs_torch_ops(g):
            # what is differentiated again depends on x
            inverse = _inverse_rms(x, ctx.eps)
        scaled = g * inverse
        along = -0.5 * (g * (weight * x)).sum(-1, keepdim=True) * inverse.pow(3) / x.shape[-1]
        of_mean, of_product = (along * (2 * x), scaled * weight) if ctx.needs_input_grad[0] else (None, None)
        of_weight = (scaled * x).sum_to_size(weight.shape) if ctx.needs_input_grad[2] else None
        return of_mean, of_product, of_weight, None


class RMSNorm(Norm):
    """gain x / sqrt(mean x^2 + eps), gain `start` at the start. It has no bias; `bias` is ignored."""

    def __init__(
        self,
        dim: int,
        bias: bool = False,
        eps: float = 1e-5,
        *,
        start: float = 1.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim)
        self.eps, self.start = eps, start
        self.weight = empty_parameter(dim, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def apply_wide(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return _RMS.apply(x, x, weight, self.eps) if plain_backward(x) else _rms(x, weight, self.eps)

    def project(self, x: Tensor, vectors: Tensor) -> Tensor:
        return normed_products(x, vectors * self.weight.to(x.dtype), self.eps)


# where the gain of a normed branch starts if nobody says
BRANCH_GAIN = 0.3


def make_branch_norm(
    dim: int, branch_norm: bool | float | None, *, device: Device = None, dtype: torch.dtype | None = None
) -> RMSNorm | None:
    """The norm of a branch's output, whose gain starts at `branch_norm`, or None. True is `BRANCH_GAIN`."""
    if branch_norm is None or branch_norm is False:
        return None
    start = BRANCH_GAIN if branch_norm is True else branch_norm
    if not isinstance(start, (int, float)) or not (math.isfinite(start) and start > 0):
        raise ValueError(
            f"branch_norm must be None, True or a number greater than 0, where the gain starts, got {branch_norm!r}."
        )
    return RMSNorm(dim, eps=EPS, start=float(start), device=device, dtype=dtype)


NORMS: dict[str, Callable[[int, bool], Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(norm: str, dim: int, bias: bool) -> Norm:
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    return NORMS[norm](dim, bias)


class HeadNorm(nn.Module):
    """Norms of q and k per head, and of v if `values`, each with a gain of its own that all its heads share.

    q, k and v are (batch, heads, time, dim).
    """

    def __init__(self, dim: int, norm: str = "rmsnorm", bias: bool = False, values: bool = False):
        super().__init__()
        if dim < 2:
            raise ValueError(
                "queries and keys are normed, and a head of one entry has only a sign: take fewer heads."
            )
        self.q_norm, self.k_norm = make_norm(norm, dim, bias), make_norm(norm, dim, bias)
        self.v_norm = make_norm(norm, dim, bias) if values else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k), v if self.v_norm is None else self.v_norm(v)


class DynamicTanh(Norm):
    """w tanh(a x) + b, a = slope at the start (arXiv 2503.10622)."""

    # the learned scalars
    scalars: ClassVar[tuple[str, ...]] = ("a",)
    a: nn.Parameter

    def __init__(
        self,
        dim: int,
        slope: float = 1.0,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim)
        largest = torch.finfo(torch.float32).max
        if not abs(slope) <= largest:
            raise ValueError(f"slope must lie between {-largest:.2g} and {largest:.2g}, got {slope}.")
        self.slope = slope
        for name in self.scalars:
            self.register_parameter(name, empty_parameter(1, device, dtype))
        self.weight = empty_parameter(dim, device, dtype)
        self.bias = empty_parameter(dim, device, dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in self.scalars:
            nn.init.constant_(getattr(self, name), self.slope if name == "a" else 0.0)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def squash(self, x: Tensor) -> Tensor:
        """The function of each entry, before the gain and the bias."""
        return (self.a.to(x.dtype) * x).tanh()

    def apply_wide(self, x: Tensor) -> Tensor:
        y = self.weight.to(x.dtype) * self.squash(x)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class DynamicErf(DynamicTanh):
    """w erf(a x + s) + b, a = slope and s = 0 at the start (arXiv 2512.10938)."""

    scalars = ("a", "shift")
    shift: nn.Parameter

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.a.to(x.dtype) * x + self.shift.to(x.dtype))


class DynamicISRU(Norm):
    """w sqrt(d) x / sqrt(|b| + x^2), b = d at the start: RMSNorm's slope at 0 (arXiv 2503.21708).

    The source assumes b > 0. |b| keeps the result finite if training pushes b through 0.
    """

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(dim)
        self.b = empty_parameter(1, device, dtype)
        self.weight = empty_parameter(dim, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.b, float(self.dim))
        nn.init.ones_(self.weight)

    def apply_wide(self, x: Tensor) -> Tensor:
        return math.sqrt(self.dim) * self.weight.to(x.dtype) * x * (self.b.to(x.dtype).abs() + x * x).rsqrt()


class PlainScaleNorm(Norm):
    """g x/|x|, g = sqrt d at the start (arXiv 1910.05895)."""

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(dim)
        self.g = empty_parameter(1, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.g, math.sqrt(self.dim))

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, self.g)


def check_radius(radius: float | Literal["sqrt"], dim: int | None = None) -> None:
    """Raise an error unless a ScaleNorm can start there. Without `dim` the largest radius is not checked."""
    number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    high = math.inf if dim is None else math.sqrt(dim)
    if radius != "sqrt" and not (number and math.isfinite(radius) and 1 <= radius <= high):
        width = "" if dim is None else f" = {high:.5g} at width {dim}"
        raise ValueError(
            f'radius must be "sqrt" or a number from 1 to sqrt(dim){width}, got {radius!r}: the paper\'s modified '
            "ScaleNorm keeps the radius in this interval."
        )


class ScaleNorm(Norm, Bounded):
    r"""The modified ScaleNorm at the entry of a spherical stream: `h = R h/|h|`.

    Paper: Eq. 11 (modified ScaleNorm).

    The radius R = clamp(softplus(gamma), 1, sqrt d) is learned. It chooses the sphere on which all later spherical
    connections stay. A row of zeros stays zero and gets no gradient, so that a class token or a padding row that
    starts at 0 never trains: the first passes warn of one.

    Args:
        dim: the width of the stream, d.
        exact_clamp: use the paper's torch.clamp, whose gradient is 0 beyond the bound (see spheret.bounds).
        channel_dim: the dimension that holds the rows' `dim` entries. (N, C, H, W) has channel_dim=1.
        radius: where R starts: "sqrt" for the paper's sqrt d, or a number from 1 to sqrt d.
        device: where the parameter is made.
        dtype: the dtype of the parameter.
    """

    # how many passes with a gradient are still looked at for rows of zeros
    _passes_to_check: int = 3

    def __init__(
        self,
        dim: int,
        exact_clamp: bool = False,
        channel_dim: int = -1,
        *,
        radius: float | Literal["sqrt"] = "sqrt",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim, channel_dim)
        check_radius(radius, dim)
        self.start_radius = math.sqrt(dim) if isinstance(radius, str) else float(radius)
        self.exact_clamp = exact_clamp
        self.gamma = empty_parameter(1, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, inverse_softplus(self.start_radius))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        # compiled code must not depend on the counter, which comes last
        if plain_backward(x) and x.requires_grad and self._passes_to_check:
            self._warn_of_zeros(x)
        return out

    def _warn_of_zeros(self, x: Tensor) -> None:
        # to look at values makes a GPU wait, so this happens in few passes
        self._passes_to_check -= 1
        if type(x) is Tensor and not x.is_meta and bool((x.detach() == 0).all(self.channel_dim).any()):
            self._passes_to_check = 0
            warnings.warn(
                "a row of zeros enters the sphere, where it has no direction: it stays zero and gets no gradient. "
                "Start a class token, a padding row or a position at small random values.",
                stacklevel=4,
            )

    @property
    def radius(self) -> Tensor:
        """R, a 1-element tensor."""
        return self.bounded_softplus(self.gamma, 1.0, math.sqrt(self.dim))

    def radius_value(self) -> float:
        """R as a Python number. It gathers a sharded gamma."""
        return self.bounded_scalars()[0].value()

    def bounded_scalars(self) -> list[BoundedScalar]:
        return [BoundedScalar("gamma", self.gamma, 1.0, math.sqrt(self.dim))]

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, self.radius)
