"""nGPT (arXiv 2410.01131): a stream on the unit sphere, and the scales and weights that its recipe adds to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spheret.connections.base import BranchShape, Connection, Scheme, check_dim
from spheret.connections.norms import Device, Gain, Norm, empty_parameter
from spheret.kernels import compute_dtype, normalize


class UnitNorm(Norm):
    """x/|x|; a row of zeros stays zero."""

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, 1.0)


class NGPTNorm(nn.Module):
    """h' = norm(h + r (norm(f) - h)) with a learned vector r = 0.05 sqrt(d) |a| that is 0.05 at the start.

    The parameter a in R^d starts at 1/sqrt d, the size of the stream's entries, so that one learning rate fits both.
    """

    step: float = 0.05

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.dim = check_dim(dim)
        self.a = empty_parameter(dim, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.a, 1 / math.sqrt(self.dim))

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        dtype = compute_dtype(h, f)
        wide = h.to(dtype)
        rate = self.step * math.sqrt(self.dim) * self.a.to(dtype).abs()
        return normalize(wide + rate * (normalize(f.to(dtype), 1.0) - wide), 1.0).to(h.dtype)


class NGPTConnection(Connection):
    """NGPTNorm as a connection."""

    def __init__(self, dim: int, sublayer: int, num_sublayers: int):
        super().__init__(dim, sublayer, num_sublayers)
        self.norm = NGPTNorm(dim)

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        return self.norm(h, f)

    def branch_gains(self) -> list[nn.Parameter]:
        return [self.norm.a]


class QueryKeyNorm(nn.Module):
    """s norm(q) and s norm(k) per head, with one learned vector s in R^d for both. v is not changed.

    s is a parameter times sqrt(d), and 1 at the start. nGPT multiplies the scores by sqrt(d_k), with d_k = d/heads.
    Attention divides them by sqrt(d_k), so q is also multiplied by d_k. Rotary positions come before it, as in nGPT's
    code: s does not commute with a rotation.
    """

    after_rotation = True

    def __init__(self, dim: int, heads: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.dim, self.heads = check_dim(dim), heads
        self.weight = empty_parameter(dim, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / math.sqrt(self.dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = self.dim // self.heads
        s = (math.sqrt(self.dim) * self.weight.to(compute_dtype(q, k))).view(self.heads, width)
        # in memory a token's heads stay side by side: then attention's result needs no copy
        units = (normalize(x.transpose(1, 2), 1.0) for x in (q, k))
        q, k = ((x * factor).to(v.dtype).transpose(1, 2) for x, factor in zip(units, (width * s, s), strict=True))
        return q, k, v


class GatedGain(nn.Module):
    """The gate times s_v `fixed` and the rest times s_u, two learned vectors from 1. The gate comes first."""

    def __init__(self, size: int, fixed: float):
        super().__init__()
        self.gate_norm, self.rest_norm = Gain(size, 1.0, fixed=fixed), Gain(size, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, rest = x.chunk(2, dim=-1)
        return torch.cat([self.gate_norm(gate), self.rest_norm(rest)], dim=-1)


@dataclass(frozen=True)
class NGPT(Scheme):
    """nGPT: h' = norm(h + |a| (norm(F h) - h)) on the unit sphere, with the rest of its recipe.

    `normalize_weights`: the weight vectors that face the stream are unit vectors, before the first step and after
        each one of a torch optimiser, in any training loop.
    `inner_scales`: q and k are normalised, and q and k, the MLP's hidden layer and each logit have learned scales.
        Without it the branches are plain, and the logits have one learned scale.
    """

    normalize_weights: bool = True
    inner_scales: bool = True
    source: ClassVar[str] = "arXiv 2410.01131"

    def enter(self, dim: int) -> nn.Module:
        return UnitNorm(dim)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return NGPTConnection(dim, sublayer, num_sublayers)

    def exit(self, dim: int) -> nn.Module:
        return nn.Identity() if self.inner_scales else Gain(1, 1 / math.sqrt(dim), fixed=math.sqrt(dim))

    def inside_attention(self, shape: BranchShape, sublayer: int, num_sublayers: int) -> nn.Module | None:
        if not self.inner_scales:
            return None
        if shape.kv_heads != shape.heads:
            raise ValueError(
                f"the queries and keys of ngpt share one scale per head, so that kv_heads must be heads = "
                f"{shape.heads}, got {shape.kv_heads}: set kv_heads to {shape.heads}, or inner_scales=false."
            )
        return QueryKeyNorm(shape.dim, shape.heads)

    def inside_mlp(self, shape: BranchShape, sublayer: int, num_sublayers: int) -> nn.Module | None:
        if not self.inner_scales:
            return None
        root = math.sqrt(shape.dim)
        return GatedGain(shape.hidden, root) if shape.gated else Gain(shape.hidden, 1.0, fixed=root)

    def logit_gain(self, dim: int, vocab: int) -> nn.Module | None:
        return Gain(vocab, 1 / math.sqrt(dim), fixed=math.sqrt(dim)) if self.inner_scales else None

    @property
    def unit_weights(self) -> bool:
        return self.normalize_weights

    @torch.no_grad()
    def constrain(self, reading: Iterable[Tensor], writing: Iterable[Tensor]) -> None:
        if not self.normalize_weights:
            return
        for weight in reading:
            weight.copy_(normalize(weight, 1.0))
        for weight in writing:
            weight.copy_(normalize(weight.mT, 1.0).mT)
