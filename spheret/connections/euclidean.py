"""The rivals: connections that add in flat space, each as its own source defines it.

Unless a class says otherwise nothing happens at the entry and the exit is nanoGPT's final norm.
`norm` ("layernorm" or "rmsnorm") and `bias` choose the norm where the method leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spheret.connections.base import Connection, Initialisation, Scheme, add, check_sublayer
from spheret.connections.norms import (
    NORMS,
    DynamicErf,
    DynamicISRU,
    DynamicTanh,
    Norm,
    PlainScaleNorm,
    RMSNorm,
    make_norm,
)
from spheret.kernels import compute_dtype, normalize
from spheret.support.errors import unknown


class NormedConnection(Connection):
    r"""h' = outer(k h + output(F(inner(h)))): where the norms stand is what most methods differ in."""

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int,
        inner: nn.Module | None = None,
        output: nn.Module | None = None,
        outer: nn.Module | None = None,
        scale: float = 1.0,
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.inner = inner or nn.Identity()
        self.output = output or nn.Identity()
        self.outer = outer or nn.Identity()
        self.scale = scale

    def read(self, h: Tensor) -> Tensor:
        return self.inner(h)

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        # the sum stays wide until the outer norm has seen it
        dtype = compute_dtype(h, f)
        wide = h.to(dtype) if self.scale == 1 else self.scale * h.to(dtype)
        return self.outer(wide + self.output(f.to(dtype))).to(h.dtype)


class Scalar(nn.Module):
    """x times a learned scalar times a fixed one."""

    def __init__(self, start: float, fixed: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), start))
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        return (x.to(dtype) * (self.fixed * self.weight.to(dtype))).to(x.dtype)


@dataclass(frozen=True)
class Residual(Scheme):
    """h' = h + F(h), the paper's Euclidean case; the base of those that keep the final norm."""

    norm: str = "layernorm"
    bias: bool = True
    source: ClassVar[str] = "He et al. 2016"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)

    def make(self, dim: int) -> Norm:
        return make_norm(self.norm, dim, self.bias)

    def exit(self, dim: int) -> nn.Module:
        return self.make(dim)


@dataclass(frozen=True)
class PreLN(Residual):
    """h' = h + F(LN h), and a final LN."""

    source: ClassVar[str] = "Xiong et al. 2020; nanoGPT"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=self.make(dim))


@dataclass(frozen=True)
class PostLN(Residual):
    """h' = LN(h + F(h)), no final norm."""

    source: ClassVar[str] = "Vaswani et al. 2017"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, outer=self.make(dim))

    def exit(self, dim: int) -> nn.Module:
        return nn.Identity()


@dataclass(frozen=True)
class PeriLN(Residual):
    """h' = h + LN_out(F(LN_in h)), and a final norm."""

    source: ClassVar[str] = "arXiv 2502.02732"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=self.make(dim), output=self.make(dim))


@dataclass(frozen=True)
class MixLN(Residual):
    """Post-LN on the first quarter of the blocks (rounded down), Pre-LN after, and a final norm."""

    source: ClassVar[str] = "arXiv 2412.13795"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        early = (sublayer + 1) // 2 <= (num_sublayers + 1) // 2 // 4
        norm = self.make(dim)
        return NormedConnection(
            dim, sublayer, num_sublayers, inner=None if early else norm, outer=norm if early else None
        )


@dataclass(frozen=True)
class DeepNorm(PostLN):
    """h' = LN((2N)^(1/4) h + F(h)); value, output and MLP weights start smaller by (8N)^(1/4)."""

    source: ClassVar[str] = "arXiv 2203.00555"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, outer=self.make(dim), scale=num_sublayers**0.25)

    def initialisation(self, num_sublayers: int) -> Initialisation:
        small = (4 * num_sublayers) ** -0.25
        return Initialisation(output=small, value=small, hidden=small)


@dataclass(frozen=True)
class Keel(Scheme):
    """h' = RMS(2N h + F(RMS h)); the first attention is h + F(RMS h), the first MLP RMS(h + F(RMS h))."""

    source: ClassVar[str] = "arXiv 2601.19895"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(
            dim,
            sublayer,
            num_sublayers,
            inner=RMSNorm(dim),
            outer=None if sublayer == 1 else RMSNorm(dim),
            scale=1.0 if sublayer <= 2 else float(num_sublayers),
        )


class ScaledNorm(nn.Module):
    """A norm times a fixed factor."""

    def __init__(self, norm: Norm, factor: float):
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.factor


@dataclass(frozen=True)
class LNScaling(Residual):
    """h' = h + F(LN(h)/sqrt(block)), without the smaller start of what writes to the stream."""

    source: ClassVar[str] = "arXiv 2502.05795"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        inner = ScaledNorm(self.make(dim), 1 / math.sqrt((sublayer + 1) // 2))
        return NormedConnection(dim, sublayer, num_sublayers, inner=inner)

    def initialisation(self, num_sublayers: int) -> Initialisation:
        return Initialisation(output=1.0)


# arXiv 2503.10622, Table 12: width up to which, slope of the norm before attention, slope of the others
_DYT_SLOPES = ((1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (math.inf, 0.2, 0.05))


@dataclass(frozen=True)
class PreDyT(Scheme):
    """Pre-LN with w tanh(a x) + b for every norm, and embeddings times a learned scalar from sqrt d.

    `slope` fixes a at the start; None takes the source's table by width.
    """

    slope: float | None = None
    bias: bool = True
    source: ClassVar[str] = "arXiv 2503.10622"

    def _norm(self, dim: int, attention: bool) -> Norm:
        _, first, other = next(row for row in _DYT_SLOPES if dim <= row[0])
        slope = self.slope if self.slope is not None else first if attention else other
        return DynamicTanh(dim, slope, self.bias)

    def enter(self, dim: int) -> nn.Module:
        return Scalar(math.sqrt(dim))

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=self._norm(dim, attention=sublayer % 2 == 1))

    def exit(self, dim: int) -> nn.Module:
        return self._norm(dim, attention=False)


@dataclass(frozen=True)
class PreDerf(Scheme):
    """Pre-LN with w erf(a x + s) + b for every norm."""

    bias: bool = True
    source: ClassVar[str] = "arXiv 2512.10938"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=DynamicErf(dim, self.bias))

    def exit(self, dim: int) -> nn.Module:
        return DynamicErf(dim, self.bias)


@dataclass(frozen=True)
class PreDyISRU(Scheme):
    """Pre-LN with w sqrt(d) x/sqrt(b + x^2) for every norm."""

    source: ClassVar[str] = "arXiv 2503.21708"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=DynamicISRU(dim))

    def exit(self, dim: int) -> nn.Module:
        return DynamicISRU(dim)


@dataclass(frozen=True)
class PreScaleNorm(Scheme):
    """Pre-LN with g x/|x| for every norm."""

    source: ClassVar[str] = "arXiv 1910.05895"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner=PlainScaleNorm(dim))

    def exit(self, dim: int) -> nn.Module:
        return PlainScaleNorm(dim)


@dataclass(frozen=True)
class ReZero(Residual):
    """h' = h + a F(h), a learned from 0."""

    source: ClassVar[str] = "arXiv 2003.04887"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, output=Scalar(0.0))


class Gain(nn.Module):
    """diag(g) x."""

    def __init__(self, dim: int, start: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * x


@dataclass(frozen=True)
class LayerScale(Residual):
    """h' = h + diag(g) F(LN h), g from 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 deeper."""

    source: ClassVar[str] = "arXiv 2103.17239"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        blocks = (num_sublayers + 1) // 2
        start = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        return NormedConnection(dim, sublayer, num_sublayers, inner=self.make(dim), output=Gain(dim, start))


class OrthogonalConnection(NormedConnection):
    """h + (I - hh'/|h|^2) F(LN h): only the part of the branch that is orthogonal to the stream."""

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        dtype = compute_dtype(h, f)
        wide, branch = h.to(dtype), f.to(dtype)
        unit = normalize(wide, 1.0)
        return add(h, branch - (unit * branch).sum(-1, keepdim=True) * unit)


@dataclass(frozen=True)
class Orthogonal(Residual):
    """h' = h + (I - hh'/|h|^2) F(LN h), and a final norm."""

    source: ClassVar[str] = "arXiv 2505.11881"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return OrthogonalConnection(dim, sublayer, num_sublayers, inner=self.make(dim))


class UnitNorm(Norm):
    """x/|x|; a row of zeros stays zero."""

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, 1.0)


class NGPTConnection(Connection):
    """h' = norm(h + |a| (norm(F h) - h)), a in R^d, 0.05 at the start.

    The parameter starts at 1/sqrt d, the size of the stream's entries, so that one learning rate fits both.
    """

    step: float = 0.05

    def __init__(self, dim: int, sublayer: int, num_sublayers: int):
        super().__init__(dim, sublayer, num_sublayers)
        self.a = nn.Parameter(torch.full((dim,), 1 / math.sqrt(dim)))

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        dtype = compute_dtype(h, f)
        wide = h.to(dtype)
        rate = (self.step * math.sqrt(self.dim)) * self.a.to(dtype).abs()
        return normalize(wide + rate * (normalize(f.to(dtype), 1.0) - wide), 1.0).to(h.dtype)


@dataclass(frozen=True)
class NGPT(Scheme):
    """nGPT's update rule on the unit sphere, and a learned scale of the logits from sqrt d.

    `normalize_weights` is the rest of its recipe: after every step the trainer has `constrain` put each
    weight vector that faces the stream back on the unit sphere.
    """

    normalize_weights: bool = False
    source: ClassVar[str] = "arXiv 2410.01131"

    def enter(self, dim: int) -> nn.Module:
        return UnitNorm(dim)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NGPTConnection(dim, sublayer, num_sublayers)

    def exit(self, dim: int) -> nn.Module:
        return Scalar(1.0, fixed=math.sqrt(dim))

    @torch.no_grad()
    def constrain(self, reading: Iterable[Tensor], writing: Iterable[Tensor]) -> None:
        if not self.normalize_weights:
            return
        for weight in reading:
            weight.copy_(normalize(weight, 1.0))
        for weight in writing:
            weight.copy_(normalize(weight.mT, 1.0).mT)
