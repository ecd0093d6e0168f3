r"""The Jacobian of one spherical update in closed form, and the bounds that the paper proves for it.

With r = |h|, z = (I - hh'/r^2) f, s = |z|, eta = s/r, beta = |alpha| eta, u = h/r, v = z/s (0 where s = 0) and

    A = DF(h)    c = <h,f>/r^2    B = A - c I    P = I - uu'

the update h' = cos(theta) h + r sin(theta) v has the Jacobian J = Q + E (paper, appendix: Full Jacobian):

    Q = cos(theta) I + sin(theta) (vu' - uv')
    E = |alpha| sin(theta)/beta (P - vv') B + theta'(beta) (cos(theta) v - sin(theta) u) (|alpha| v'B - beta u')

    |E| <= delta = |alpha| |sin(theta)/beta| |B| + |theta'(beta)| (|alpha| |B| + beta)
        <= Delta = |alpha| (2 |B| + eta)
    sigma_max(J) <= 1 + Delta        sigma_min(J) >= m = max(0, q - Delta),    q = |cos(theta)|

At s = 0 these are Q = I and E = alpha P B, the paper's zero-tangent case. At the angle cap theta' = 0. The paper
writes theta' = p^2/(p^2 + beta^2) for its angular family; here theta' belongs to the retraction's own angle.

`measure_jacobians` measures the singular values beside the bounds. J belongs to a token on its own path: the
derivative of its next state with respect to its own state. G is the product of the first 1, 2, ... of them. Then

    m <= sigma_min(J)    sigma_max(J) <= 1 + Delta    S = sum Delta    A = sum theta^2
    exp(-(A/2 + S)/m*) <= prod m <= sigma_min(G)      sigma_max(G) <= exp(S)

where m* is the smallest m (paper: Layer-wise and depth-wise Jacobian bounds; Depth-wise conditioning criterion). If
2|B| + eta <= K and a eta <= H, where alpha = a lambda, then S <= K sum lambda and A <= H^2 sum lambda^2 (Growth under
depth schedules).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spheret.connections import Connection, SpheretNorm, angle_between
from spheret.connections.base import add
from spheret.conversion.trace import Argument
from spheret.kernels import check_cap, check_rows
from spheret.kernels.closed import capped
from spheret.model.branches import MLP, Attention
from spheret.observe.finding import BranchEnd, Call, FoundSublayer
from spheret.observe.hooks import After, Before, SeenSublayer, at_calls, with_argument
from spheret.observe.inspection import Tick, anatomy_of, call, seen_whole
from spheret.retractions import P, Retraction, as_retraction
from spheret.support.errors import shortened

# x -> (f, out): the branch's output and the next state
Both = Callable[[Tensor], tuple[Tensor, Tensor]]
# the largest size of one batch of directional derivatives, in numbers
_NUMBERS = 1 << 22
# a branch that runs again returns what it did, but for rounding
_ROUNDING = 1e-5


class Turn(NamedTuple):
    """The plane and the angle of an update; u and v are (..., d), the other fields (...)."""

    u: Tensor
    v: Tensor
    c: Tensor
    alpha: Tensor
    eta: Tensor
    beta: Tensor
    theta: Tensor
    slope: Tensor  # dtheta/dbeta, 0 at the cap
    gain: Tensor  # sin(theta)/beta
    at_cap: Tensor


class Parts(NamedTuple):
    """The two terms of J = Q + E, and the B inside E: (..., d, d) each."""

    Q: Tensor
    E: Tensor
    B: Tensor

    @property
    def J(self) -> Tensor:
        return self.Q + self.E


class Bounds(NamedTuple):
    """What follows from an upper bound on |B|; every field is (...)."""

    Delta: Tensor
    delta: Tensor
    q: Tensor
    m: Tensor

    @property
    def largest(self) -> Tensor:
        """The bound on sigma_max(J)."""
        return 1 + self.Delta


def turn(
    h: Tensor,
    f: Tensor,
    alpha: float | Tensor = 1.0,
    retraction: str | float | Retraction | Callable[[Tensor], Tensor] = "projection",
    max_angle: float | None = None,
    p: P | None = None,
) -> Turn:
    """The plane and the angle by which each row of h (..., d) turns towards f.

    Args:
        h: the states.
        f: the branch's outputs.
        alpha: a number, or one number per row with last dimension 1.
        retraction: as in `spheret.retract`.
        max_angle: as in `spheret.retract`.
        p: used in place of the retraction's own p, for a learned p.
    """
    own = as_retraction(retraction)
    check_rows(h, f)
    check_cap(max_angle)
    r = h.norm(dim=-1, keepdim=True)
    if (r == 0).any():
        raise ValueError(
            "a row of zeros lies on no sphere, so the update has no Jacobian there: leave such rows out."
        )
    u = h / r
    along = (u * f).sum(-1, keepdim=True)
    z = f - along * u
    # a second pass removes what rounding left along h
    z = z - (u * z).sum(-1, keepdim=True) * u
    s = z.norm(dim=-1, keepdim=True)
    step = torch.as_tensor(alpha, dtype=h.dtype, device=h.device)
    eta = s / r
    beta = step.abs() * eta
    own_p = own.p if p is None else p
    (_, gain), over = capped(own, beta * beta, own_p, max_angle)
    theta, slope = _with_slope(lambda beta: own.theta(beta, own_p), beta)
    at_cap = torch.zeros_like(beta, dtype=torch.bool) if over is None else over
    if max_angle is not None:
        theta = torch.where(at_cap, max_angle, theta)
    slope = torch.where(at_cap, 0.0, slope)
    # a negative step is a positive step in the opposite direction
    v = torch.where(s > 0, z / torch.where(s > 0, s, 1.0), 0.0) * torch.where(step < 0, -1.0, 1.0)
    scalars = (along / r, step.expand_as(s), eta, beta, theta, slope, gain, at_cap)
    return Turn(u, v, *(x.squeeze(-1) for x in scalars))


def _with_slope(theta: Callable[[Tensor], Tensor], beta: Tensor) -> tuple[Tensor, Tensor]:
    """theta(beta) and its derivative."""
    result = torch.func.jvp(theta, (beta,), (torch.ones_like(beta),))
    return result[0], result[1]


def closed_form(t: Turn, A: Tensor) -> Parts:
    """Q, E and B of an update, whose sum Q + E is its Jacobian.

    Args:
        t: the turn.
        A: the Jacobian of the branch at h, (..., d, d).
    """
    u, v = t.u[..., None], t.v[..., None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    B = A - _lift(t.c) * eye
    cos, sin = _lift(t.theta.cos()), _lift(t.theta.sin())
    Q = cos * eye + sin * (v @ u.mT - u @ v.mT)
    # B takes the sign of alpha, as v already does
    signed = torch.where(_lift(t.alpha) < 0, -B, B)
    size, slope = _lift(t.alpha.abs()), _lift(t.slope)
    across = signed - u @ (u.mT @ signed) - v @ (v.mT @ signed)
    away = slope * (cos * v - sin * u) @ (size * (v.mT @ signed) - _lift(t.beta) * u.mT)
    return Parts(Q, size * _lift(t.gain) * across + away, B)


def _lift(x: Tensor) -> Tensor:
    return x[..., None, None]


def bounds(t: Turn, norm: Tensor) -> Bounds:
    """The bounds of each row.

    Args:
        t: the turns.
        norm: the norm of each row's own B, or an upper bound on it, (...).
    """
    alpha, gain, slope, q = t.alpha.abs(), t.gain.abs(), t.slope.abs(), t.theta.cos().abs()
    delta = alpha * gain * norm + slope * (alpha * norm + t.beta)
    # Delta >= delta holds for the paper's angles, but not for an angle that grows faster than its step
    Delta = torch.maximum(alpha * (2 * norm + t.eta), delta)
    return Bounds(Delta, delta, q, (q - Delta).clamp(min=0))


# the sublayers of a model as functions of single tokens, to be differentiated in float64


@dataclass
class Update:
    """One sublayer of one forward pass over a window of T tokens, in one stream.

    Args:
        number: of the sublayer, from 1 on.
        kind: of its branch, as in `SublayerObservation.branch`.
        h: the stream before it, (1, T, width).
        f: the branch's output.
        out: the stream behind it.
        branch: a function of all states of the window; of any number of states, if `alone`.
        join: (h, f) -> the next states.
        connection: spheret's connection that joins, if there is one.
        attention: spheret's attention, if it is the branch.
        alone: whether the branch may be given some tokens of the window.
    """

    number: int
    kind: str
    h: Tensor
    f: Tensor
    out: Tensor
    branch: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    connection: Connection | None = None
    attention: Attention | None = None
    alone: bool = False

    def branch_output(self, f: Tensor) -> Tensor:
        """f as the connection takes it, see `Connection.branch_output`."""
        return f if self.connection is None else self.connection.branch_output(f)


def float64_twin(model: nn.Module) -> nn.Module:
    """A copy of the model in float64 and evaluation mode, on a device that has float64."""
    place = "cpu" if any(p.device.type == "mps" for p in model.parameters()) else None
    return copy.deepcopy(model).to(place, torch.float64).eval().requires_grad_(False)


@torch.no_grad()
def updates(model: nn.Module, tokens: Tensor) -> list[Update]:
    """The updates of one forward pass over tokens (1, time). It is an error if one cannot be differentiated."""
    anatomy, modules = anatomy_of(model, tokens), dict(model.named_modules())
    given: dict[str, tuple[Any, Any]] = {}
    before: dict[Call, Before] = {}

    def keep(name: str, args: Any, kwargs: Any) -> None:
        given[name] = args, kwargs

    for found in anatomy.sublayers:
        for name in [found.join.module] if found.join is not None else _holders(found):
            before[Call(name, 0)] = partial(keep, name)
    with at_calls(modules, before, {}):
        seen = seen_whole(model, anatomy, lambda: call(model, tokens)).sublayers
    result = []
    for number, (found, each) in enumerate(zip(anatomy.sublayers, seen, strict=True), start=1):
        if not each.states[2].isfinite().all():  # type: ignore[index]
            raise ValueError(f"the stream is not finite after sublayer {number}: there is nothing to measure.")
        if (each.states[0] == 0).all(-1).any():  # type: ignore[index]
            raise ValueError(f"a token's stream is all zeros before sublayer {number}: it lies on no sphere.")
        result.append(_update_of(number, found, each, modules, given))
    return result


def _update_of(
    number: int,
    found: FoundSublayer,
    seen: SeenSublayer,
    modules: dict[str, nn.Module],
    given: dict[str, tuple[Any, Any]],
) -> Update:
    assert seen.states is not None
    h, f, out = (x[None] for x in seen.states)
    if found.join is None:
        branch = _branch_of_sum(found, modules, given, tuple(h.shape))
        update = Update(number, found.branch, h, f, out, branch, seen.write or add)
    else:
        connection = modules[found.join.module]
        if not isinstance(connection, Connection) or found.join.module not in given:
            raise ValueError(
                f"{found.join.module} is a {type(connection).__name__}, which is given the branch's output, so that "
                "its branch cannot be run again: revert a conversion first, or use a connection of spheret."
            )
        function = given[found.join.module][0][1]
        branch = _branch_of_connection(connection, function)
        own = modules.get(found.name)
        attention = own if isinstance(own, Attention) else None
        alone = isinstance(own, (Attention, MLP))
        update = Update(number, found.branch, h, f, out, branch, connection.write, connection, attention, alone)
    try:
        again = update.branch(h)
    # the code is not ours, so that any exception may come
    except Exception as error:
        raise ValueError(f"the branch of {found.name} cannot be run again: {shortened(str(error), 200)}") from None
    if not (again - f).norm() <= _ROUNDING * f.norm():
        raise ValueError(f"the branch of {found.name} returns something else when it is run again by itself.")
    return update


def _branch_of_connection(connection: Connection, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(connection.read(x))


class _Done(Exception):
    """The branch has ended, and what comes after it in its layer is not wanted."""


def _holders(found: FoundSublayer) -> list[str]:
    """The modules that hold all readers and ends of a branch, the smallest first; the last one is the model."""
    calls = [*(call for call, _ in found.readers), *(end.call for end in found.ends)]
    names = [call.module.split(".") for call in calls]
    shared = 0
    while all(len(name) > shared and name[shared] == names[0][shared] for name in names):
        shared += 1
    return [".".join(names[0][:count]) for count in range(shared, -1, -1)]


def _branch_of_sum(
    found: FoundSublayer, modules: dict[str, nn.Module], given: dict[str, tuple[Any, Any]], shape: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """The branch's output for the states x (1, T, width), by running the module that holds it as it was called."""
    holder = next(name for name in _holders(found) if name in given)
    args, kwargs = given[holder]

    def run(x: Tensor) -> Tensor:
        parts: list[Tensor] = []

        def read(where: Argument) -> Before:
            return lambda args, kwargs: with_argument(args, kwargs, where, x)

        def end(one: BranchEnd) -> After:
            def take(args: Any, output: Any) -> None:
                parts.append(one.scaled(one.of(output)))
                if len(parts) == len(found.ends):
                    raise _Done

            return take

        before = {call: read(where) for call, where in found.readers}
        after = {one.call: end(one) for one in found.ends}
        try:
            with at_calls(modules, before, after):
                modules[holder](*args, **kwargs)
        except _Done:
            return sum(parts[1:], parts[0]).reshape(shape)
        raise ValueError("it did not end")

    return run


def own_path(update: Update, positions: Tensor) -> Both:
    """The next state of each token as a function of its own state x (1, positions, width), with all others fixed.

    No token attends to a later one. So the product of these Jacobians over the sublayers is exactly the derivative of
    the token's last state with respect to its own first state.
    """
    branch: Callable[[Tensor], Tensor]
    if update.attention is not None:
        assert update.connection is not None
        attend = _attention_of_one(update.attention, update.connection.read(update.h), positions)
        branch = _branch_of_connection(update.connection, attend)
    elif update.alone:
        branch = update.branch
    else:
        branch = partial(_each_in_its_window, update, positions)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        f = branch(x)
        return update.branch_output(f), update.join(x, f)

    return both


def _each_in_its_window(update: Update, positions: Tensor, x: Tensor) -> Tensor:
    """The branch's output at each position, from a window in which only that token has its state from x."""
    outputs = [
        update.branch(update.h.index_copy(1, position, x[:, i : i + 1]))[:, position]
        for i, position in enumerate(positions.split(1))
    ]
    return torch.cat(outputs, 1)


def _attention_of_one(branch: Attention, context: Tensor, positions: Tensor) -> Callable[[Tensor], Tensor]:
    """Attention of the tokens at `positions`, with the keys and values of the tokens before them fixed."""
    keys, values = map(branch.for_every_head, branch.queries_keys_values(context)[1:])
    turn = branch.rotation(positions)
    hidden = torch.arange(context.shape[1], device=context.device) >= positions[:, None]

    def attend(x: Tensor) -> Tensor:
        q, *own_parts = branch.queries_keys_values(x, turn)
        own_key, own_value = map(branch.for_every_head, own_parts)
        before = (q @ keys.mT).masked_fill(hidden, -math.inf)
        own = (q * own_key).sum(-1, keepdim=True)
        weights = (torch.cat([before, own], -1) / math.sqrt(q.shape[-1])).softmax(-1)
        y = weights[..., :-1] @ values + weights[..., -1:] * own_value
        return branch.output(y.transpose(1, 2).reshape(x.shape))

    return attend


@contextmanager
def differentiable() -> Iterator[None]:
    """A context in which attention supports forward-mode differentiation. torch's fast kernels do not."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def token_jacobians(update: Update, both: Both, x: Tensor) -> tuple[Tensor, Tensor]:
    """A = DF and J of every token of x (1, n, width) by automatic differentiation, each (n, width, width)."""

    def along(direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(both, (x,), (direction.expand_as(x),))[1]

    time, width = update.h.shape[1:]
    heads = 0 if update.attention is None else update.attention.heads
    # one batch keeps the intermediate values of its tokens below _NUMBERS
    tokens = x.shape[1] if update.alone else time
    chunk = max(1, _NUMBERS // (tokens * max(8 * width, heads * time)))
    A, J = torch.vmap(along, chunk_size=chunk)(torch.eye(width, dtype=x.dtype, device=x.device))
    return A[:, 0].permute(1, 2, 0), J[:, 0].permute(1, 2, 0)


class Measured(NamedTuple):
    """What holds for any update; every field is (sublayers, tokens).

    unresolved, stack_unresolved: float64 cannot tell a sigma_min below this from 0.
    """

    theta: Tensor
    eta: Tensor
    B: Tensor
    sigma_min: Tensor
    unresolved: Tensor
    sigma_max: Tensor
    stack_min: Tensor
    stack_unresolved: Tensor
    stack_max: Tensor


class Sums(NamedTuple):
    """Running values after 1, 2, ... sublayers, (sublayers, tokens) each."""

    S: Tensor
    A: Tensor
    criterion: Tensor
    product_m: Tensor


class Paper(NamedTuple):
    """What holds for retractions of the sphere: the step of every sublayer, the bounds and the sums.

    eta_bounds: max|gain| sqrt(width)/|h|, which eta cannot exceed where the branch's output is normed; else empty.
    """

    steps: list[SpheretNorm]
    bounds: Bounds
    sums: Sums
    eta_bounds: list[float]


def measure_jacobians(
    model: nn.Module, tokens: Tensor, positions: Tensor, tick: Tick = lambda done, total: None
) -> tuple[list[str], Measured, Paper | None]:
    """Measure the Jacobians at some positions of tokens (1, time), in the model's dtype, best float64.

    The first part is the kind of each branch; the last one is None if the updates are not retractions. A model whose
    sublayers cannot be differentiated is an error that says why.
    """
    rows, bounded, steps = list[Measured](), list[Bounds](), list[SpheretNorm]()
    eta_bounds: list[float] = []
    with differentiable():
        passed = updates(model, tokens)
        width, device = passed[0].h.shape[-1], tokens.device
        # other people's norms and softmax compute in float32, whatever the model's dtype is
        is_ours = all(update.connection is not None for update in passed)
        rounding = width * torch.finfo(torch.float64 if is_ours else torch.float32).eps
        # the product G is kept at norm 1, and its scale apart: it may exceed float64
        G = torch.eye(width, dtype=torch.float64, device=device)
        scale = largest = torch.ones(len(positions), dtype=torch.float64, device=device)
        for update in passed:
            h, out = update.h[0, positions], update.out[0, positions]
            f = update.branch_output(update.f)[0, positions]
            try:
                A, J = token_jacobians(update, own_path(update, positions), h[None])
            except (RuntimeError, TypeError, NotImplementedError) as error:
                reason = shortened(str(error), 200)
                raise ValueError(f"torch cannot differentiate sublayer {update.number}: {reason}") from None
            if not J.isfinite().all():
                raise ValueError(
                    f"the Jacobian of sublayer {update.number} is not finite: there is nothing to measure."
                )
            c = (h * f).sum(-1, keepdim=True) / h.square().sum(-1, keepdim=True)
            theta, eta = angle_between(h, out), (f - c * h).norm(dim=-1) / h.norm(dim=-1)
            B = torch.linalg.matrix_norm(A - torch.diag_embed(c.expand_as(h)), ord=2)
            step = None if update.connection is None else update.connection.retraction_step()
            if update.connection is not None and step is not None:
                t = turn(h, f, step.alpha, step.retraction, step.max_angle, step.p)
                theta = t.theta
                steps.append(step)
                bounded.append(bounds(t, B))
                if gains := update.connection.branch_gains():
                    largest_gain = max(float(gain.abs().max()) for gain in gains)
                    eta_bounds.append(largest_gain * math.sqrt(width) / float(h.norm(dim=-1).min()))
            sigma = torch.linalg.svdvals(J)
            G = J.double() @ G
            norm = torch.linalg.matrix_norm(G)
            G, scale, largest = G / norm[:, None, None], scale * norm, largest * sigma[:, 0]
            stack = torch.linalg.svdvals(G) * scale[:, None]
            own = sigma[:, -1], rounding * sigma[:, 0], sigma[:, 0]
            # every factor's rounding error is stretched by all other factors
            rows.append(Measured(theta, eta, B, *own, stack[:, -1], rounding * largest, stack[:, 0]))
            tick(len(rows), len(passed))
    kinds, measured = [update.kind for update in passed], Measured(*map(torch.stack, zip(*rows, strict=True)))
    if not steps:
        return kinds, measured, None
    b = Bounds(*map(torch.stack, zip(*bounded, strict=True)))
    return kinds, measured, Paper(steps, b, sums(b.Delta, measured.theta, b.m), eta_bounds)


def sums(Delta: Tensor, theta: Tensor, m: Tensor) -> Sums:
    """S, A, the criterion and prod m of the first 1, 2, ... sublayers; each argument is (sublayers, tokens)."""
    S, A = Delta.cumsum(0), theta.square().cumsum(0)
    # where m is 0 the sums are not, and the criterion is exp(-inf) = 0
    return Sums(S, A, (-(A / 2 + S) / m.cummin(0).values).exp(), m.cumprod(0))
