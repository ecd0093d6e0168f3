"""GeoNorm as public ports have it, among them a production model: the angle, mapped affinely, over the block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spheret.connections.base import Connection, LayerNumbers
from spheret.connections.euclidean import ResidualScheme
from spheret.connections.norms import Device, Norm, empty_parameter, make_branch_norm
from spheret.kernels import compute_dtype, normalize
from spheret.schedules import check_sublayer

CAP = math.pi / 4


class FixedScaleNorm(Norm):
    """sqrt(d) x/|x|; a row of zeros stays zero."""

    def radius_value(self) -> float:
        """The radius of the sphere on which the stream starts."""
        return math.sqrt(self.dim)

    def apply_wide(self, x: Tensor) -> Tensor:
        return normalize(x, self.radius_value())


class AffineGeoNorm(LayerNumbers):
    """h' = cos(t) h + |h| sin(t) z/|z|, t = min((s theta + b)/block, pi/4), theta = min(|z|/|h|, pi/4). ::

        z = f - (<h,f>/|h|^2) h

    s = 1 and b = 0 are learned and not bounded. Rows of zeros, and rows with z = 0, stay as they are.
    """

    def __init__(self, block: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.hold_number("block", block)
        self.s, self.b = empty_parameter(1, device, dtype), empty_parameter(1, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.s)
        nn.init.zeros_(self.b)

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        dtype, block = compute_dtype(h, f), self.number("block")
        wide, branch, s, b = h.to(dtype), f.to(dtype), self.s.to(dtype), self.b.to(dtype)
        unit = normalize(wide, 1.0)
        z = branch - (unit * branch).sum(-1, keepdim=True) * unit
        hh, zz = wide.square().sum(-1, keepdim=True), z.square().sum(-1, keepdim=True)
        # where z or h is 0, the angle has no finite gradient
        turns = (hh > 0) & (zz > 0)
        theta = torch.where(turns, zz, 1.0).sqrt() / torch.where(turns, hh, 1.0).sqrt()
        t = ((s * theta.clamp(max=CAP) + b) / block).clamp(max=CAP)
        cos, gain = torch.where(turns, t.cos(), 1.0), torch.where(turns, t.sin() / theta, s / block)
        return (cos * wide + torch.where(hh > 0, gain, 0.0) * z).to(h.dtype)


class AffineGeoNormConnection(Connection):
    """AffineGeoNorm as a connection. The branch reads h itself."""

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int,
        update: AffineGeoNorm,
        branch_norm: nn.Module | None = None,
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.norm, self.branch_norm = update, branch_norm

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        return self.norm(h, f if self.branch_norm is None else self.branch_norm(f))

    def branch_gains(self) -> list[nn.Parameter]:
        return [] if self.branch_norm is None else list(self.branch_norm.parameters())


@dataclass(frozen=True)
class GeoNormAffine(ResidualScheme):
    """GeoNorm with the angle min((s min(|z|/|h|, pi/4) + b)/block, pi/4), s = 1 and b = 0 learned; a final RMSNorm.

    The entry puts the stream on the sphere of radius sqrt d. `branch_norm` is as in the other spherical schemes.
    """

    norm: str = "rmsnorm"
    branch_norm: bool | float | None = None
    source: ClassVar[str] = "three public ports of GeoNorm"

    def __post_init__(self) -> None:
        super().__post_init__()
        make_branch_norm(2, self.branch_norm)

    def enter(self, dim: int) -> nn.Module:
        return FixedScaleNorm(dim)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        norm = make_branch_norm(dim, self.branch_norm)
        return AffineGeoNormConnection(dim, sublayer, num_sublayers, AffineGeoNorm((sublayer + 1) // 2), norm)

    def step_sum(self, num_sublayers: int) -> float | None:
        """The sum of 1/block over the sublayers."""
        return math.fsum(1 / ((sublayer + 1) // 2) for sublayer in range(1, num_sublayers + 1))
