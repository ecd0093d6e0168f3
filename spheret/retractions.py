r"""The table of retractions.

An equivariant retraction of the sphere, one that treats all directions alike, is one scalar function: it maps a step
of length beta to an angle theta. The update of a row needs two coefficients of it, as functions of w = beta^2:

    a(w) = cos theta(sqrt w)        b(w) = sin theta(sqrt w) / sqrt w

Both are analytic at 0. So no formula divides by a norm that may vanish, and the gradient of a zero step is finite.

The paper's family is theta = p arctan(beta/p), Definition 4 (p-SpheretNorm). p = 1 is the metric projection, p = 2
the Cayley transform and p = infinity the exponential map, Proposition 5 (special cases). CONTRIBUTING.md shows how
to add a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spheret.support.errors import unknown

# p is a number, or a tensor that broadcasts against the rows when it is learned
P = float | Tensor
TensorPair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Retraction:
    """A retraction of the sphere, as functions of the squared step w = beta^2.

    A retraction of your own needs only its angle: see `Retraction.from_angle`.

    Args:
        name: what it is called.
        formula: theta as text.
        theta: the angle of a step, a function of (beta, p): odd, with slope 1 at beta = 0.
        coefficients: a(w) and b(w), a function of (w, p).
        derivatives: da/dw and db/dw, a function of (w, p).
        cubic: k in theta = beta + k beta^3 + O(beta^5).
        largest_angle: the supremum of theta.
        cap: the angle that `max_angle="auto"` stands for; None for no cap.
        largest_step: theta is defined below this step; from there on it stays at `largest_angle`.
        p: the parameter of the angular family; NaN for a retraction outside it.
        p_derivatives: da/dp and db/dp, a function of (w, p); None if p cannot be learned.
        kind: the name by which the native and Triton kernels know this formula; empty if none has code for it.
        angle_function: the function that `from_angle` was given; None for every other retraction.
    """

    name: str
    _: KW_ONLY
    formula: str
    theta: Callable[[Tensor, P], Tensor]
    coefficients: Callable[[Tensor, P], TensorPair]
    derivatives: Callable[[Tensor, P], TensorPair]
    cubic: P
    largest_angle: P
    cap: float | None
    largest_step: float = math.inf
    p: P = math.nan
    p_derivatives: Callable[[Tensor, P], TensorPair] | None = None
    kind: str = ""
    angle_function: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.largest_step == math.inf:
            return
        if self.p_derivatives is not None:
            raise ValueError(
                f"{self.name!r} has a largest_step, so its p cannot be learned: leave p_derivatives out."
            )
        for name, function in _held_beyond_largest_step(self).items():
            object.__setattr__(self, name, function)

    def __repr__(self) -> str:
        return f"Retraction({self.name!r})"

    # a retraction is a constant, so a copy is the object itself
    def __copy__(self) -> Retraction:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Retraction:
        return self

    # a lambda cannot be pickled; what makes the retraction can
    def __reduce_ex__(self, protocol: Any) -> Any:
        if (name := table_name(self)) is not None:
            return as_retraction, (name,)
        if self.kind == "angular":
            return angular, (self.p,)
        if self.angle_function is None:
            return super().__reduce_ex__(protocol)
        return Retraction.from_angle, (
            self.angle_function, self.name, self.largest_angle, self.largest_step, self.cap
        )  # fmt: skip

    def angle(self, beta: Tensor) -> Tensor:
        """theta(beta), the angle of a step."""
        return self.theta(beta, self.p)

    @classmethod
    def from_angle(
        cls,
        theta: Callable[[Tensor], Tensor],
        name: str | None = None,
        largest_angle: float = math.inf,
        largest_step: float = math.inf,
        cap: float | Literal["auto"] | None = "auto",
    ) -> Retraction:
        """A retraction from only `theta(beta)`, a differentiable odd function with slope 1 at 0.

        Autograd supplies every derivative. The retraction runs on the `reference` and `closed` backends. The native
        and Triton kernels have no code for it, and choosing one of them is an error.

        Args:
            theta: the angle, a function of a tensor of steps.
            name: what it is called; None takes the name of the function.
            largest_angle: the supremum of theta.
            largest_step: theta is defined below this step; from there on the angle stays at `largest_angle`.
            cap: the automatic cap; "auto" is pi/4 where `largest_angle` exceeds pi/2, else None.
        """
        label = name or str(getattr(theta, "__name__", "custom"))
        slope, cubic = _taylor(theta, label)
        if abs(slope - 1) > 1e-6:
            raise ValueError(
                f"the angle of {label!r} has slope {slope:.6g} at 0; a retraction needs slope 1: "
                "divide theta by its slope, or put the factor into alpha."
            )

        def coefficients(w: Tensor, p: P) -> TensorPair:
            # below the switch theta is its Taylor polynomial, so that no sqrt(0) is ever differentiated; theta sees
            # the switch itself there, a step at which every angle is defined
            switch = math.sqrt(torch.finfo(w.dtype).eps)
            small = w < switch
            beta = torch.where(small, switch, w).sqrt()
            near = torch.where(small, w, 0.0)
            angle = theta(beta)
            a = torch.where(small, 1 - near / 2 + (1 / 24 - cubic) * near * near, angle.cos())
            b = torch.where(small, 1 + (cubic - 1 / 6) * near, angle.sin() / beta)
            return a, b

        def derivatives(w: Tensor, p: P) -> TensorPair:
            def both(w: Tensor) -> TensorPair:
                return coefficients(w, p)

            return torch.func.jvp(both, (w,), (torch.ones_like(w),))[1]

        return cls(
            label,
            formula=f"{label}(beta)",
            theta=lambda beta, p: theta(beta),
            coefficients=coefficients,
            derivatives=derivatives,
            cubic=cubic,
            largest_angle=largest_angle,
            cap=_usual_cap(largest_angle) if cap == "auto" else cap,
            largest_step=largest_step,
            angle_function=theta,
        )


def _usual_cap(largest_angle: float) -> float | None:
    """The paper's rule: pi/4 for an angle that can exceed pi/2, else no cap."""
    return math.pi / 4 if largest_angle > math.pi / 2 else None


def _held_beyond_largest_step(retraction: Retraction) -> dict[str, Callable[[Tensor, P], Any]]:
    """Its functions, with the angle held at `largest_angle` from `largest_step` on.

    Its own formulas see a zero in place of such a step. So neither their values nor their gradients there
    can be NaN, even where `torch.where` or the cap drops them.
    """
    theta, coefficients, derivatives = retraction.theta, retraction.coefficients, retraction.derivatives
    limit, angle = retraction.largest_step, float(retraction.largest_angle)
    cosine, sine = math.cos(angle), math.sin(angle)

    def held_theta(beta: Tensor, p: P) -> Tensor:
        # NaN is not beyond the limit: it goes through theta, and stays NaN
        beyond = beta.abs() >= limit
        return torch.where(beyond, angle * beta.sign(), theta(torch.where(beyond, 0.0, beta), p))

    def held_coefficients(w: Tensor, p: P) -> TensorPair:
        beyond = w >= limit**2
        a, b = coefficients(torch.where(beyond, 0.0, w), p)
        return torch.where(beyond, cosine, a), torch.where(beyond, sine * torch.where(beyond, w, 1.0).rsqrt(), b)

    def held_derivatives(w: Tensor, p: P) -> TensorPair:
        beyond = w >= limit**2
        da, db = derivatives(torch.where(beyond, 0.0, w), p)
        return torch.where(beyond, 0.0, da), torch.where(
            beyond, -0.5 * sine * torch.where(beyond, w, 1.0) ** -1.5, db
        )

    return {"theta": held_theta, "coefficients": held_coefficients, "derivatives": held_derivatives}


def _taylor(theta: Callable[[Tensor], Tensor], label: str) -> tuple[float, float]:
    """The slope of theta at 0 and its cubic coefficient, by autograd; an error if no retraction has this theta."""
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    terms: list[Tensor] = [theta(zero)]
    if not isinstance(terms[0], Tensor):
        raise TypeError(f"the angle of {label!r} must return a tensor, got {type(terms[0]).__name__}.")
    for _ in range(3):
        (slope,) = (
            torch.autograd.grad(terms[-1], zero, create_graph=True, allow_unused=True)
            if terms[-1].requires_grad
            else (None,)
        )
        terms.append(torch.zeros((), dtype=torch.float64) if slope is None else slope)
    value, first, second, third = (float(term.detach()) for term in terms)
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


# the retractions of the table


def _projection(w: Tensor, p: P) -> TensorPair:
    a = (1 + w).rsqrt()
    return a, a


def _projection_derivatives(w: Tensor, p: P) -> TensorPair:
    da = -0.5 * (1 + w) ** -1.5
    return da, da


def _cayley(w: Tensor, p: P) -> TensorPair:
    b = 4 / (4 + w)
    return 2 * b - 1, b


def _cayley_derivatives(w: Tensor, p: P) -> TensorPair:
    db = -4 / (4 + w) ** 2
    return 2 * db, db


def _exponential(w: Tensor, p: P) -> TensorPair:
    return cos_root(w), sinc_root(w)


def _exponential_derivatives(w: Tensor, p: P) -> TensorPair:
    return -0.5 * sinc_root(w), dsinc_root(w)


def _angular(w: Tensor, p: P) -> TensorPair:
    # theta = beta G(u) with u = w/p^2 and G(u) = arctan(sqrt u)/sqrt u
    ratio = atan_root(w / p**2)
    v = w * ratio**2
    return cos_root(v), ratio * sinc_root(v)


def _angular_derivatives(w: Tensor, p: P) -> TensorPair:
    u = w / p**2
    ratio, slope = atan_root(u), 1 / (1 + u)
    v = w * ratio**2
    sinc = sinc_root(v)
    # d(theta^2)/dw = ratio * slope; both terms of db are negative, so nothing cancels
    return -0.5 * ratio * sinc * slope, datan_root(u) * sinc / p**2 + ratio * dsinc_root(v) * ratio * slope


def _angular_p_derivatives(w: Tensor, p: P) -> TensorPair:
    # dtheta/dp = arctan x - x/(1+x^2) = -2 x^3 G'(x^2) with x = beta/p: no difference of nearly equal numbers
    a, b = _angular(w, p)
    u = w / p**2
    turn = -2 * u * datan_root(u) / p
    return -b * w * turn, a * turn


PROJECTION = Retraction(
    "projection",
    formula="arctan(beta)",
    theta=lambda beta, p: beta.atan(),
    coefficients=_projection,
    derivatives=_projection_derivatives,
    cubic=-1 / 3,
    largest_angle=math.pi / 2,
    cap=None,
    p=1.0,
    kind="projection",
)
CAYLEY = Retraction(
    "cayley",
    formula="2 arctan(beta/2)",
    theta=lambda beta, p: 2 * (beta / 2).atan(),
    coefficients=_cayley,
    derivatives=_cayley_derivatives,
    cubic=-1 / 12,
    largest_angle=math.pi,
    cap=math.pi / 4,
    p=2.0,
    kind="cayley",
)
EXPONENTIAL = Retraction(
    "exponential",
    formula="beta",
    theta=lambda beta, p: beta,
    coefficients=_exponential,
    derivatives=_exponential_derivatives,
    cubic=0.0,
    largest_angle=math.inf,
    cap=math.pi / 4,
    p=math.inf,
    kind="exponential",
)


# a smaller p hardly turns a row; a larger one is the exponential map to float32's last bit, for steps up to pi
SMALLEST_P, LARGEST_P = 1e-6, 1e6


def angular(p: P) -> Retraction:
    """theta = p arctan(beta/p): 1 is the projection, 2 the Cayley transform, inf the exponential map.

    The automatic cap is pi/4 for p > 1 and for a tensor, else None.

    Args:
        p: a number between SMALLEST_P and LARGEST_P, or inf, or a tensor that broadcasts against the rows. A tensor
            is learned: it receives a gradient, and its value is not checked.
    """
    if isinstance(p, Tensor):
        if not p.is_floating_point():
            raise TypeError(f"a learnable p must be a floating-point tensor, got {p.dtype}.")
        name, cap = "angular(p)", _usual_cap(math.inf)
    else:
        if not p > 0:
            raise ValueError(f"p must be greater than 0, got {p}. p = inf is the exponential map.")
        if not (SMALLEST_P <= p <= LARGEST_P or p == math.inf):
            raise ValueError(
                f"p must lie between {SMALLEST_P:g} and {LARGEST_P:g}, or be inf, the exponential map, got {p}: "
                "float32 does not hold the powers of beta/p beyond."
            )
        # an integer of any length is refused above
        p = float(p)
        for special in (PROJECTION, CAYLEY, EXPONENTIAL):
            if p == special.p:
                return special
        name, cap = f"angular({p:g})", _usual_cap(p * (math.pi / 2))
    return Retraction(
        name,
        formula="p arctan(beta/p)",
        theta=lambda beta, p: p * (beta / p).atan(),
        coefficients=_angular,
        derivatives=_angular_derivatives,
        cubic=-1 / (3 * p**2),
        largest_angle=p * (math.pi / 2),
        cap=cap,
        p=p,
        p_derivatives=_angular_p_derivatives,
        kind="angular",
    )


# "angular" by itself is the paper's choice of p
RETRACTIONS: dict[str, Retraction] = {
    "projection": PROJECTION,
    "cayley": CAYLEY,
    "angular": angular(0.5),
    "exponential": EXPONENTIAL,
}


def table_name(retraction: Retraction) -> str | None:
    """The name of this retraction in RETRACTIONS, or None if it is not there."""
    return next((name for name, own in RETRACTIONS.items() if own is retraction), None)


def as_retraction(retraction: str | float | Tensor | Retraction | Callable[[Tensor], Tensor]) -> Retraction:
    """The retraction for a name of RETRACTIONS, a p (number or tensor), a Retraction, or a function theta(beta)."""
    if isinstance(retraction, Retraction):
        return retraction
    if isinstance(retraction, str):
        if retraction not in RETRACTIONS:
            raise unknown("retraction", retraction, RETRACTIONS)
        return RETRACTIONS[retraction]
    if isinstance(retraction, Tensor):
        return angular(retraction)
    if isinstance(retraction, (int, float)) and not isinstance(retraction, bool):
        return angular(retraction)
    if callable(retraction):
        return Retraction.from_angle(retraction)
    raise TypeError(
        f"retraction must be a name ({', '.join(RETRACTIONS)}), a number p > 0, a Retraction or a function "
        f"theta(beta), got {type(retraction).__name__}."
    )
