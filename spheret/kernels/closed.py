r"""The closed form: out = a h + Q z, with a backward as small as the forward.

    c = <h,f>/|h|^2    z = f - c h    w = alpha^2 |z|^2/|h|^2    Q = alpha b(w)    out = a(w) h + Q z

With g the incoming gradient, gh = <g,h>, gz = <g,z>, K = a'(w) gh + alpha b'(w) gz, kh = Q gh/|h|^2 and
kz = 2 K alpha^2/|h|^2:

    df     = Q g + kz z - kh h
    dh     = (a - c Q) g - (kh + c kz) z + (c kh - kz |z|^2/|h|^2) h
    dalpha = sum over rows of 2 K alpha |z|^2/|h|^2 + b gz
    dp     = sum over rows of (da/dp) gh + alpha (db/dp) gz

Vectors are float32; float64 stays float64. The few scalars of each row are float64 where the device has it. That
costs nothing beside the row, keeps w from overflowing, and keeps the norm from drifting. The backward keeps h, f and
three scalars per row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spheret.retractions import P, Retraction, TensorPair
from spheret.support.autograd import Function
from spheret.support.precision import widest

# |h|^2, <h,f> and |z|^2 of a row, each (..., 1)
Kept = tuple[Tensor, Tensor, Tensor]


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float32 for half types, else the widest dtype of the tensors."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def capped(row: Retraction, w: Tensor, p: P, cap: float | None) -> tuple[TensorPair, Tensor | None]:
    """a(w), b(w) under the cap, and a mask of the rows at the cap; the mask is None if no row can be."""
    a, b = row.coefficients(w, p)
    if cap is None or (not isinstance(row.largest_angle, Tensor) and row.largest_angle <= cap):
        return (a, b), None
    over = row.theta(w.detach().sqrt(), p) > cap
    # the square root and its gradient never see a zero
    beta = torch.where(over, w, 1.0).sqrt()
    return (torch.where(over, math.cos(cap), a), torch.where(over, math.sin(cap) / beta, b)), over


class RowGeometry(NamedTuple):
    """The parts of each row's update; all but z are (..., 1)."""

    hh: Tensor  # |h|^2, 1 for a row of zeros
    c: Tensor
    z: Tensor
    eta2: Tensor  # |z|^2 / |h|^2, 0 for a row of zeros
    w: Tensor
    live: Tensor  # whether the row is not zero


def dots(h: Tensor, f: Tensor) -> Kept:
    """|h|^2, <h,f> and |z|^2, the scalars that the backward keeps; |z|^2 is summed from z, so nothing cancels."""
    hh = (h * h).sum(-1, keepdim=True)
    hf = (h * f).sum(-1, keepdim=True)
    z = f - (hf / torch.where(hh == 0, 1.0, hh)) * h
    return hh, hf, (z * z).sum(-1, keepdim=True)


def row_geometry(h: Tensor, f: Tensor, alpha: float | Tensor, kept: Kept) -> RowGeometry:
    scalar = widest(h.device)
    hh, hf, zz = (x.to(scalar) for x in kept)
    # NaN is not 0, so such a row is live and comes out as NaN
    live = hh != 0
    hh = torch.where(live, hh, 1.0)
    c = hf / hh
    eta2 = torch.where(live, zz / hh, 0.0)
    return RowGeometry(hh, c, f - c.to(h.dtype) * h, eta2, _wide(alpha, h) ** 2 * eta2, live)


def _wide(x: P, like: Tensor) -> P:
    return x.to(widest(like.device)) if isinstance(x, Tensor) else x


def forward(
    h: Tensor,
    f: Tensor,
    alpha: P,
    p: P,
    row: Retraction,
    cap: float | None,
    kept: Kept,
) -> Tensor:
    """out = a h + Q z, in plain torch ops that autograd can differentiate too."""
    r = row_geometry(h, f, alpha, kept)
    (a, b), _ = capped(row, r.w, _wide(p, h), cap)
    q = torch.where(r.live, _wide(alpha, h) * b, 0.0)
    # z was computed with a rounded c; the part along h that this left in z is taken out of the coefficient of h
    a = a - q * (r.c - r.c.to(h.dtype))
    return a.to(h.dtype) * h + q.to(h.dtype) * r.z


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, row: Retraction, cap: float | None,
    kept: Kept,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of h and f, and those of alpha and p per row."""
    scalar, vector = widest(h.device), h.dtype
    r = row_geometry(h, f, alpha, kept)
    alpha, p = _wide(alpha, h), _wide(p, h)
    (a, b), over = capped(row, r.w, p, cap)
    da, db = row.derivatives(r.w, p)
    if over is not None:
        # at the cap theta is constant, so a is constant too, and b falls as 1/sqrt w
        da = torch.where(over, 0.0, da)
        db = torch.where(over, -0.5 * b / torch.where(over, r.w, 1.0), db)
    q = torch.where(r.live, alpha * b, 0.0)

    # u = h/|h| and v = z/max(|z|, |h|) are vectors of norm 1 or less; coefficients with a factor 1/|h|^2 or
    # |z|^2/|h|^2 would leave the range of float32 even for rows that are well inside it
    norm = r.hh.sqrt()
    stretch = r.eta2.clamp(min=1.0).sqrt()
    u, v = h * norm.reciprocal().to(vector), r.z * (norm * stretch).reciprocal().to(vector)
    gu = (g * u).sum(-1, keepdim=True).to(scalar)
    gz = (g * v).sum(-1, keepdim=True).to(scalar) * stretch
    slope = 2 * (da * gu + alpha * db * gz)
    kh = q * gu
    kz = torch.where(r.live, alpha**2 * slope, 0.0)

    df = q.to(vector) * g + (kz * stretch).to(vector) * v - kh.to(vector) * u
    dh = (a - r.c * q).to(vector) * g - ((kh + r.c * kz) * stretch).to(vector) * v
    dh = dh + (r.c * kh - kz * r.eta2).to(vector) * u
    dalpha = torch.where(r.live, norm * (alpha * slope * r.eta2 + b * gz), 0.0)
    if row.p_derivatives is None or not isinstance(p, Tensor):
        return dh, df, dalpha, None
    ap, bp = row.p_derivatives(r.w, p)
    dp = torch.where(r.live, norm * (ap * gu + alpha * bp * gz), 0.0)
    return dh, df, dalpha, dp if over is None else torch.where(over, 0.0, dp)


def tangent(
    tangents: tuple[Tensor | None, ...], h: Tensor, f: Tensor, alpha: P, p: P, row: Retraction,
    cap: float | None, kept: Kept,
) -> Tensor:  # fmt: skip
    """The directional derivative of out along (h, f, alpha, p)."""
    scalar, vector = widest(h.device), h.dtype
    th, tf = (torch.zeros_like(h) if t is None else t.to(vector) for t in tangents[:2])
    talpha, tp = (0.0 if t is None else t.to(scalar) for t in tangents[2:])
    r = row_geometry(h, f, alpha, kept)
    alpha, p = _wide(alpha, h), _wide(p, h)
    (a, b), over = capped(row, r.w, p, cap)
    da, db = row.derivatives(r.w, p)
    hth = (h * th).sum(-1, keepdim=True).to(scalar) / r.hh
    tc = ((th * f).sum(-1, keepdim=True) + (h * tf).sum(-1, keepdim=True)).to(scalar) / r.hh - 2 * r.c * hth
    tz = tf - tc.to(vector) * h - r.c.to(vector) * th
    ztz = (r.z * tz).sum(-1, keepdim=True).to(scalar) / r.hh
    tw = 2 * alpha * talpha * r.eta2 + 2 * alpha**2 * ztz - 2 * r.w * hth
    ta, tb = da * tw, db * tw
    if row.p_derivatives is not None and isinstance(tp, Tensor):
        ap, bp = row.p_derivatives(r.w, p)
        ta, tb = ta + ap * tp, tb + bp * tp
    if over is not None:
        ta = torch.where(over, 0.0, ta)
        tb = torch.where(over, -0.5 * b * tw / torch.where(over, r.w, 1.0), tb)
    q = torch.where(r.live, alpha * b, 0.0)
    tq = torch.where(r.live, talpha * b + alpha * tb, 0.0)
    return ta.to(vector) * h + a.to(vector) * th + tq.to(vector) * r.z + q.to(vector) * tz


def gradients(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, row: Retraction, cap: float | None, kept: Kept | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`backward` on rows of any dtype, with dh and df in the dtypes of h and f."""
    vector = compute_dtype(h, f)
    wide_h, wide_f = h.to(vector), f.to(vector)
    kept = dots(wide_h, wide_f) if kept is None else kept
    dh, df, dalpha, dp = backward(g.to(vector), wide_h, wide_f, alpha, p, row, cap, kept)
    return dh.to(h.dtype), df.to(f.dtype), dalpha, dp


def reduce_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient with one value per row into the shape that was broadcast against the rows."""
    return (grad if grad.shape == like.shape else grad.sum_to_size(like.shape)).to(like.dtype)


def for_inputs(
    ctx: Any, alpha: P, p: P, dh: Tensor, df: Tensor, dalpha: Tensor, dp: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients for the inputs (h, f, alpha, p, row, cap) of a Function, summed over the broadcast dimensions."""
    needed = ctx.needs_input_grad
    return (
        dh,
        df,
        reduce_to(dalpha, alpha) if needed[2] and isinstance(alpha, Tensor) else None,
        reduce_to(dp, p) if needed[3] and isinstance(p, Tensor) and dp is not None else None,
        None,
        None,
    )


class _Retract(Function):
    @staticmethod
    def forward(h: Tensor, f: Tensor, alpha: P, p: P, row: Retraction, cap: float | None) -> tuple[Tensor, ...]:
        vector = compute_dtype(h, f)
        wide_h, wide_f = h.to(vector), f.to(vector)
        kept = dots(wide_h, wide_f)
        return (forward(wide_h, wide_f, alpha, p, row, cap, kept).to(h.dtype), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        h, f, alpha, p, ctx.row, ctx.cap = inputs
        kept = output[1:]
        ctx.mark_non_differentiable(*kept)
        ctx.alpha, ctx.p = (None if isinstance(x, Tensor) else x for x in (alpha, p))
        tensors = (h, f, *(x if isinstance(x, Tensor) else None for x in (alpha, p)), *kept)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _saved(ctx: Any) -> tuple[Tensor, Tensor, P, P, Kept]:
        h, f, alpha, p, hh, hf, zz = ctx.saved_tensors
        return h, f, ctx.alpha if alpha is None else alpha, ctx.p if p is None else p, (hh, hf, zz)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, kept = _Retract._saved(ctx)
        # a gradient that will itself be differentiated needs scalars that carry their autograd history
        grads = gradients(g, h, f, alpha, p, ctx.row, ctx.cap, None if torch.is_grad_enabled() else kept)
        return for_inputs(ctx, alpha, p, *grads)

    @staticmethod
    def pushforward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, kept = _Retract._saved(ctx)
        vector = compute_dtype(h, f)
        wide_h, wide_f = h.to(vector), f.to(vector)
        kept = dots(wide_h, wide_f)
        out = tangent(tangents[:4], wide_h, wide_f, alpha, p, ctx.row, ctx.cap, kept)
        return out.to(h.dtype), None, None, None


def retract(h: Tensor, f: Tensor, alpha: P, row: Retraction, p: P, cap: float | None) -> Tensor:
    if row.angle_function is not None:
        # a retraction given by its angle alone is differentiated by autograd, in float64 throughout: autograd's
        # intermediate results have a wider range than those above
        vector = widest(h.device)
        wide_h, wide_f = h.to(vector), f.to(vector)
        return forward(wide_h, wide_f, alpha, p, row, cap, dots(wide_h, wide_f)).to(h.dtype)
    return _Retract.call(h, f, alpha, p, row, cap)[0]


def normalize(h: Tensor, radius: float | Tensor) -> Tensor:
    """radius h/|h|; a row of zeros stays zero, and its gradient is 0."""
    vector = compute_dtype(h)
    x = h.to(vector)
    hh = (x * x).detach().sum(-1, keepdim=True).to(widest(h.device))
    live = hh != 0
    # h/|h| does not depend on the length of h, so a first, constant scaling keeps tiny and huge rows in range
    x = x * torch.where(live, hh, 1.0).rsqrt().to(vector)
    square = torch.where(live, (x * x).sum(-1, keepdim=True).to(widest(h.device)), 1.0)
    inverse = torch.where(live, square.rsqrt(), 0.0)
    return (x * (_wide(radius, h) * inverse).to(vector)).to(h.dtype)


def norm_gradients(g: Tensor, h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """dh, and the gradient of radius per row, in torch ops that can be differentiated again."""
    vector = compute_dtype(h)
    u = normalize(h.to(vector), 1.0)
    wide = g.to(vector)
    along = (wide * u).sum(-1, keepdim=True)
    hh = (h.to(vector) ** 2).sum(-1, keepdim=True).to(widest(h.device))
    inverse = torch.where(hh == 0, 0.0, torch.where(hh == 0, 1.0, hh).rsqrt())
    scale = (_wide(radius, h) * inverse).to(vector)
    return (scale * (wide - along * u)).to(h.dtype), along
