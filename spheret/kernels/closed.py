r"""The closed form: out = a h + Q z, with a backward as small as the forward.

    c = <h,f>/|h|^2    z = f - c h    w = alpha^2 |z|^2/|h|^2    Q = alpha b(w)    out = a(w) h + Q z

With g the incoming gradient, gh = <g,h>, gz = <g,z>, K = a'(w) gh + alpha b'(w) gz, kh = Q gh/|h|^2 and
kz = 2 K alpha^2/|h|^2:

    df     = Q g + kz z - kh h
    dh     = (a - c Q) g - (kh + c kz) z + (c kh - kz |z|^2/|h|^2) h
    dalpha = sum over rows of 2 K alpha |z|^2/|h|^2 + b gz
    dp     = sum over rows of (da/dp) gh + alpha (db/dp) gz

With a gain G the branch's output is normed first: y = G n with n = r f and r = 1/sqrt(mean f^2 + EPS) takes the place
of f above. With dy for df above:

    dG     = sum over rows of dy n
    df     = r (G dy - n <n, G dy>/d)        and <n, G dy> = <y, dy> = alpha times the dalpha of the row

because a step alpha times as long and a branch output alpha times as long are the same step.

Vectors are float32; float64 stays float64. The few scalars of each row are float64 where the device has it. That
costs nothing beside the row, keeps w from overflowing, and keeps the norm from drifting. The backward keeps h, f and
three scalars per row, and r where there is a gain.
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

# added to the mean square of a branch's output: float32's epsilon. The outputs of new branches have an rms near 1e-3,
# so that the usual 1e-5 would switch the norm off
EPS = 2.0**-23


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float32 for half types, else the widest dtype of the tensors."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def capped(retraction: Retraction, w: Tensor, p: P, cap: float | None) -> tuple[TensorPair, Tensor | None]:
    """a(w), b(w) under the cap, and a mask of the rows at the cap; the mask is None if no row can be."""
    a, b = retraction.coefficients(w, p)
    if cap is None or (not isinstance(retraction.largest_angle, Tensor) and retraction.largest_angle <= cap):
        return (a, b), None
    over = retraction.theta(w.detach().sqrt(), p) > cap
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


def inverse_rms(f: Tensor) -> Tensor:
    """r = 1/sqrt(mean f^2 + EPS) of each row, (..., 1), in f's dtype. Squares that overflow are scaled first."""
    scalar = widest(f.device)
    scale = 2.0 ** -int(0.55 * math.log2(torch.finfo(f.dtype).max))
    mean = (f * f).mean(-1, keepdim=True)
    over = ~mean.isfinite()
    scaled = (f * scale).square().mean(-1, keepdim=True).to(scalar)
    near = (torch.where(over, 1.0, mean).to(scalar) + EPS).rsqrt()
    return torch.where(over, scale * torch.where(over, scaled, 1.0).rsqrt(), near).to(f.dtype)


def normed(f: Tensor, gain: Tensor) -> Tensor:
    """gain f/sqrt(mean f^2 + EPS) for each row, in float32 or better: the branch's output as the update takes it."""
    f = f.to(compute_dtype(f))
    return gain.to(f.dtype) * (f * inverse_rms(f))


def normed_backward(dy: Tensor, f: Tensor, gain: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of f and of the gain, from that of y = gain r f. All are in the computing dtype."""
    n = f * r
    dn = gain * dy
    df = r * (dn - n * (n * dn).mean(-1, keepdim=True))
    rows = tuple(range(f.dim() - 1))
    return df, (dy * n).sum(rows, dtype=widest(f.device)) if rows else dy * n


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


def forward(h: Tensor, f: Tensor, alpha: P, p: P, retraction: Retraction, cap: float | None, kept: Kept) -> Tensor:
    """out = a h + Q z, in plain torch ops that autograd can differentiate too."""
    r = row_geometry(h, f, alpha, kept)
    (a, b), _ = capped(retraction, r.w, _wide(p, h), cap)
    q = torch.where(r.live, _wide(alpha, h) * b, 0.0)
    # z was computed with a rounded c; the part along h that this left in z is taken out of the coefficient of h
    a = a - q * (r.c - r.c.to(h.dtype))
    return a.to(h.dtype) * h + q.to(h.dtype) * r.z


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, retraction: Retraction, cap: float | None, kept: Kept
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of h and f, and of alpha and p per row."""
    scalar, vector = widest(h.device), h.dtype
    r = row_geometry(h, f, alpha, kept)
    alpha, p = _wide(alpha, h), _wide(p, h)
    (a, b), over = capped(retraction, r.w, p, cap)
    da, db = retraction.derivatives(r.w, p)
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
    if retraction.p_derivatives is None or not isinstance(p, Tensor):
        return dh, df, dalpha, None
    ap, bp = retraction.p_derivatives(r.w, p)
    dp = torch.where(r.live, norm * (ap * gu + alpha * bp * gz), 0.0)
    return dh, df, dalpha, dp if over is None else torch.where(over, 0.0, dp)


def tangent(
    tangents: tuple[Tensor | None, ...], h: Tensor, f: Tensor, alpha: P, p: P, retraction: Retraction,
    cap: float | None, kept: Kept,
) -> Tensor:  # fmt: skip
    """The directional derivative of out along (h, f, alpha, p)."""
    scalar, vector = widest(h.device), h.dtype
    th, tf = (torch.zeros_like(h) if t is None else t.to(vector) for t in tangents[:2])
    talpha, tp = (0.0 if t is None else t.to(scalar) for t in tangents[2:])
    r = row_geometry(h, f, alpha, kept)
    alpha, p = _wide(alpha, h), _wide(p, h)
    (a, b), over = capped(retraction, r.w, p, cap)
    da, db = retraction.derivatives(r.w, p)
    hth = (h * th).sum(-1, keepdim=True).to(scalar) / r.hh
    tc = ((th * f).sum(-1, keepdim=True) + (h * tf).sum(-1, keepdim=True)).to(scalar) / r.hh - 2 * r.c * hth
    tz = tf - tc.to(vector) * h - r.c.to(vector) * th
    ztz = (r.z * tz).sum(-1, keepdim=True).to(scalar) / r.hh
    tw = 2 * alpha * talpha * r.eta2 + 2 * alpha**2 * ztz - 2 * r.w * hth
    ta, tb = da * tw, db * tw
    if retraction.p_derivatives is not None and isinstance(tp, Tensor):
        ap, bp = retraction.p_derivatives(r.w, p)
        ta, tb = ta + ap * tp, tb + bp * tp
    if over is not None:
        ta = torch.where(over, 0.0, ta)
        tb = torch.where(over, -0.5 * b * tw / torch.where(over, r.w, 1.0), tb)
    q = torch.where(r.live, alpha * b, 0.0)
    tq = torch.where(r.live, talpha * b + alpha * tb, 0.0)
    return ta.to(vector) * h + a.to(vector) * th + tq.to(vector) * r.z + q.to(vector) * tz


def gradients(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, retraction: Retraction, cap: float | None,
    kept: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`backward` on rows of any dtype, with dh and df in the dtypes of h and f, and the gradient of the gain."""
    vector = compute_dtype(h, f)
    wide_h, wide_f, dgain = h.to(vector), f.to(vector), None
    if gain is None:
        kept = dots(wide_h, wide_f) if kept is None else kept
        dh, df, dalpha, dp = backward(g.to(vector), wide_h, wide_f, alpha, p, retraction, cap, kept[:3])
    else:
        wide_gain = gain.to(vector)
        r = inverse_rms(wide_f) if kept is None else kept[3]
        y = wide_gain * (wide_f * r)
        kept = dots(wide_h, y) if kept is None else kept
        dh, dy, dalpha, dp = backward(g.to(vector), wide_h, y, alpha, p, retraction, cap, kept[:3])
        df, dgain = normed_backward(dy, wide_f, wide_gain, r)
    return dh.to(h.dtype), df.to(f.dtype), dalpha, dp, dgain


def reduce_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient with one value per row into the shape that was broadcast against the rows."""
    return (grad if grad.shape == like.shape else grad.sum_to_size(like.shape)).to(like.dtype)


def for_inputs(
    ctx: Any, alpha: P, p: P, gain: Tensor | None, dh: Tensor, df: Tensor, dalpha: Tensor, dp: Tensor | None,
    dgain: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients for the inputs h, f, alpha, p, gain, retraction and cap, summed over broadcast dimensions."""
    needed = ctx.needs_input_grad
    return (
        dh,
        df,
        reduce_to(dalpha, alpha) if needed[2] and isinstance(alpha, Tensor) else None,
        reduce_to(dp, p) if needed[3] and isinstance(p, Tensor) and dp is not None else None,
        dgain.to(gain.dtype) if needed[4] and gain is not None and dgain is not None else None,
        None,
        None,
    )


def save(ctx: Any, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, *kept: Tensor) -> tuple[Any, ...]:
    """Save the inputs of a Function and what its forward kept; the numbers among them go into ctx."""
    ctx.alpha, ctx.p = (None if isinstance(x, Tensor) else x for x in (alpha, p))
    tensors = (h, f, *(x if isinstance(x, Tensor) else None for x in (alpha, p)), gain, *kept)
    ctx.save_for_backward(*tensors)
    return tensors


def saved(ctx: Any) -> tuple[Tensor, Tensor, P, P, Tensor | None, tuple[Tensor, ...]]:
    """h, f, alpha, p, gain and the rest of what `save` saved."""
    h, f, alpha, p, gain, *kept = ctx.saved_tensors
    return h, f, ctx.alpha if alpha is None else alpha, ctx.p if p is None else p, gain, tuple(kept)


class _Retract(Function):
    @staticmethod
    def forward(
        h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, retraction: Retraction, cap: float | None
    ) -> tuple[Tensor, ...]:
        vector = compute_dtype(h, f)
        wide_h, wide_f = h.to(vector), f.to(vector)
        rms: tuple[Tensor, ...] = ()
        if gain is not None:
            rms = (inverse_rms(wide_f),)
            wide_f = gain.to(vector) * (wide_f * rms[0])
        kept = dots(wide_h, wide_f)
        return (forward(wide_h, wide_f, alpha, p, retraction, cap, kept).to(h.dtype), *kept, *rms)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        h, f, alpha, p, gain, ctx.retraction, ctx.cap = inputs
        kept = output[1:]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_forward(*save(ctx, h, f, alpha, p, gain, *kept))

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, gain, kept = saved(ctx)
        # a gradient that will itself be differentiated needs scalars that carry their autograd history
        grads = gradients(g, h, f, alpha, p, gain, ctx.retraction, ctx.cap, None if torch.is_grad_enabled() else kept)
        return for_inputs(ctx, alpha, p, gain, *grads)

    @staticmethod
    def pushforward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, gain, kept = saved(ctx)
        vector = compute_dtype(h, f)
        wide_h, wide_f = h.to(vector), f.to(vector)
        th, tf, talpha, tp, tgain = tangents[:5]
        if gain is not None:
            wide_gain, r = gain.to(vector), inverse_rms(wide_f)
            n = wide_f * r
            tf = torch.zeros_like(n) if tf is None else tf.to(vector)
            tf = wide_gain * r * (tf - n * (n * tf).mean(-1, keepdim=True))
            tf = tf if tgain is None else tf + tgain.to(vector) * n
            wide_f = wide_gain * n
        out = tangent((th, tf, talpha, tp), wide_h, wide_f, alpha, p, ctx.retraction, ctx.cap, dots(wide_h, wide_f))
        return out.to(h.dtype), *(None for _ in kept)


def retract(
    h: Tensor, f: Tensor, alpha: P, retraction: Retraction, p: P, cap: float | None, gain: Tensor | None = None
) -> Tensor:
    if retraction.angle_function is not None:
        # a retraction given by its angle alone is differentiated by autograd, in float64 throughout: autograd's
        # intermediate results have a wider range than those above
        vector = widest(h.device)
        wide_h, wide_f = h.to(vector), f.to(vector)
        if gain is not None:
            wide_f = normed(wide_f, gain)
        return forward(wide_h, wide_f, alpha, p, retraction, cap, dots(wide_h, wide_f)).to(h.dtype)
    return _Retract.call(h, f, alpha, p, gain, retraction, cap)[0]


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
