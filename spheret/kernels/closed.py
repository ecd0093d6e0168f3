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
costs nothing beside the row, keeps w from overflowing, and keeps the norm from drifting. Rows of extreme size are
scaled by powers of two first, H = s h and F = t f, so that no dot product leaves the range of its dtype:
z/|h| = (s/t) Z/|H|. All other rows have s = t = 1. The backward keeps h, f and five scalars per row, and r where
there is a gain.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spheret.retractions import P, Retraction, TensorPair
from spheret.support.autograd import Function
from spheret.support.precision import widest

# s, t, |H|^2, <H,F> and |Z|^2 of a row, each (..., 1)
Kept = tuple[Tensor, ...]
# how many tensors that is
KEPT = 5

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


# rows whose largest entries lie between its inverse and it are taken as they are
ORDINARY = 2.0**32


def power_of_two(x: Tensor) -> Tensor:
    """What brings the largest entry of a row near 1 if it is extreme, else 1."""
    largest = torch.linalg.vector_norm(x.detach(), math.inf, -1, keepdim=True)
    extreme = (largest > ORDINARY) | ((largest > 0) & (largest < 1 / ORDINARY))
    # far enough from the ends that gradients stay in range, too
    top = math.log2(torch.finfo(x.dtype).max) - 16
    return (-torch.where(extreme, largest, 1.0).log2().floor().clamp(-top, top)).exp2()


def scales(h: Tensor, f: Tensor) -> TensorPair:
    """s and t, constants in the dtype of the rows."""
    s = power_of_two(h)
    # where f is nothing beside h, a power that is not too far from h's own
    return s, torch.minimum(power_of_two(f), s * _reach(s.dtype))


def _reach(dtype: torch.dtype) -> float:
    """The largest ratio of s and t: a step of so many radii is infinite, and its square is in range."""
    return 2.0**254 if dtype == torch.float64 else 2.0**60


def ratio_of(s: Tensor, t: Tensor) -> Tensor:
    """s/t, up to `_reach` of its dtype."""
    return (s / t).clamp(max=_reach(s.dtype))


class RowGeometry(NamedTuple):
    """The parts of each row's update; all but H and Z are (..., 1)."""

    h: Tensor  # H
    z: Tensor  # Z
    norm: Tensor  # |H|, 1 for a row of zeros
    s: Tensor
    ratio: Tensor  # s/t, up to a limit
    excess: Tensor  # that limit over s/t where s/t is larger, else 1
    c: Tensor
    rounding: Tensor  # what rounding took from c, so that Z has this part along h
    eta2: Tensor  # |z|^2 / |h|^2, 0 for a row of zeros
    w: Tensor
    live: Tensor  # whether the row is not zero


def inverse_rms(f: Tensor) -> Tensor:
    """r = 1/sqrt(mean f^2 + EPS) of each row, (..., 1), in f's dtype. Huge rows are scaled first."""
    scalar = widest(f.device)
    small = power_of_two(f).clamp(max=1.0)
    mean, small = (small * f).square().mean(-1, keepdim=True).to(scalar), small.to(scalar)
    return (small * (mean + EPS * small**2).rsqrt()).to(f.dtype)


def normed(f: Tensor, gain: Tensor) -> Tensor:
    """gain f/sqrt(mean f^2 + EPS) for each row, in float32 or better: the branch's output as the update takes it."""
    f = f.to(compute_dtype(f))
    return gain.to(f.dtype) * (f * inverse_rms(f))


def normed_backward(dy: Tensor, f: Tensor, gain: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of f and of the gain, from the gradient of y = gain r f. All are in the computing dtype."""
    n = f * r
    dn = gain * dy
    df = r * (dn - n * (n * dn).mean(-1, keepdim=True))
    rows = tuple(range(f.dim() - 1))
    return df, (dy * n).sum(rows, dtype=widest(f.device)) if rows else dy * n


def dots(h: Tensor, f: Tensor) -> Kept:
    """The scalars that the backward keeps; |Z|^2 is summed from Z, so nothing cancels."""
    s, t = scales(h, f)
    h, f = s * h, t * f
    hh = (h * h).sum(-1, keepdim=True)
    hf = (h * f).sum(-1, keepdim=True)
    z = f - (hf / torch.where(hh == 0, 1.0, hh)) * h
    return s, t, hh, hf, (z * z).sum(-1, keepdim=True)


def row_geometry(h: Tensor, f: Tensor, alpha: float | Tensor, kept: Kept) -> RowGeometry:
    h, f = kept[0] * h, kept[1] * f
    s, t, hh, hf, zz = (x.to(widest(h.device)) for x in kept)
    # NaN is not 0, so such a row is live and comes out as NaN
    live, ratio = hh != 0, ratio_of(s, t)
    excess = (t / s * _reach(s.dtype)).clamp(max=1.0)
    hh = torch.where(live, hh, 1.0)
    c = hf / hh
    narrow = c.to(h.dtype)
    eta2 = torch.where(live, ratio**2 * (zz / hh), 0.0)
    w = _wide(alpha, h) ** 2 * eta2
    z, rounding = f - narrow * h, ratio * (c - narrow)
    return RowGeometry(h, z, hh.sqrt(), s, ratio, excess, ratio * c, rounding, eta2, w, live)


def _wide(x: P, like: Tensor) -> P:
    return x.to(widest(like.device)) if isinstance(x, Tensor) else x


def forward(h: Tensor, f: Tensor, alpha: P, p: P, retraction: Retraction, cap: float | None, kept: Kept) -> Tensor:
    """out = a h + Q z, in plain torch ops that autograd can differentiate too."""
    vector = h.dtype
    r = row_geometry(h, f, alpha, kept)
    (a, b), _ = capped(retraction, r.w, _wide(p, h), cap)
    q = torch.where(r.live, _wide(alpha, h) * b, 0.0)
    # the part along h that rounding c left in z is taken out of the coefficient of h
    out = (a - q * r.rounding).to(vector) * r.h + (q * r.ratio).to(vector) * r.z
    return out * r.s.reciprocal().to(vector)


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

    # u = h/|h| and v = Z/max(|Z|, |H|) are vectors of norm 1 or less; coefficients with a factor 1/|h|^2 or
    # |z|^2/|h|^2 would leave the range of float32 even for rows that are well inside it
    stretch = (r.eta2 / r.ratio**2).clamp(min=1.0).sqrt()
    u, v = r.h * r.norm.reciprocal().to(vector), r.z * (r.norm * stretch).reciprocal().to(vector)
    stretch = stretch * r.ratio
    gu = (g * u).sum(-1, keepdim=True).to(scalar)
    gz = (g * v).sum(-1, keepdim=True).to(scalar) * stretch
    slope = 2 * (da * gu + alpha * db * gz)
    kh = q * gu
    kz = torch.where(r.live, alpha**2 * slope, 0.0)

    df = (r.excess * q).to(vector) * g + (r.excess * (kz * stretch)).to(vector) * v - (r.excess * kh).to(vector) * u
    dh = (a - r.c * q).to(vector) * g - ((kh + r.c * kz) * stretch).to(vector) * v
    dh = dh + (r.c * kh - kz * r.eta2).to(vector) * u
    norm = r.norm / r.s
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
    th, tf = (
        torch.zeros_like(h) if t is None else t.to(vector) * s for t, s in zip(tangents[:2], kept[:2], strict=True)
    )
    talpha, tp = (0.0 if t is None else t.to(scalar) for t in tangents[2:])
    r, f = row_geometry(h, f, alpha, kept), kept[1] * f
    alpha, p = _wide(alpha, h), _wide(p, h)
    (a, b), over = capped(retraction, r.w, p, cap)
    da, db = retraction.derivatives(r.w, p)
    c, hh, eta2 = r.c / r.ratio, r.norm**2, r.eta2
    hth = (r.h * th).sum(-1, keepdim=True).to(scalar) / hh
    tc = ((th * f).sum(-1, keepdim=True) + (r.h * tf).sum(-1, keepdim=True)).to(scalar) / hh - 2 * c * hth
    tz = tf - tc.to(vector) * r.h - c.to(vector) * th
    ztz = r.ratio**2 * (r.z * tz).sum(-1, keepdim=True).to(scalar) / hh
    tw = 2 * alpha * talpha * eta2 + 2 * alpha**2 * ztz - 2 * r.w * hth
    ta, tb = da * tw, db * tw
    if retraction.p_derivatives is not None and isinstance(tp, Tensor):
        ap, bp = retraction.p_derivatives(r.w, p)
        ta, tb = ta + ap * tp, tb + bp * tp
    if over is not None:
        ta = torch.where(over, 0.0, ta)
        tb = torch.where(over, -0.5 * b * tw / torch.where(over, r.w, 1.0), tb)
    q = torch.where(r.live, r.ratio * alpha * b, 0.0)
    tq = torch.where(r.live, r.ratio * (talpha * b + alpha * tb), 0.0)
    out = ta.to(vector) * r.h + a.to(vector) * th + tq.to(vector) * r.z + q.to(vector) * tz
    return out * r.s.reciprocal().to(vector)


def gradients(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, retraction: Retraction, cap: float | None,
    kept: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`backward` on rows of any dtype, with dh and df in the dtypes of h and f, and the gradient of the gain."""
    vector = compute_dtype(h, f)
    wide_h, wide_f, dgain = h.to(vector), f.to(vector), None
    if gain is None:
        kept = dots(wide_h, wide_f) if kept is None else kept
        dh, df, dalpha, dp = backward(g.to(vector), wide_h, wide_f, alpha, p, retraction, cap, kept)
    else:
        wide_gain = gain.to(vector)
        r = inverse_rms(wide_f) if kept is None else kept[KEPT]
        y = wide_gain * (wide_f * r)
        kept = dots(wide_h, y) if kept is None else kept
        dh, dy, dalpha, dp = backward(g.to(vector), wide_h, y, alpha, p, retraction, cap, kept[:KEPT])
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
        # a retraction given only by its angle is differentiated by autograd, in float64 throughout: autograd's
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
    x = power_of_two(x) * x
    hh = (x * x).detach().sum(-1, keepdim=True).to(widest(h.device))
    live = hh != 0
    # h/|h| does not depend on the length of h, so a first, constant scaling leaves little to the second
    x = x * torch.where(live, hh, 1.0).rsqrt().to(vector)
    square = torch.where(live, (x * x).sum(-1, keepdim=True).to(widest(h.device)), 1.0)
    inverse = torch.where(live, square.rsqrt(), 0.0)
    return (x * (_wide(radius, h) * inverse).to(vector)).to(h.dtype)


def norm_gradients(g: Tensor, h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """dh, and the gradient of radius per row, in torch ops that can be differentiated again."""
    vector = compute_dtype(h)
    x, wide = h.to(vector), g.to(vector)
    u, s = normalize(x, 1.0), power_of_two(x)
    along = (wide * u).sum(-1, keepdim=True)
    hh = ((s * x) ** 2).sum(-1, keepdim=True).to(widest(h.device))
    inverse = torch.where(hh == 0, 0.0, torch.where(hh == 0, 1.0, hh).rsqrt())
    scale = (_wide(radius, h) * inverse).to(vector)
    return (s * (scale * (wide - along * u))).to(h.dtype), along
