"""The Jacobian of a sublayer's update with a proven error: that of the functions of sublayers.py, in ball arithmetic.

What is enclosed is the update in exact arithmetic, at the state that the float64 copy of the model has there, with
the weights and constants that are stored. A step size alpha and a learned p are softplus of a stored number: their
balls allow for its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.analysis.sublayers import chunk_size
from spheret.certificates.balls import Ball, NotEnclosed, rounded, unit_directions
from spheret.certificates.enclosures import Matrices, absolute_norm
from spheret.certificates.midpoint_radius import U
from spheret.kernels import closed, use
from spheret.model.gpt import Attention
from spheret.model.probes import Sublayer
from spheret.retractions import P, Retraction, TensorPair


def _write(s: Sublayer) -> Callable[[Tensor, Tensor], Tensor]:
    """The connection's update of balls.

    A retraction runs as its closed form, which divides by no norm that may vanish: the connection itself calls an
    autograd.Function, and those take no balls.
    """
    step = s.connection.retraction_step()
    if step is None:
        return s.connection.write
    p = rounded(step.p, s.h) if isinstance(step.p, Tensor) else step.p
    alpha, row = rounded(step.alpha, s.h), _with_remainders(step.retraction, float(step.p))

    def write(h: Tensor, f: Tensor) -> Tensor:
        return closed.forward(h, f, alpha, p, row, step.max_angle, closed.dots(h, f))

    return write


def _with_remainders(row: Retraction, p: float) -> Retraction:
    """The retraction, with room in a(w) and b(w) for what its power series near 0 leave out.

    The series of the table's rows are off by less than 1e-17, and their slopes by less than 1.1e-16 (1 + 1/p^2): that
    of arctan(sqrt u)/sqrt u, u = w/p^2, ends at 14 terms, and u is at most 1/16 there.
    """
    room = 8 * U * (1 + (0.0 if math.isnan(p) else 1 / p**2))

    def coefficients(w: Tensor, p: P) -> TensorPair:
        a, b = row.coefficients(w, p)
        return _widened(a, w, room), _widened(b, w, room)

    return replace(row, coefficients=coefficients)


def _widened(y: Tensor, w: Tensor, room: float) -> Tensor:
    """A function y of w, with a radius that is larger by `room` in its value and in its slope."""
    if not isinstance(y, Ball):
        return y
    value = y.rad if y.rad is not None else torch.zeros_like(y.mid)
    slope, along = y.tangent, as_ball(w).tangent
    if slope is not None and along is not None:
        size = along.mid.abs() if along.rad is None else along.mid.abs() + along.rad
        rad = room * size if slope.rad is None else slope.rad + room * size
        slope = Ball.of(slope.mid, rad * (1 + 8 * U))
    return Ball.of(y.mid, (value + room * y.mid.abs()) * (1 + 8 * U), slope)


class Balls(NamedTuple):
    """A = DF and J of an update, with the radius of J."""

    A: Tensor
    J: Matrices


def token_balls(s: Sublayer, positions: Tensor) -> Balls:
    """A and J of every token at `positions` on its own path, (positions, width, width) each."""
    x = s.h[:, positions]
    basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    branch, write = s.branch, _write(s)
    with use("closed"):
        if isinstance(s.branch, Attention):
            branch = _attention_of_one(s.branch, as_ball(s.connection.read(Ball.of(s.h))), positions)
        parts = []
        for directions in basis.split(chunk_size(s, x.shape[1])):
            # one direction is the same at every token, until the tokens differ
            state = unit_directions(x, directions[:, None, None])
            f = branch(s.connection.read(state))
            parts.append((*_tangent(f, x)[:1], *_tangent(write(state, f), x)))
    A, mid, rad = (torch.cat(part)[:, 0].permute(1, 2, 0) for part in zip(*parts, strict=True))
    return Balls(A, Matrices(mid, absolute_norm(rad)))


def _attention_of_one(branch: Attention, context: Ball, positions: Tensor) -> Callable[[Ball], Tensor]:
    """As in sublayers.py, with the derivative in closed form: no array has directions x tokens x time entries.

    With weights w_j, values v_j, keys k_j and y = sum w_j v_j, a change of the scores s_j changes y by
    sum w_j (v_j - y) ds_j. The keys before the token are fixed, so their part is one matrix times dq.
    """
    keys, values = map(branch.for_every_head, branch.queries_keys_values(context)[1:])
    turn = branch.rotation(positions)
    hidden = torch.arange(context.mid.shape[1], device=context.mid.device) >= positions[:, None]

    def attend(x: Ball) -> Tensor:
        q, *own_parts = branch.queries_keys_values(x, turn)
        own_key, own_value = map(branch.for_every_head, own_parts)
        dq, dkey, dvalue = (as_ball(as_ball(t).tangent) for t in (q, own_key, own_value))
        q, k, v = (t.detach() for t in (q, own_key, own_value))
        root = rounded(math.sqrt(q.shape[-1]), x.mid)
        before = (q @ keys.mT).masked_fill(hidden, -math.inf)
        weights = (torch.cat([before, (q * k).sum(-1, keepdim=True)], -1) / root).softmax(-1)
        past, own = weights[..., :-1], weights[..., -1:]
        y = as_ball(past @ values + own * v)
        # (heads, tokens, d, d): sum over the past of w_j (v_j - y) k_j', and over the directions (tokens, D, d)
        apart = (values.unsqueeze(-3) - y.unsqueeze(-2)) * past.unsqueeze(-1)
        matrix = apart.mT @ keys.unsqueeze(-3)
        moved = (dq.permute(1, 2, 3, 0, 4) @ (matrix.mT / root)).permute(3, 0, 1, 2, 4)
        score = ((dq * k).sum(-1, keepdim=True) + (dkey * q).sum(-1, keepdim=True)) / root
        tangent = moved + score * (own * (v - y)) + dvalue * own
        mixed = Ball.of(y.mid, y.rad, as_ball(tangent))
        return branch.output(mixed.transpose(1, 2).reshape(x.shape))

    return attend


def sequence_balls(s: Sublayer) -> Balls:
    """A and J of the whole sequence, (1, time width, time width) each."""
    x, write = s.h, _write(s)
    basis = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    parts = []
    with use("closed"):
        for directions in basis.split(chunk_size(s, x.shape[1])):
            state = unit_directions(x, directions.view(-1, *x.shape))
            f = s.branch(s.connection.read(state))
            parts.append((*_tangent(f, x)[:1], *_tangent(write(state, f), x)))
    A, mid, rad = (torch.cat(part).flatten(1).mT[None] for part in zip(*parts, strict=True))
    return Balls(A, Matrices(mid, absolute_norm(rad)))


def blocks(m: Matrices) -> Matrices:
    """The block diagonal matrix of several matrices: J of a sequence whose branch mixes no tokens."""
    return Matrices(torch.block_diag(*m.mid)[None], m.radius.amax()[None])


def as_ball(x: Tensor | None) -> Ball:
    if not isinstance(x, Ball):
        raise NotEnclosed("a function that does not depend on the state has no Jacobian in ball arithmetic")
    return x


def _tangent(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of `out` along all directions, (directions, *x.shape), and their radii."""
    tangent = as_ball(as_ball(out).tangent)
    shape = (len(tangent.mid), *x.shape)
    rad = torch.zeros_like(tangent.mid) if tangent.rad is None else tangent.rad
    return tangent.mid.expand(shape), rad.expand(shape)
