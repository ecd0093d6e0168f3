"""SpheretNorm, and the schemes that keep the whole stream on one sphere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from spheret.bounds import bounded_softplus, inverse_softplus
from spheret.connections.base import Connection, Scheme, check_dim, check_sublayer
from spheret.connections.norms import LayerNorm, ScaleNorm
from spheret.kernels import check_cap, check_rows, compute_dtype, retract_unchecked
from spheret.kernels.closed import dots
from spheret.retractions import P, Retraction, angular, as_retraction
from spheret.schedules import factor
from spheret.support.errors import unknown


def automatic_cap(retraction: Retraction, learned: bool) -> float | None:
    """The angle that `max_angle="auto"` stands for: the retraction's own cap, and pi/4 if p is learned."""
    return math.pi / 4 if learned else retraction.cap


class SpheretNorm(nn.Module):
    r"""One update of a spherical stream: h' = R_h(alpha P_h f), of the same norm as h.

        alpha = lambda_l clamp(softplus(a), max 1)        |h'| = |h|,  angle(h, h') = theta(alpha |z|/|h|)

    dim: the width of the stream, at least 2.
    sublayer: the 1-based sublayer; num_sublayers: how many there are (the linear schedules need it).
    retraction: as in `spheret.retract`.  schedule: a name of SCHEDULES, which gives lambda_l.
    max_angle: radians, None, or "auto" for the retraction's own cap.
    learnable_p: p becomes softplus of a 1-element parameter that starts at the retraction's own p.
    exact_clamp: the paper's torch.clamp, whose gradient dies beyond the bound (see spheret.bounds).

    A row of zeros stays zero; NaN in gives NaN out. Paper: Definition 3 and Section 3.2.
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
    ):
        super().__init__()
        check_sublayer(sublayer, num_sublayers)
        self.dim, self.sublayer, self.num_sublayers = check_dim(dim), sublayer, num_sublayers
        self.schedule, self.exact_clamp, self.passing = schedule, exact_clamp, False
        self.factor = factor(schedule, sublayer, num_sublayers)
        self.retraction = as_retraction(retraction)
        if isinstance(self.retraction.p, Tensor):
            raise TypeError("a p to learn is the module's own: give its start as a number, with learnable_p=True.")
        if isinstance(max_angle, str):
            if max_angle != "auto":
                raise ValueError(f'max_angle must be a number, None or "auto", got {max_angle!r}.')
            max_angle = automatic_cap(self.retraction, learnable_p)
        check_cap(max_angle)
        self.max_angle = max_angle
        self.a = nn.Parameter(torch.full((1,), inverse_softplus(1.0)))
        self.raw_p: nn.Parameter | None = None
        if learnable_p:
            start = float(self.retraction.p)
            if not math.isfinite(start):
                raise ValueError(
                    f"learnable_p needs a finite p to start from, and {self.retraction.name!r} has p = {start}: "
                    "give a number, e.g. retraction=4.0."
                )
            self.raw_p = nn.Parameter(torch.full((1,), inverse_softplus(start)))
            # a row that keeps p open, whatever closed form its starting value has
            self.retraction = angular(torch.ones(1))

    @property
    def alpha(self) -> Tensor:
        """The step size lambda_l clamp(softplus(a), max 1), a 1-element tensor."""
        return bounded_softplus(self.a, 0.0, 1.0, self.exact_clamp, self.factor, self.passing)

    def bounded(self) -> tuple[nn.Parameter, float, float]:
        """The parameter whose softplus is kept in an interval, and that interval."""
        return self.a, 0.0, 1.0

    @property
    def p(self) -> P:
        """The retraction's p: a number, or the learned 1-element tensor."""
        if self.raw_p is None:
            return self.retraction.p
        return torch.nn.functional.softplus(self.raw_p.to(compute_dtype(self.raw_p)))

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        check_rows(h, f, self.dim)
        return retract_unchecked(h, f, self.alpha, self.retraction, self.p, self.max_angle)

    def angle(self, h: Tensor, f: Tensor) -> Tensor:
        """The angle theta between h and the next state, (...): radians, not below 0."""
        check_rows(h, f, self.dim)
        dtype = compute_dtype(h, f)
        hh, _, zz = dots(h.to(dtype), f.to(dtype))
        # a zero has no gradient under a square root
        tiny = torch.finfo(dtype).tiny
        eta = zz.clamp(min=tiny).sqrt() / hh.clamp(min=tiny).sqrt()
        beta = self.alpha * torch.where(hh == 0, 0.0, eta)
        theta = self.retraction.theta(beta, self.p)
        return (theta if self.max_angle is None else theta.clamp(max=self.max_angle)).squeeze(-1)

    def extra_repr(self) -> str:
        p = "learned p" if self.raw_p is not None else self.retraction.name
        cap = "no cap" if self.max_angle is None else f"max_angle={self.max_angle:.4f}"
        return f"{self.dim}, sublayer={self.sublayer}, {p}, {self.schedule}, {cap}"


class SphericalConnection(Connection):
    """SpheretNorm as a connection; the branch reads the state itself, or its LayerNorm with `inner_norm`."""

    def __init__(self, dim: int, sublayer: int, num_sublayers: int, update: SpheretNorm, inner: nn.Module):
        super().__init__(dim, sublayer, num_sublayers)
        self.update, self.inner = update, inner

    def read(self, h: Tensor) -> Tensor:
        return self.inner(h)

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        return self.update(h, f)


@dataclass(frozen=True)
class Spherical(Scheme):
    """A stream of one norm: ScaleNorm at the entry, SpheretNorm at every sublayer, a final LayerNorm.

    | option | meaning |
    |---|---|
    | `p` | the retraction theta = p arctan(beta/p), p > 0; inf is the exponential map |
    | `retraction` | a name of RETRACTIONS, a number p, or a Retraction; `p` is short for `retraction=p` |
    | `schedule` | a name of SCHEDULES |
    | `learnable_p` | learn p, one a sublayer, starting from `p`; capped at pi/4 throughout |
    | `max_angle` | radians, None or "auto" |
    | `index` | what the schedule counts: "sublayer" or "block" |
    | `inner_norm` | a LayerNorm before each branch |
    | `final_norm`, `entry_norm` | whether the exit LayerNorm and the entry ScaleNorm are there |
    | `exact_clamp` | the paper's torch.clamp for the bounded scalars |
    | `bias` | whether LayerNorms have a bias |
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
        if self.p is not None and not isinstance(self.p, (int, float)):
            raise ValueError(
                f"p must be a number greater than 0, got {self.p!r}: a name goes into the option retraction."
            )
        if self.index not in ("sublayer", "block"):
            raise unknown("index", self.index, ("sublayer", "block"))
        # a sublayer built here finds every other wrong option before any model is
        self._update(2, 1, 2)

    def _update(self, dim: int, sublayer: int, num_sublayers: int) -> SpheretNorm:
        check_sublayer(sublayer, num_sublayers)
        if self.index == "block":
            sublayer, num_sublayers = (sublayer + 1) // 2, (num_sublayers + 1) // 2
        return SpheretNorm(
            dim,
            sublayer,
            num_sublayers,
            # one of the two is given
            retraction=self.p if self.retraction is None else self.retraction,  # type: ignore[arg-type]
            schedule=self.schedule,
            max_angle=self.max_angle,
            learnable_p=self.learnable_p,
            exact_clamp=self.exact_clamp,
        )

    def enter(self, dim: int) -> nn.Module:
        return ScaleNorm(dim, self.exact_clamp) if self.entry_norm else nn.Identity()

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        update = self._update(dim, sublayer, num_sublayers)
        inner = LayerNorm(dim, self.bias) if self.inner_norm else nn.Identity()
        return SphericalConnection(dim, sublayer, num_sublayers, update, inner)

    def exit(self, dim: int) -> nn.Module:
        return LayerNorm(dim, self.bias) if self.final_norm else nn.Identity()
