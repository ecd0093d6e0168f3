"""The quantities of the paper's propositions at real tokens: one dictionary of (tokens,) tensors per sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.analysis import jacobians
from spheret.analysis.singular_values import Extremes, Product, dense, lanczos
from spheret.analysis.sublayers import (
    Both,
    branch_name,
    differentiable,
    frobenius,
    is_spherical,
    own_path,
    sequence_jacobians,
    states,
    token_jacobians,
    turn_arguments,
    whole_sequence,
)
from spheret.model.gpt import GPT
from spheret.model.probes import Sublayer

# the size of the largest matrix that is formed and decomposed
DENSE = 512
# relative: |B| is enlarged by it, and a bound counts as broken only beyond it; far above the rounding of float64
ROUNDING = 1e-10
# how many numbers the matrices of one group of tokens may hold in all
_NUMBERS = 1 << 22
Numbers = dict[str, Tensor]
Tick = Callable[[int], object]


class Measured(NamedTuple):
    """Per sublayer: the numbers of its update, and those of the product of all updates up to it, or None."""

    updates: list[Numbers]
    products: list[Numbers | None]
    norm_method: str
    sigma_method: str


class _Update(NamedTuple):
    """One sublayer at some tokens, or at a whole sequence as one point."""

    s: Sublayer
    both: Both
    x: Tensor
    f: Tensor
    angle: Tensor
    sequence: bool

    @property
    def like(self) -> Tensor:
        return self.x.flatten()[None] if self.sequence else self.x[0]


def measure_tokens(
    model: GPT, windows: list[tuple[Tensor, Tensor]], exact: bool = True, tick: Tick = lambda tokens: None
) -> Measured:
    """Measure tokens on their own paths, with a model in float64.

    windows: pairs of token ids (1, time) and the positions in them to examine.
    exact: whether |B| must be an upper bound; otherwise it is a Lanczos estimate above DENSE.
    tick: called after every update with the number of tokens that were measured.
    """
    groups: list[Measured] = []
    for tokens, positions in windows:
        records = states(model, tokens)
        width = model.config.width
        size = max(1, _NUMBERS // width**2) if width <= DENSE else 16
        for part in positions.split(size):
            updates = [
                _Update(s, own_path(s, part), s.h[:, part], s.f[:, part], s.angle[0, part], False) for s in records
            ]
            groups.append(_measure(updates, exact, partial(tick, len(part))))
    return _joined(groups)


def measure_sequence(model: GPT, tokens: Tensor, exact: bool = True) -> Measured:
    """Measure all tokens (1, time) as one point in time * width dimensions: every number is a (1,) tensor."""
    updates = [_Update(s, whole_sequence(s), s.h, s.f, s.angle.amax()[None], True) for s in states(model, tokens)]
    return _measure(updates, exact, lambda: None)


def _measure(updates: list[_Update], exact: bool, tick: Callable[[], object]) -> Measured:
    small = updates[0].like.shape[-1] <= DENSE
    measured: list[Numbers] = []
    products: list[Numbers | None] = []
    chain: list[tuple[Product, Product]] = []
    product: Numbers | None
    G = torch.eye(updates[0].like.shape[-1], dtype=torch.float64, device=updates[0].x.device)
    stretch = torch.ones(len(updates[0].like), dtype=torch.float64, device=updates[0].x.device)
    method = "svd" if small else "frobenius" if exact else "lanczos"
    with differentiable():
        for index, update in enumerate(updates, start=1):
            if small:
                numbers, J = _dense(update)
                G = J @ G
                stretch = stretch * numbers["sigma_max"]
                product = _extremes(dense(G))
                # rounding errors of the factors, amplified by at most what all factors stretch together
                product["floor"] = G.shape[-1] * torch.finfo(torch.float64).eps * stretch
            else:
                chain.append(_products(update, out=True))
                numbers = _matrix_free(update, *chain[-1], exact)
                # a product costs one pass per factor: after 1, 2, 4, ... and all sublayers, the total stays linear
                due = index == len(updates) or index & (index - 1) == 0
                product = _extremes(lanczos(*_composed(chain), update.like, _steps(exact))) if due else None
                if product is not None:
                    product["floor"] = torch.zeros_like(product["sigma_min"])
            measured.append(numbers)
            products.append(product)
            tick()
    return Measured(measured, products, method, "svd" if small else "lanczos")


def _dense(update: _Update) -> tuple[Numbers, Tensor]:
    """The numbers and J of an update whose matrices are small enough to form."""
    if update.sequence and branch_name(update.s) == "mlp":
        # an MLP does not mix rows, so its Jacobian is block diagonal
        A, J = (torch.block_diag(*x)[None] for x in token_jacobians(update.s, update.both, update.x))
    elif update.sequence:
        A, J = (x[None] for x in sequence_jacobians(update.s, update.both, update.x))
    else:
        A, J = token_jacobians(update.s, update.both, update.x)
    if not J.isfinite().all():
        raise ValueError(f"the Jacobian of sublayer {update.s.number} is not finite: there is nothing to certify.")
    c = _along(update)
    B = A - torch.diag_embed(c.repeat_interleave(update.x.shape[-1])[None] if update.sequence else _spread(c, A))
    norm = torch.linalg.svdvals(B)[:, 0]
    numbers = {**_bounded(update, norm), **_extremes(dense(J))}
    if is_spherical(update.s):
        numbers["error"] = (_closed(update, A) - J).abs().amax((-2, -1)) / numbers["sigma_max"]
    return numbers, J


def _spread(c: Tensor, A: Tensor) -> Tensor:
    return c[:, None].expand(-1, A.shape[-1])


def _closed(update: _Update, A: Tensor) -> Tensor:
    """J by the closed form; for a sequence, by the closed form of each row of blocks."""
    t = _turn(update)
    if not update.sequence:
        return jacobians.closed_form(t, A).J
    time, width = update.x.shape[1:]
    blocks = A[0].view(time, width, time, width).transpose(1, 2)
    rows = []
    for target in range(time):
        one = jacobians.Turn(*(field[target] for field in t))
        own = jacobians.closed_form(one, blocks[target, target]).J
        # the closed form is affine in A: off the diagonal only its linear part counts
        constant = jacobians.closed_form(one, torch.zeros_like(own)).J
        row = jacobians.closed_form(one, blocks[target]).J - constant
        row[target] = own
        rows.append(torch.cat(list(row), -1))
    return torch.cat(rows)[None]


def _matrix_free(update: _Update, apply: Product, transpose: Product, exact: bool) -> Numbers:
    if exact:
        norm = frobenius(update.s, update.both, update.x, _along(update), update.sequence).view(-1)
    else:
        norm = lanczos(*_products(update, out=False), update.like, _steps(exact)).largest
    return {**_bounded(update, norm), **_extremes(lanczos(apply, transpose, update.like, _steps(exact)))}


def _steps(exact: bool) -> int:
    """Lanczos steps. The fast mode takes few: enough for the largest singular value."""
    return 96 if exact else 24


def _turn(update: _Update) -> jacobians.Turn:
    return jacobians.turn(update.x[0], update.f[0], **turn_arguments(update.s))


def _along(update: _Update) -> Tensor:
    """c = <h,f>/|h|^2 of each row."""
    h, f = update.x[0], update.f[0]
    return (h * f).sum(-1) / h.square().sum(-1)


def _bounded(update: _Update, norm: Tensor) -> Numbers:
    """Angle, eta and |B|, and for a spherical update the bounds that follow from them."""
    norm = norm * (1 + ROUNDING)
    h, f = update.x[0], update.f[0]
    eta = (f - _along(update)[:, None] * h).norm(dim=-1) / h.norm(dim=-1)
    if not is_spherical(update.s):
        return {"angle": update.angle, "eta": eta.amax()[None] if update.sequence else eta, "B": norm}
    t = _turn(update)
    if update.sequence:
        b = jacobians.Bounds(*(x.view(1) for x in jacobians.sequence_bounds(t, norm[0])))
        angle, eta = t.theta.amax()[None], t.eta.amax()[None]
    else:
        b, angle, eta = jacobians.bounds(t, norm), t.theta, t.eta
    return {"angle": angle, "eta": eta, "B": norm, **b._asdict()}


def _extremes(e: Extremes) -> Numbers:
    return dict(zip(("sigma_max", "sigma_min", "residual_max", "residual_min"), e, strict=True))


def _products(update: _Update, out: bool) -> tuple[Product, Product]:
    """v -> J v and u -> J' u; with out=False the same for B."""
    part = 1 if out else 0
    shift = 0.0 if out else _along(update)[:, None]

    def function(x: Tensor) -> Tensor:
        return update.both(x)[part]

    def apply(v: Tensor) -> Tensor:
        direction = v.view_as(update.x)
        return (torch.func.jvp(function, (update.x,), (direction,))[1] - shift * direction).view_as(v)

    pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(function, update.x)[1]

    def transpose(u: Tensor) -> Tensor:
        direction = u.view_as(update.x)
        return (pull(direction)[0] - shift * direction).view_as(u)

    return apply, transpose


def _composed(chain: list[tuple[Product, Product]]) -> tuple[Product, Product]:
    """The product of all updates in the chain, the first applied first."""

    def apply(v: Tensor) -> Tensor:
        for forward, _ in chain:
            v = forward(v)
        return v

    def transpose(u: Tensor) -> Tensor:
        for _, backward in reversed(chain):
            u = backward(u)
        return u

    return apply, transpose


def _joined(groups: list[Measured]) -> Measured:
    """The measurements of several groups of tokens, concatenated."""

    def cat(rows: list[Numbers]) -> Numbers:
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    first = groups[0]
    updates = [cat([group.updates[i] for group in groups]) for i in range(len(first.updates))]
    products = [
        None
        if first.products[i] is None
        else cat([row for group in groups if (row := group.products[i]) is not None])
        for i in range(len(first.products))
    ]
    return first._replace(updates=updates, products=products)
