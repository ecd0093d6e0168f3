"""The rival methods: connections that add the branch's output to the stream, each as its own source defines it.

Unless a class states otherwise, the entry does nothing and the exit is nanoGPT's final norm. The options `norm`
("layernorm" or "rmsnorm") and `bias` choose the norm if the source leaves it open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from spheret.connections.base import BranchShape, Connection, Initialisation, LayerNumbers, Scheme, add
from spheret.connections.norms import (
    NORMS,
    Device,
    DynamicErf,
    DynamicISRU,
    DynamicTanh,
    Gain,
    HeadNorm,
    Norm,
    PlainScaleNorm,
    empty_parameter,
    make_norm,
)
from spheret.kernels import compute_dtype, normalize
from spheret.schedules import check_sublayer
from spheret.support.errors import unknown
from spheret.support.ranges import check_above_zero


class NormedConnection(LayerNumbers, Connection):
    """h' = outer_norm(scale h + branch_scale output_norm(F(inner_norm(h)))). Most methods differ in their norms.

    A norm that is None is left out. A learned gain or scalar may take the place of a norm.
    """

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int,
        inner_norm: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        outer_norm: nn.Module | None = None,
        scale: float = 1.0,
        branch_scale: float = 1.0,
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.inner_norm = inner_norm or nn.Identity()
        self.output_norm = output_norm or nn.Identity()
        self.outer_norm = outer_norm or nn.Identity()
        self.scales = tuple(name for name, value in (("scale", scale), ("branch_scale", branch_scale)) if value != 1)
        self.hold_number("scale", scale)
        self.hold_number("branch_scale", branch_scale)

    def read(self, h: Tensor) -> Tensor:
        return self.inner_norm(h)

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        # the sum stays in the computing dtype up to the outer norm
        dtype = compute_dtype(h, f)
        wide = self.number("scale") * h.to(dtype) if "scale" in self.scales else h.to(dtype)
        added = self.output_norm(f.to(dtype))
        added = self.number("branch_scale") * added if "branch_scale" in self.scales else added
        return self.outer_norm(wide + added).to(h.dtype)

    def branch_gains(self) -> list[nn.Parameter]:
        # a gain without a norm only repeats the factor of the branch's last layer
        return list(self.output_norm.parameters()) if isinstance(self.output_norm, Norm) else []


@dataclass(frozen=True)
class ResidualScheme(Scheme):
    """h' = h + F(h), the paper's Euclidean case, and a final norm. Schemes with a final norm derive from it."""

    norm: str = "layernorm"
    bias: bool = True
    source: ClassVar[str] = "He et al. 2016"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)

    def build_norm(self, dim: int) -> Norm:
        return make_norm(self.norm, dim, self.bias)

    def exit(self, dim: int) -> nn.Module:
        return self.build_norm(dim)


@dataclass(frozen=True)
class PreLN(ResidualScheme):
    """h' = h + F(LN h), and a final LN."""

    source: ClassVar[str] = "Xiong et al. 2020; nanoGPT"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, inner_norm=self.build_norm(dim))


@dataclass(frozen=True)
class PostLN(ResidualScheme):
    """h' = LN(h + F(h)), no final norm."""

    source: ClassVar[str] = "Vaswani et al. 2017"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, outer_norm=self.build_norm(dim))

    def exit(self, dim: int) -> nn.Module:
        return nn.Identity()


@dataclass(frozen=True)
class PeriLN(ResidualScheme):
    """h' = h + LN_out(F(LN_in h)), and a final norm."""

    source: ClassVar[str] = "arXiv 2502.02732"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(
            dim, sublayer, num_sublayers, inner_norm=self.build_norm(dim), output_norm=self.build_norm(dim)
        )


@dataclass(frozen=True)
class MixLN(ResidualScheme):
    """Post-LN in the first quarter of the blocks (rounded down), Pre-LN in the others, and a final norm."""

    source: ClassVar[str] = "arXiv 2412.13795"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        early = (sublayer + 1) // 2 <= (num_sublayers + 1) // 2 // 4
        norm = self.build_norm(dim)
        return NormedConnection(
            dim, sublayer, num_sublayers, inner_norm=None if early else norm, outer_norm=norm if early else None
        )


@dataclass(frozen=True)
class DeepNorm(PostLN):
    """h' = LN((2N)^(1/4) h + F(h)); value, output and MLP weights start smaller by (8N)^(1/4)."""

    source: ClassVar[str] = "arXiv 2203.00555"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(
            dim, sublayer, num_sublayers, outer_norm=self.build_norm(dim), scale=num_sublayers**0.25
        )

    def initialisation(self, num_sublayers: int) -> Initialisation:
        small = (4 * num_sublayers) ** -0.25
        return Initialisation(output=small, value=small, hidden=small)


@dataclass(frozen=True)
class Keel(PostLN):
    """h' = RMS(2N h + F(RMS h)); the first attention is h + F(RMS h), the first MLP RMS(h + F(RMS h)).

    norm="layernorm" puts LayerNorms in place of the RMSNorms. `bias` is theirs: an RMSNorm has none.
    """

    norm: str = "rmsnorm"
    source: ClassVar[str] = "arXiv 2601.19895"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(
            dim,
            sublayer,
            num_sublayers,
            inner_norm=self.build_norm(dim),
            outer_norm=None if sublayer == 1 else self.build_norm(dim),
            scale=1.0 if sublayer <= 2 else float(num_sublayers),
        )


class ScaledNorm(LayerNumbers):
    """A norm times a fixed factor."""

    def __init__(self, norm: Norm, factor: float):
        super().__init__()
        self.norm = norm
        self.hold_number("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y.to(compute_dtype(y)) * self.number("factor")).to(y.dtype)


@dataclass(frozen=True)
class LNScaling(ResidualScheme):
    """h' = h + F(LN(h)/sqrt(block)). Weights that write to the stream start as large as all others."""

    source: ClassVar[str] = "arXiv 2502.05795"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        scaled = ScaledNorm(self.build_norm(dim), 1 / math.sqrt((sublayer + 1) // 2))
        return NormedConnection(dim, sublayer, num_sublayers, inner_norm=scaled)

    def initialisation(self, num_sublayers: int) -> Initialisation:
        return Initialisation(output=1.0)


@dataclass(frozen=True)
class PreNormed(Scheme, ABC):
    """h' = h + F(norm h), and a final norm, with a norm of the scheme's own."""

    @abstractmethod
    def build_norm(self, dim: int, attention: bool = False) -> Norm:
        """The norm before a branch, which may be attention, and at the exit."""

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        norm = self.build_norm(dim, attention=sublayer % 2 == 1)
        return NormedConnection(dim, sublayer, num_sublayers, inner_norm=norm)

    def exit(self, dim: int) -> nn.Module:
        return self.build_norm(dim)


@dataclass(frozen=True)
class ScaledEmbeddings(PreNormed):
    """The embeddings times a learned scalar that starts at sqrt d."""

    def enter(self, dim: int) -> nn.Module:
        return Gain(1, math.sqrt(dim))


# arXiv 2503.10622 and its authors' settings for LLaMA: largest width of the row, slope of the norms before attention,
# slope of all others
_DYT_SLOPES = (
    (1024, 1.0, 1.0),
    (2048, 1.0, 0.5),
    (4096, 0.8, 0.2),
    (5120, 0.6, 0.15),
    (math.inf, 0.2, 0.05),
)


@dataclass(frozen=True)
class PreDyT(ScaledEmbeddings):
    """Pre-LN with w tanh(a x) + b for every norm, and embeddings times a learned scalar that starts at sqrt d.

    `slope` is the start of a. None takes it from the source's table, by width.
    """

    slope: float | None = None
    bias: bool = True
    source: ClassVar[str] = "arXiv 2503.10622"

    def build_norm(self, dim: int, attention: bool = False) -> Norm:
        _, first, other = next(row for row in _DYT_SLOPES if dim <= row[0])
        slope = self.slope if self.slope is not None else first if attention else other
        return DynamicTanh(dim, slope, self.bias)


@dataclass(frozen=True)
class PreDerf(ScaledEmbeddings):
    """Pre-LN with w erf(a x + s) + b for every norm, and embeddings times a learned scalar that starts at sqrt d.

    `slope` is the start of a. 1 is the source's value for language models.
    """

    slope: float = 1.0
    bias: bool = True
    source: ClassVar[str] = "arXiv 2512.10938"

    def build_norm(self, dim: int, attention: bool = False) -> Norm:
        return DynamicErf(dim, self.slope, self.bias)


@dataclass(frozen=True)
class PreDyISRU(ScaledEmbeddings):
    """Pre-LN with w sqrt(d) x/sqrt(b + x^2) for every norm, and embeddings times a scalar that starts at sqrt d.

    The source has no such scalar: it is taken from `pre-dyt`.
    """

    source: ClassVar[str] = "arXiv 2503.21708"

    def build_norm(self, dim: int, attention: bool = False) -> Norm:
        return DynamicISRU(dim)


@dataclass(frozen=True)
class PreScaleNorm(PreNormed):
    """Pre-LN with g x/|x| for every norm."""

    source: ClassVar[str] = "arXiv 1910.05895"

    def build_norm(self, dim: int, attention: bool = False) -> Norm:
        return PlainScaleNorm(dim)


class Borrowed(nn.Module):
    """Applies a module that belongs to another connection. Only its owner lists its parameters."""

    def __init__(self, owned: nn.Module):
        super().__init__()
        # nn.Module does not look into a tuple, so parameters, checkpoints and exports have each parameter once
        self._owned = (owned,)

    def forward(self, x: Tensor) -> Tensor:
        return self._owned[0](x)


@dataclass(frozen=True)
class ReZero(Scheme):
    """h' = h + a F(h), a learned scalar a that is 0 at the start, and no norm. A block's two sublayers share a."""

    source: ClassVar[str] = "arXiv 2003.04887"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, output_norm=Gain(1, 0.0))

    def connect_block(self, dim: int, block: int, num_blocks: int) -> tuple[Connection, Connection]:
        attention = NormedConnection(dim, 2 * block - 1, 2 * num_blocks, output_norm=Gain(1, 0.0))
        shared = Borrowed(attention.output_norm)
        return attention, NormedConnection(dim, 2 * block, 2 * num_blocks, output_norm=shared)


@dataclass(frozen=True)
class LayerScale(ResidualScheme):
    """h' = h + diag(g) F(LN h); g starts at 0.1 for up to 18 blocks, at 1e-5 for up to 24, else at 1e-6."""

    source: ClassVar[str] = "arXiv 2103.17239"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        blocks = (num_sublayers + 1) // 2
        start = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        return NormedConnection(
            dim, sublayer, num_sublayers, inner_norm=self.build_norm(dim), output_norm=Gain(dim, start)
        )


class OrthogonalConnection(NormedConnection):
    """h' = h + (I - hh'/|h|^2) F(LN h): it adds the part of the branch's output that is orthogonal to the stream."""

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        dtype = compute_dtype(h, f)
        wide, branch = h.to(dtype), f.to(dtype)
        unit = normalize(wide, 1.0)
        return add(h, branch - (unit * branch).sum(-1, keepdim=True) * unit)


@dataclass(frozen=True)
class Orthogonal(ResidualScheme):
    """h' = h + (I - hh'/|h|^2) F(LN h), and a final norm."""

    source: ClassVar[str] = "arXiv 2505.11881"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return OrthogonalConnection(dim, sublayer, num_sublayers, inner_norm=self.build_norm(dim))


@dataclass(frozen=True)
class Beam(ResidualScheme):
    """h' = sqrt((k-1)/k) h + RMS(F(RMS h))/sqrt(k) with k = l + 1, and a final norm.

    For a branch output of h's length and orthogonal to h, this is the projection retraction with alpha = 1/sqrt(l).
    """

    norm: str = "rmsnorm"
    source: ClassVar[str] = "Beam, in transformers"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        k = sublayer + 1
        return NormedConnection(
            dim,
            sublayer,
            num_sublayers,
            inner_norm=self.build_norm(dim),
            output_norm=self.build_norm(dim),
            scale=math.sqrt((k - 1) / k),
            branch_scale=1 / math.sqrt(k),
        )


class VarianceGate(nn.Module):
    """sqrt(1 - b^2) h + b f, with b = sigmoid(w) per channel and a learned w that is 0 at the start."""

    # of 1 - b^2, as in transformers
    least: float = 1e-3

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = empty_parameter(dim, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        w = self.weight.to(h.dtype)
        b = w.sigmoid()
        return ((-w).sigmoid() * (1 + b)).clamp(min=self.least).sqrt() * h + b * f


class VarianceConnection(NormedConnection):
    """h' = gate(h, RMS(F(norm h))); RMS has no gain."""

    def __init__(self, dim: int, sublayer: int, num_sublayers: int, inner_norm: nn.Module, eps: float = 1e-5):
        super().__init__(dim, sublayer, num_sublayers, inner_norm)
        self.gate_norm, self.eps = VarianceGate(dim), eps

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        dtype = compute_dtype(h, f)
        return self.gate_norm(h.to(dtype), rms_norm(f.to(dtype), (self.dim,), eps=self.eps)).to(h.dtype)


@dataclass(frozen=True)
class VPGate(ResidualScheme):
    """h' = sqrt(1 - b^2) h + b RMS(F(RMS h)) with a learned b per channel that starts at 1/2, and a final norm.

    The norm of the branch's output has no gain.
    """

    norm: str = "rmsnorm"
    source: ClassVar[str] = "Muse Spark, in transformers"
    own_depth_rule: ClassVar[bool] = True

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return VarianceConnection(dim, sublayer, num_sublayers, self.build_norm(dim))


@dataclass(frozen=True)
class ResPost(ResidualScheme):
    """h' = h + RMS(F(h)), and a final norm: only the branch's output is normed."""

    norm: str = "rmsnorm"
    source: ClassVar[str] = "arXiv 2111.09883; OLMo 2, arXiv 2501.00656"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(dim, sublayer, num_sublayers, output_norm=self.build_norm(dim))


@dataclass(frozen=True)
class HybridNorm(ResidualScheme):
    """Attention: h' = RMS(h + F(h)), F with norms of q, k and v per head. MLP: h' = h + F(h). And a final norm."""

    norm: str = "rmsnorm"
    source: ClassVar[str] = "arXiv 2503.04598"

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        # the source writes it at the MLP: FFN(RMS h) + RMS h
        return NormedConnection(
            dim, sublayer, num_sublayers, outer_norm=self.build_norm(dim) if sublayer % 2 else None
        )

    def inside_attention(self, shape: BranchShape, sublayer: int, num_sublayers: int) -> nn.Module:
        return HeadNorm(shape.head_dim, self.norm, self.bias, values=True)


@dataclass(frozen=True)
class ResidualMultiplier(PreLN):
    """h' = h + m F(RMS h) with a fixed multiplier m, and a final norm."""

    norm: str = "rmsnorm"
    multiplier: float = 0.22
    source: ClassVar[str] = "Granite 3, in transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero("multiplier", self.multiplier)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NormedConnection(
            dim, sublayer, num_sublayers, inner_norm=self.build_norm(dim), branch_scale=self.multiplier
        )

    def step_sum(self, num_sublayers: int) -> float | None:
        return self.multiplier * num_sublayers
