"""The quantities of the paper's propositions at real tokens: one dictionary of (tokens,) tensors per sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.analysis import jacobians
from spheret.analysis.decoders import Both, Decoder
from spheret.analysis.sublayers import (
    decoder_of,
    differentiable,
    frobenius,
    is_spherical,
    moved,
    sequence_jacobians,
    states,
    token_jacobians,
    turn_arguments,
)
from spheret.certificates import enclosed_jacobians
from spheret.certificates.balls import NotEnclosed
from spheret.certificates.enclosed_jacobians import Balls
from spheret.certificates.enclosures import Chain, Enclosure, Matrices, singular_values
from spheret.certificates.singular_values import Extremes, Product, lanczos
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
    """Per sublayer: the numbers of its update, and those of the product of all updates up to it, or None.

    not_enclosed: per sublayer, why its singular values have no proven interval, or None if they have one.
    """

    updates: list[Numbers]
    products: list[Numbers | None]
    norm_method: str
    sigma_method: str
    not_enclosed: list[str | None]


class _Update(NamedTuple):
    """One sublayer at some tokens, or at a whole sequence as one point."""

    s: Sublayer
    both: Both
    x: Tensor
    f: Tensor
    angle: Tensor
    sequence: bool
    positions: Tensor

    @property
    def like(self) -> Tensor:
        return self.x.flatten()[None] if self.sequence else self.x[0]


def measure_tokens(
    model: GPT | Decoder,
    windows: list[tuple[Tensor, Tensor]],
    exact: bool = True,
    tick: Tick = lambda tokens: None,
) -> Measured:
    """Measure tokens on their own paths, with a model in float64.

    windows: pairs of token ids (1, time) and the positions in them to examine.
    exact: whether |B| must be an upper bound; otherwise it is a Lanczos estimate above DENSE.
    tick: called after every update with the number of tokens that were measured.
    """
    groups: list[Measured] = []
    decoder = decoder_of(model)
    for tokens, positions in windows:
        records = states(decoder, tokens)
        width = decoder.width
        # matrices of the tokens, and the attention of each to all before it
        size = max(1, _NUMBERS // (width * max(width, tokens.shape[1]))) if width <= DENSE else 16
        for part in positions.split(size):
            updates = [
                _Update(s, decoder.own_path(s, part), s.h[:, part], s.f[:, part], s.angle[0, part], False, part)
                for s in records
            ]
            groups.append(_measure(updates, exact, partial(tick, len(part))))
    return _joined(groups)


def measure_sequence(model: GPT | Decoder, tokens: Tensor, exact: bool = True) -> Measured:
    """Measure all tokens (1, time) as one point in time * width dimensions: every number is a (1,) tensor."""
    everywhere = torch.arange(tokens.shape[1], device=tokens.device)
    decoder = decoder_of(model)
    updates = [
        _Update(s, decoder.whole_sequence(s), s.h, s.f, s.angle.amax()[None], True, everywhere)
        for s in states(decoder, tokens)
    ]
    return _measure(updates, exact, lambda: None)


def _measure(updates: list[_Update], exact: bool, tick: Callable[[], object]) -> Measured:
    like = updates[0].like
    small = like.shape[-1] <= DENSE
    measured: list[Numbers] = []
    products: list[Numbers | None] = []
    reasons: list[str | None] = []
    free: list[tuple[Product, Product]] = []
    product: Numbers | None
    chain = Chain(like) if small else None
    method = "svd" if small else "frobenius" if exact else "lanczos"
    with differentiable():
        for index, update in enumerate(updates, start=1):
            if chain is not None:
                numbers, J, reason = _dense(update)
                product = dict(chain.times(J, numbers["max_high"])._asdict())
            else:
                reason = (
                    update.s.not_proven
                    or f"its Jacobian has more than {DENSE} rows, and only smaller ones are enclosed"
                )
                free.append(_products(update, out=True))
                numbers = _matrix_free(update, *free[-1], exact)
                # a product costs one pass per factor: after 1, 2, 4, ... and all sublayers, the total stays linear
                due = index == len(updates) or index & (index - 1) == 0
                product = _extremes(lanczos(*_composed(free), like, _steps(exact))) if due else None
            measured.append(numbers)
            products.append(product)
            reasons.append(reason)
            tick()
    return Measured(measured, products, method, "svd" if small else "lanczos", reasons)


def _dense(update: _Update) -> tuple[Numbers, Matrices, str | None]:
    """The numbers and J of an update whose matrices are small enough to form, and why J has no proven error."""
    # where tokens do not mix, the Jacobian of a sequence is block diagonal
    blocks = update.sequence and not update.s.mixes_tokens
    reason = None
    try:
        A, J = _enclosed(update, blocks)
    except NotEnclosed as error:
        A, mid = _differentiated(update, blocks)
        reason = str(error)
        J = Matrices(mid, torch.full_like(mid[:, 0, 0], torch.inf))
    if not J.mid.isfinite().all():
        raise ValueError(f"the Jacobian of sublayer {update.s.number} is not finite: there is nothing to certify.")
    c = _along(update)
    joint = update.sequence and not blocks
    B = A - torch.diag_embed(c.repeat_interleave(update.x.shape[-1])[None] if joint else _spread(c, A))
    norm, values = torch.linalg.svdvals(B)[:, 0], singular_values(J)
    if blocks:
        norm, values = norm.amax()[None], _of_blocks(values)
        A, J = torch.block_diag(*A)[None], enclosed_jacobians.blocks(J)
    numbers = {**_bounded(update, norm), **values._asdict(), "radius": J.radius}
    numbers["error"] = _disagreement(update, J) / numbers["sigma_max"]
    if is_spherical(update.s):
        apart = (_closed(update, A) - J.mid).abs().amax((-2, -1)) / numbers["sigma_max"]
        numbers["error"] = torch.maximum(numbers["error"], apart)
    return numbers, J, reason


def _enclosed(update: _Update, blocks: bool) -> Balls:
    if update.s.not_proven is not None:
        raise NotEnclosed(update.s.not_proven)
    if update.sequence and not blocks:
        return enclosed_jacobians.sequence_balls(update.s)
    return enclosed_jacobians.token_balls(update.s, update.positions)


def _differentiated(update: _Update, blocks: bool) -> tuple[Tensor, Tensor]:
    if update.sequence and not blocks:
        A, J = sequence_jacobians(update.s, update.both, update.x)
        return A[None], J[None]
    return token_jacobians(update.s, update.both, update.x)


def _of_blocks(e: Enclosure) -> Enclosure:
    """The extreme singular values of a block diagonal matrix, from those of its blocks."""
    largest = {name: getattr(e, name).amax()[None] for name in ("sigma_max", "max_low", "max_high")}
    return Enclosure(
        **largest, **{name: getattr(e, name).amin()[None] for name in ("sigma_min", "min_low", "min_high")}
    )


def _disagreement(update: _Update, J: Matrices) -> Tensor:
    """How far J is from automatic differentiation of the model's own connection, along one random direction.

    Two matrices that differ agree along a random direction with probability 0.
    """
    generator = torch.Generator(update.x.device).manual_seed(update.s.number)
    direction = torch.randn(update.x.shape, dtype=update.x.dtype, device=update.x.device, generator=generator)
    pushed = torch.func.jvp(lambda x: update.both(x)[1], (update.x,), (direction,))[1]
    flat = direction.view_as(update.like)
    flat, pushed = flat / flat.norm(dim=-1, keepdim=True), pushed.view_as(flat) / flat.norm(dim=-1, keepdim=True)
    return ((J.mid @ flat[..., None]).squeeze(-1) - pushed).norm(dim=-1)


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
    share = moved(update.s)[0, update.positions]
    share = share.median()[None] if update.sequence else share
    if not is_spherical(update.s):
        eta = eta.amax()[None] if update.sequence else eta
        return {"angle": update.angle, "moved": share, "eta": eta, "B": norm}
    t = _turn(update)
    if update.sequence:
        b = jacobians.Bounds(*(x.view(1) for x in jacobians.sequence_bounds(t, norm[0])))
        angle, eta = t.theta.amax()[None], t.eta.amax()[None]
    else:
        b, angle, eta = jacobians.bounds(t, norm), t.theta, t.eta
    return {"angle": angle, "moved": share, "eta": eta, "B": norm, **b._asdict()}


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
