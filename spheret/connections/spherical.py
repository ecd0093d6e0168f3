"""SpheretNorm, and the schemes that keep the whole stream on one sphere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from spheret.bounds import inverse_softplus
from spheret.connections.base import (
    Connection,
    Initialisation,
    LayerNumbers,
    Scheme,
    channels_last,
    check_dim,
)
from spheret.connections.bounded import Bounded, BoundedScalar
from spheret.connections.norms import (
    NORMS,
    Device,
    ScaleNorm,
    check_radius,
    empty_parameter,
    make_branch_norm,
    make_norm,
)
from spheret.kernels import check_cap, check_rows, compute_dtype, retract_unchecked
from spheret.kernels.closed import dots, normed, ratio_of
from spheret.retractions import P, Retraction, angular, as_retraction
from spheret.schedules import check_sublayer, factor
from spheret.support.errors import unknown


def automatic_cap(retraction: Retraction, learned: bool) -> float | None:
    """The angle that `max_angle="auto"` stands for: the retraction's own cap, and pi/4 if p is learned."""
    return math.pi / 4 if learned else retraction.cap


class SpheretNorm(LayerNumbers, Bounded):
    r"""One update of a spherical stream: h' = R_h(alpha P_h f), which has the norm of h. ::

        alpha = lambda_l clamp(softplus(a), max 1)
        |h'| = |h|,  angle(h, h') = theta(alpha |z|/|h|)

    With `branch_norm` the output of the branch is normed first, in the same kernel: gain f/rms(f) takes the place of
    f, so that no weight of the branch decides how far the state turns.

    Args:
        dim: the width of the stream, at least 2.
        sublayer: the 1-based index of the sublayer.
        num_sublayers: the number of sublayers, two per block. Only the linear schedules need it.
        retraction: as in `spheret.retract`.
        schedule: a name of SCHEDULES. It gives lambda_l.
        max_angle: radians, None, or "auto" for the retraction's own cap.
        learnable_p: p becomes softplus of a 1-element parameter that starts at the retraction's own p.
        exact_clamp: use the paper's torch.clamp, whose gradient is 0 beyond the bound (see spheret.bounds).
        channel_dim: the dimension of h and f that holds the `dim` entries of a row. (N, C, H, W) has channel_dim=1.
        learnable_alpha: False fixes the step size at its start. The module then has no parameter a.
        alpha: where softplus(a) starts, in (0, 1]. The step size starts at lambda_l times it.
        branch_norm: None, or where the learned gain per channel starts. True is 0.3.
        device: where the parameters are made.
        dtype: the dtype of the parameters. The update is computed in float32 or better in any case.

    A row of zeros stays zero. A row with NaN becomes NaN. Paper: Definition 4 (p-SpheretNorm) and
    Section 4.2.
    """

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int | None = None,
        retraction: str | float | Retraction | Callable[[Tensor], Tensor] = "projection",
        schedule: str = "sqrt",
        max_angle: float | Literal["auto"] | None = "auto",
        learnable_p: bool = False,
        exact_clamp: bool = False,
        channel_dim: int = -1,
        *,
        learnable_alpha: bool = True,
        alpha: float = 1.0,
        branch_norm: bool | float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1:
            raise ValueError(
                f"alpha must be a number greater than 0 and at most 1, got {alpha!r}: the step size starts at "
                "lambda_l alpha and is at most lambda_l."
            )
        self.dim, self.sublayer, self.num_sublayers = check_dim(dim), sublayer, num_sublayers
        self.channel_dim = channel_dim
        self.schedule, self.exact_clamp = schedule, exact_clamp
        self.factor = factor(schedule, sublayer, num_sublayers)
        self.retraction = as_retraction(retraction)
        if isinstance(self.retraction.p, Tensor):
            raise TypeError("the module holds a learned p itself: give its start as a number, with learnable_p=True.")
        if isinstance(max_angle, str):
            if max_angle != "auto":
                raise ValueError(f'max_angle must be a number, None or "auto", got {max_angle!r}.')
            max_angle = automatic_cap(self.retraction, learnable_p)
        check_cap(max_angle)
        self.max_angle = max_angle
        self.start_alpha = float(alpha)
        # what the learned share of the step size is multiplied by, or the whole of a fixed one
        self.hold_number("factor", self.factor if learnable_alpha else self.factor * self.start_alpha)
        self.branch_norm = make_branch_norm(self.dim, branch_norm, device=device, dtype=dtype)
        self.a: nn.Parameter | None = empty_parameter(1, device, dtype) if learnable_alpha else None
        self.raw_p: nn.Parameter | None = None
        if learnable_p:
            start = float(self.retraction.p)
            if not math.isfinite(start):
                raise ValueError(
                    f"learnable_p needs a finite p to start from, and {self.retraction.name!r} has p = {start}: "
                    "give a number, e.g. retraction=4.0."
                )
            self.start_p = start
            self.raw_p = empty_parameter(1, device, dtype)
            # the formula for any p, even if the start has one of its own
            self.retraction = angular(torch.ones(1, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a learned step size, a learned p and the gain of a normed branch to their starts."""
        if self.branch_norm is not None:
            self.branch_norm.reset_parameters()
        if self.a is not None:
            nn.init.constant_(self.a, inverse_softplus(self.start_alpha))
        if self.raw_p is not None:
            nn.init.constant_(self.raw_p, inverse_softplus(self.start_p))

    @property
    def alpha(self) -> Tensor:
        """The step size lambda_l clamp(softplus(a), max 1), a 1-element tensor. A fixed one is on the CPU."""
        alpha = self._alpha()
        return torch.as_tensor(alpha, dtype=torch.float64, device="cpu").view(1) if self.a is None else alpha

    def _alpha(self) -> Any:
        """The step size as the kernels take it. A fixed one is a number, which fits every device and dtype."""
        if self.a is None:
            return self.number("factor")
        return self.bounded_softplus(self.a, 0.0, 1.0, self.number("factor"))

    def bounded_scalars(self) -> list[BoundedScalar]:
        return [] if self.a is None else [BoundedScalar("a", self.a, 0.0, 1.0)]

    @property
    def p(self) -> P:
        """The p of the retraction, as a number or as the learned 1-element tensor."""
        if self.raw_p is None:
            return self.retraction.p
        return torch.nn.functional.softplus(self.raw_p.to(compute_dtype(self.raw_p)))

    def forward(self, h: Tensor, f: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """The next state of the stream h, given the branch as a function, or its output f of h's shape."""
        if isinstance(f, torch.fx.Proxy):
            raise TypeError(
                "torch.fx cannot trace SpheretNorm, whose kernel depends on the tensor: make it a leaf of your "
                "Tracer (is_leaf_module), or take torch.export or torch.compile."
            )
        f = f if isinstance(f, Tensor) or not callable(f) else f(h)
        if self.channel_dim != -1:
            h, f = self._channels_last(h, f)
        check_rows(h, f, self.dim)
        gain = None if self.branch_norm is None else self.branch_norm.weight
        out = retract_unchecked(h, f, self._alpha(), self.retraction, self.p, self.max_angle, gain)
        return out if self.channel_dim == -1 else out.movedim(-1, self.channel_dim)

    def _channels_last(self, h: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        return channels_last(h, self.dim, self.channel_dim), channels_last(f, self.dim, self.channel_dim)

    def branch_output(self, f: Tensor) -> Tensor:
        """f as the update takes it: normed where there is a `branch_norm`, in float32 or better."""
        return f if self.branch_norm is None else normed(f, self.branch_norm.weight)

    def angle(self, h: Tensor, f: Tensor) -> Tensor:
        """The angle between h and the next state in radians, at least 0. Its shape is h's without `channel_dim`.

        Args:
            h: the stream.
            f: the branch's output.
        """
        if self.channel_dim != -1:
            h, f = self._channels_last(h, f)
        check_rows(h, f, self.dim)
        dtype = compute_dtype(h, f)
        s, t, hh, _, zz = dots(h.to(dtype), self.branch_output(f).to(dtype))
        # the square root has no finite gradient at 0
        tiny = torch.finfo(dtype).tiny
        eta = zz.clamp(min=tiny).sqrt() / hh.clamp(min=tiny).sqrt() * ratio_of(s, t)
        beta = self._alpha() * torch.where(hh == 0, 0.0, eta)
        theta = self.retraction.theta(beta, self.p)
        return (theta if self.max_angle is None else theta.clamp(max=self.max_angle)).squeeze(-1)

    def extra_repr(self) -> str:
        p = "learned p" if self.raw_p is not None else self.retraction.name
        cap = "no cap" if self.max_angle is None else f"max_angle={self.max_angle:.4f}"
        channels = "" if self.channel_dim == -1 else f", channel_dim={self.channel_dim}"
        fixed = "" if self.a is not None else ", fixed alpha"
        gain = "" if self.branch_norm is None else f", branch_norm={self.branch_norm.start:g}"
        return f"{self.dim}, sublayer={self.sublayer}, {p}, {self.schedule}, {cap}{channels}{fixed}{gain}"


class SphericalConnection(Connection):
    """SpheretNorm as a connection. The branch reads inner_norm(h), by default h itself."""

    def __init__(self, dim: int, sublayer: int, num_sublayers: int, norm: SpheretNorm, inner_norm: nn.Module):
        super().__init__(dim, sublayer, num_sublayers)
        self.norm, self.inner_norm = norm, inner_norm

    def read(self, h: Tensor) -> Tensor:
        return self.inner_norm(h)

    def write(self, h: Tensor, f: Tensor) -> Tensor:
        """As in `Connection`."""
        # the norm checks the rows itself
        return self.norm(h, f)

    def angle(self, h: Tensor, f: Tensor, out: Tensor | None = None) -> Tensor:
        """As in `Connection`, but exact: it is computed from h and f instead of two rounded states."""
        return self.norm.angle(h, f)

    @property
    def alpha(self) -> Tensor:
        return self.norm.alpha

    def branch_output(self, f: Tensor) -> Tensor:
        return self.norm.branch_output(f)

    def branch_gains(self) -> list[nn.Parameter]:
        return [] if self.norm.branch_norm is None else [self.norm.branch_norm.weight]

    def retraction_step(self) -> SpheretNorm:
        return self.norm


@dataclass(frozen=True)
class Spherical(Scheme):
    """A stream on one sphere: ScaleNorm at the entry, SpheretNorm at every sublayer, a final LayerNorm.

    | option | meaning |
    |---|---|
    | `p` | the retraction theta = p arctan(beta/p), p > 0; inf is the exponential map; none is the scheme's own p |
    | `retraction` | a name of RETRACTIONS, a number p, or a Retraction; `p` is short for `retraction=p` |
    | `schedule` | a name of SCHEDULES |
    | `learnable_p` | learn one p per sublayer, starting from `p`; angles are then capped at pi/4 |
    | `max_angle` | radians, None or "auto" |
    | `index` | what the schedule counts: "sublayer" or "block" |
    | `inner_norm` | a LayerNorm before each branch |
    | `final_norm` | whether there is a LayerNorm at the exit |
    | `entry_norm` | whether there is a ScaleNorm at the entry |
    | `exact_clamp` | the paper's torch.clamp for the bounded scalars |
    | `bias` | whether LayerNorms have a bias |
    | `output_init` | how large the weights that write to the stream start: "scaled" by 1/sqrt(2N), or "full" |
    | `radius` | where the entry's radius starts: "sqrt" for sqrt d, or a number from 1 to sqrt d |
    | `learnable_alpha` | whether the step sizes are learned; if not, they stay where they start |
    | `alpha` | where the step sizes start, as a share of lambda_l in (0, 1] |
    | `norm` | what the norms at the exit and before each branch are: "layernorm" or "rmsnorm" |
    | `branch_norm` | an RMSNorm of each branch's output: none, or where its gain starts; true is 0.3 |
    """

    p: float | None = None
    retraction: str | float | Retraction | None = None
    schedule: str = "sqrt"
    learnable_p: bool = False
    max_angle: float | Literal["auto"] | None = "auto"
    index: Literal["sublayer", "block"] = "sublayer"
    inner_norm: bool = False
    final_norm: bool = True
    entry_norm: bool = True
    exact_clamp: bool = False
    bias: bool = True
    output_init: Literal["scaled", "full"] = "scaled"
    radius: float | Literal["sqrt"] = "sqrt"
    learnable_alpha: bool = True
    alpha: float = 1.0
    norm: str = "layernorm"
    branch_norm: bool | float | None = None
    # the p of a row of SCHEMES, taken where neither `p` nor `retraction` is given
    default_p: InitVar[float] = 1.0
    source: ClassVar[str] = "arXiv 2608.02668"

    def __post_init__(self, default_p: float) -> None:
        if self.p is not None and self.retraction is not None:
            raise ValueError(
                f"give p or retraction, not both, got p = {self.p!r} and retraction = {self.retraction!r}: "
                "p is short for retraction=p."
            )
        if self.p is None and self.retraction is None:
            object.__setattr__(self, "p", default_p)
        if self.index not in ("sublayer", "block"):
            raise unknown("index", self.index, ("sublayer", "block"))
        if self.output_init not in ("scaled", "full"):
            raise unknown("output_init", self.output_init, ("scaled", "full"))
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)
        check_radius(self.radius)
        if self.radius != "sqrt" and not self.entry_norm:
            raise ValueError(
                f"radius = {self.radius!r} is where the ScaleNorm at the entry starts, and entry_norm = False "
                "removes it: give one of the two."
            )
        # building one sublayer here checks all other options before a model is built
        self._update(2, 1, 2)

    @property
    def formula(self) -> str:
        retraction = as_retraction(self.p if self.retraction is None else self.retraction)  # type: ignore[arg-type]
        theta = retraction.formula
        if self.learnable_p:
            theta = "p arctan(beta/p) with a learned p"
        elif retraction.kind == "angular":
            theta += f" with p = {retraction.p:g}"
        f = "F(h)" if self.branch_norm in (None, False) else "g F(h)/rms(F(h))"
        return (
            f"h' = cos(t) h + |h| sin(t) z/|z|, t = {theta}, beta = alpha |z|/|h|, z = the part of "
            f"f = {f} across h; ScaleNorm at the entry, a final norm"
        )

    def _counted(self, sublayer: int, num_sublayers: int) -> tuple[int, int]:
        """The index and the number of updates, as the schedule counts them."""
        check_sublayer(sublayer, num_sublayers)
        return (
            (sublayer, num_sublayers) if self.index == "sublayer" else ((sublayer + 1) // 2, (num_sublayers + 1) // 2)
        )

    def step_sum(self, num_sublayers: int) -> float | None:
        """The sum of lambda_l. It grows with depth as the schedule does: a constant one has num_sublayers."""
        counted = (self._counted(sublayer, num_sublayers) for sublayer in range(1, num_sublayers + 1))
        return math.fsum(factor(self.schedule, *each) for each in counted)

    def _update(self, dim: int, sublayer: int, num_sublayers: int) -> SpheretNorm:
        return SpheretNorm(
            dim,
            *self._counted(sublayer, num_sublayers),
            # one of the two is given
            retraction=self.p if self.retraction is None else self.retraction,  # type: ignore[arg-type]
            schedule=self.schedule,
            max_angle=self.max_angle,
            learnable_p=self.learnable_p,
            exact_clamp=self.exact_clamp,
            learnable_alpha=self.learnable_alpha,
            alpha=self.alpha,
            branch_norm=self.branch_norm,
        )

    def enter(self, dim: int) -> nn.Module:
        return ScaleNorm(dim, self.exact_clamp, radius=self.radius) if self.entry_norm else nn.Identity()

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        norm = self._update(dim, sublayer, num_sublayers)
        inner_norm = make_norm(self.norm, dim, self.bias) if self.inner_norm else nn.Identity()
        return SphericalConnection(dim, sublayer, num_sublayers, norm, inner_norm)

    def exit(self, dim: int) -> nn.Module:
        return make_norm(self.norm, dim, self.bias) if self.final_norm else nn.Identity()

    def initialisation(self, num_sublayers: int) -> Initialisation:
        return super().initialisation(num_sublayers) if self.output_init == "scaled" else Initialisation(output=1.0)


@dataclass(frozen=True)
class GeoNorm(Spherical):
    """`Spherical` with the exponential map, and the schedule of GeoNorm's own paper."""

    # the SpheretNorm paper does not name GeoNorm's schedule
    schedule: str = "harmonic"
    default_p: InitVar[float] = math.inf
    source: ClassVar[str] = "Zheng et al. 2026, in the form of arXiv 2608.02668"


@dataclass(frozen=True)
class NormedSpheret(Spherical):
    """`Spherical` with a norm of each branch's output."""

    branch_norm: bool | float | None = True
    source: ClassVar[str] = "this library, after arXiv 2608.02668"
