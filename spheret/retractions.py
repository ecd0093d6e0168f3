r"""Every retraction on the sphere is one scalar function: from a step beta to an angle theta.

In w = beta^2 the two coefficients that a retraction needs,

    a(w) = cos theta(sqrt w)        b(w) = sin theta(sqrt w) / sqrt w

are analytic at 0, so nothing divides by a norm that may vanish, and the gradient at a zero step is finite.
A row of the table is four pure functions of (w, p); the functions of p alone are its cubic coefficient and
largest angle. The family is theta = p arctan(beta/p): p = 1 is the metric projection, p = 2 the Cayley
transform, p = infinity the exponential map (paper, Definition 3 and Proposition 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spheret.support.errors import unknown

# p is a number, or a tensor that broadcasts against the rows when it is learned
P = float | Tensor
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Retraction:
    """A retraction of the sphere, as functions of the squared step.

    | field | meaning |
    |---|---|
    | `theta(beta, p)` | the angle of a step of length beta >= 0 |
    | `coefficients(w, p)` | a(w), b(w) |
    | `derivatives(w, p)` | da/dw, db/dw |
    | `p_derivatives(w, p)` | da/dp, db/dp; None where p is no parameter |
    | `cubic` | k in theta = beta + k beta^3 + O(beta^5) |
    | `largest_angle` | the supremum of theta |

    A retraction of your own needs its angle alone: see `Retraction.from_angle`.
    """

    name: str
    p: P
    theta: Callable[[Tensor, P], Tensor]
    coefficients: Callable[[Tensor, P], Pair]
    derivatives: Callable[[Tensor, P], Pair]
    p_derivatives: Callable[[Tensor, P], Pair] | None
    cubic: P
    largest_angle: P
    # the row that native and Triton kernels know this one by; None: torch only
    kernel: str | None = None
    # what `from_angle` was given
    own_angle: Callable[[Tensor], Tensor] | None = None

    def __repr__(self) -> str:
        return f"Retraction({self.name!r})"

    # rows are constants: copied as themselves, and pickled by what makes them, for their functions cannot be
    def __deepcopy__(self, memo: dict[int, object]) -> Retraction:
        return self

    def __reduce__(self) -> tuple[Callable[..., Retraction], tuple[Any, ...]]:
        if self.kernel == "angular":
            return angular, (self.p,)
        if self.kernel is not None:
            return as_retraction, (self.name,)
        return Retraction.from_angle, (self.own_angle, self.name, self.largest_angle)

    def angle(self, beta: Tensor) -> Tensor:
        """theta(beta), the angle of a step."""
        return self.theta(beta, self.p)

    def a(self, w: Tensor) -> Tensor:
        """cos theta(sqrt w)."""
        return self.coefficients(w, self.p)[0]

    def b(self, w: Tensor) -> Tensor:
        """sin theta(sqrt w) / sqrt w."""
        return self.coefficients(w, self.p)[1]

    @classmethod
    def from_angle(
        cls, theta: Callable[[Tensor], Tensor], name: str | None = None, largest_angle: float = math.inf
    ) -> Retraction:
        """A retraction from `theta(beta)` alone, a differentiable odd function with slope 1 at 0.

        Autograd supplies every derivative. It runs on the `reference` and `closed` backends; the native and
        Triton kernels have no code for it, and asking for one is an error.
        """
        label = name or str(getattr(theta, "__name__", "custom"))
        slope, cubic = _taylor(theta, label)
        if abs(slope - 1) > 1e-6:
            raise ValueError(
                f"the angle of {label!r} has slope {slope:.6g} at 0; a retraction needs slope 1: "
                "divide theta by its slope, or put the factor into alpha."
            )

        def coefficients(w: Tensor, p: P) -> Pair:
            # below the switch theta is its Taylor polynomial, so that no sqrt(0) is ever differentiated
            small = w < math.sqrt(torch.finfo(w.dtype).eps)
            beta = torch.where(small, 1.0, w).sqrt()
            near = torch.where(small, w, 0.0)
            angle = theta(beta)
            a = torch.where(small, 1 - near / 2 + (1 / 24 - cubic) * near * near, angle.cos())
            b = torch.where(small, 1 + (cubic - 1 / 6) * near, angle.sin() / beta)
            return a, b

        def derivatives(w: Tensor, p: P) -> Pair:
            def both(w: Tensor) -> Pair:
                return coefficients(w, p)

            return torch.func.jvp(both, (w,), (torch.ones_like(w),))[1]

        return cls(
            label,
            math.nan,
            lambda beta, p: theta(beta),
            coefficients,
            derivatives,
            None,
            cubic,
            largest_angle,
            own_angle=theta,
        )


def _taylor(theta: Callable[[Tensor], Tensor], label: str) -> tuple[float, float]:
    """The slope of theta at 0 and its cubic coefficient, by autograd, after a look at what theta is."""
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    order: list[Tensor] = [theta(zero)]
    for _ in range(3):
        (slope,) = (
            torch.autograd.grad(order[-1], zero, create_graph=True, allow_unused=True)
            if order[-1].requires_grad
            else (None,)
        )
        order.append(torch.zeros((), dtype=torch.float64) if slope is None else slope)
    value, first, second, third = (float(term.detach()) for term in order)
    if not all(map(math.isfinite, (value, first, second, third))) or abs(value) > 1e-9 or abs(second) > 1e-6:
        raise ValueError(
            f"the angle of {label!r} has theta(0) = {value:.3g}, theta''(0) = {second:.3g} (slope {first:.3g}); "
            "a retraction needs a smooth odd function of beta with theta(0) = 0."
        )
    return first, third / 6


# functions that are analytic at 0 where their usual formulas are 0/0


def _analytic(x: Tensor, switch: float, terms: Sequence[float], direct: Callable[[Tensor], Tensor]) -> Tensor:
    """The power series below the switch, the direct formula above it; neither sees the other's arguments."""
    small = x < switch
    near = torch.where(small, x, 0.0)
    series = torch.full_like(near, terms[-1])
    for term in reversed(terms[:-1]):
        series = series * near + term
    return torch.where(small, series, direct(torch.where(small, 1.0, x)))


# enough terms for float64: 1/21! = 2e-20 at the switch 1, and (1/16)^14 = 1e-17 at the switch 1/16
_COS = [(-1) ** k / math.factorial(2 * k) for k in range(11)]
_SINC = [(-1) ** k / math.factorial(2 * k + 1) for k in range(11)]
_DSINC = [(k + 1) * _SINC[k + 1] for k in range(10)]
_ATAN = [(-1) ** k / (2 * k + 1) for k in range(14)]
_DATAN = [(k + 1) * (-1) ** (k + 1) / (2 * k + 3) for k in range(14)]


def cos_root(v: Tensor) -> Tensor:
    """cos(sqrt v)."""
    return _analytic(v, 1.0, _COS, lambda v: v.sqrt().cos())


def sinc_root(v: Tensor) -> Tensor:
    """sin(sqrt v) / sqrt v."""
    return _analytic(v, 1.0, _SINC, lambda v: v.sqrt().sin() / v.sqrt())


def dsinc_root(v: Tensor) -> Tensor:
    """d/dv of sin(sqrt v) / sqrt v."""
    return _analytic(v, 1.0, _DSINC, lambda v: (v.sqrt().cos() - v.sqrt().sin() / v.sqrt()) / (2 * v))


def atan_root(u: Tensor) -> Tensor:
    """arctan(sqrt u) / sqrt u."""
    return _analytic(u, 1 / 16, _ATAN, lambda u: u.sqrt().atan() / u.sqrt())


def datan_root(u: Tensor) -> Tensor:
    """d/du of arctan(sqrt u) / sqrt u."""
    return _analytic(u, 1 / 16, _DATAN, lambda u: (1 / (1 + u) - u.sqrt().atan() / u.sqrt()) / (2 * u))


# the rows


def _projection(w: Tensor, p: P) -> Pair:
    a = (1 + w).rsqrt()
    return a, a


def _projection_derivatives(w: Tensor, p: P) -> Pair:
    da = -0.5 * (1 + w) ** -1.5
    return da, da


def _cayley(w: Tensor, p: P) -> Pair:
    b = 4 / (4 + w)
    return 2 * b - 1, b


def _cayley_derivatives(w: Tensor, p: P) -> Pair:
    db = -4 / (4 + w) ** 2
    return 2 * db, db


def _exponential(w: Tensor, p: P) -> Pair:
    return cos_root(w), sinc_root(w)


def _exponential_derivatives(w: Tensor, p: P) -> Pair:
    return -0.5 * sinc_root(w), dsinc_root(w)


def _angular(w: Tensor, p: P) -> Pair:
    # theta = beta G(u) with u = w/p^2 and G(u) = arctan(sqrt u)/sqrt u
    ratio = atan_root(w / p**2)
    v = w * ratio**2
    return cos_root(v), ratio * sinc_root(v)


def _angular_derivatives(w: Tensor, p: P) -> Pair:
    u = w / p**2
    ratio, slope = atan_root(u), 1 / (1 + u)
    v = w * ratio**2
    sinc = sinc_root(v)
    # d(theta^2)/dw = ratio * slope; both terms of db are negative, so nothing cancels
    return -0.5 * ratio * sinc * slope, datan_root(u) * sinc / p**2 + ratio * dsinc_root(v) * ratio * slope


def _angular_p_derivatives(w: Tensor, p: P) -> Pair:
    # dtheta/dp = arctan x - x/(1+x^2) = -2 x^3 G'(x^2) with x = beta/p: no difference of nearly equal numbers
    a, b = _angular(w, p)
    u = w / p**2
    turn = -2 * u * datan_root(u) / p
    return -b * w * turn, a * turn


PROJECTION = Retraction(
    "projection",
    1.0,
    lambda beta, p: beta.atan(),
    _projection,
    _projection_derivatives,
    None,
    cubic=-1 / 3,
    largest_angle=math.pi / 2,
    kernel="projection",
)
CAYLEY = Retraction(
    "cayley",
    2.0,
    lambda beta, p: 2 * (beta / 2).atan(),
    _cayley,
    _cayley_derivatives,
    None,
    cubic=-1 / 12,
    largest_angle=math.pi,
    kernel="cayley",
)
EXPONENTIAL = Retraction(
    "exponential",
    math.inf,
    lambda beta, p: beta,
    _exponential,
    _exponential_derivatives,
    None,
    cubic=0.0,
    largest_angle=math.inf,
    kernel="exponential",
)


def angular(p: P) -> Retraction:
    """theta = p arctan(beta/p): 1 is the projection, 2 Cayley, inf the exponential map.

    `p` is a number > 0, or a tensor that broadcasts against the rows (a 1-element parameter to learn it; its
    value is not checked, and it receives a gradient).
    """
    if isinstance(p, Tensor):
        if not p.is_floating_point():
            raise TypeError(f"a learnable p must be a floating-point tensor, got {p.dtype}.")
        name = "angular(p)"
    else:
        p = float(p)
        if not p > 0:
            raise ValueError(f"p must be greater than 0, got {p}. p = inf is the exponential map.")
        for row in (PROJECTION, CAYLEY, EXPONENTIAL):
            if p == row.p:
                return row
        name = f"angular({p:g})"
    return Retraction(
        name,
        p,
        lambda beta, p: p * (beta / p).atan(),
        _angular,
        _angular_derivatives,
        _angular_p_derivatives,
        cubic=-1 / (3 * p**2),
        largest_angle=p * (math.pi / 2),
        kernel="angular",
    )


# "angular" alone is the paper's choice of p
RETRACTIONS: dict[str, Retraction] = {
    "projection": PROJECTION,
    "cayley": CAYLEY,
    "angular": angular(0.5),
    "exponential": EXPONENTIAL,
}


def as_retraction(given: str | float | Tensor | Retraction | Callable[[Tensor], Tensor]) -> Retraction:
    """A name of RETRACTIONS, a p (number or tensor), a Retraction, or a function theta(beta)."""
    if isinstance(given, Retraction):
        return given
    if isinstance(given, str):
        if given not in RETRACTIONS:
            raise unknown("retraction", given, RETRACTIONS)
        return RETRACTIONS[given]
    if isinstance(given, Tensor):
        return angular(given)
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return angular(given)
    if callable(given):
        return Retraction.from_angle(given)
    raise TypeError(
        f"retraction must be a name ({', '.join(RETRACTIONS)}), a number p > 0, a Retraction or a function "
        f"theta(beta), got {type(given).__name__}."
    )
