"""Rows of any size: every backend, retraction, cap and dtype against numpy's long double, whose range is wider."""

import math

import numpy as np
import pytest
import torch
from oracle import rows

from spheret import RETRACTIONS, SpheretNorm, retract
from spheret.connections import angle_between
from spheret.kernels import BACKENDS, normalize, use
from spheret.kernels.closed import EPS

wide = np.longdouble
if np.finfo(wide).maxexp < 4096:
    pytest.skip("long double has the range of float64 here", allow_module_level=True)

# powers of ten from subnormal numbers to nearly the largest
SIZES = {
    torch.float32: (-44, -38, -30, -20, -13, -3, 0, 4, 13, 19, 21, 30, 37),
    torch.bfloat16: (-37, -30, -20, 0, 13, 21, 30, 37),
    torch.float64: (-320, -307, -200, -150, -30, 0, 30, 150, 200, 306),
}
D, ALPHA = 9, 0.7


def pairs(dtype):
    """Rows h, f and g for every pair of sizes, with f partly along h and with f nearly parallel to it."""
    sizes = [(first, second) for first in SIZES[dtype] for second in SIZES[dtype]] * 2
    h, f, g = (torch.nn.functional.normalize(rows(len(sizes), D, seed=seed), dim=-1) for seed in range(3))
    parallel = torch.arange(len(sizes)) >= len(sizes) // 2
    f[parallel] = h[parallel] + 0.05 * f[parallel]
    lengths = torch.tensor([[float(f"1e{k}") for k in pair] for pair in sizes], dtype=torch.float64)
    return (h * lengths[:, :1]).to(dtype), (f * lengths[:, 1:]).to(dtype), g.to(dtype)


def exact(x):
    return x.detach().double().numpy().astype(wide)


def dot(x, y):
    return (x * y).sum(-1, keepdims=True)


def turn(w, p, cap):
    """theta, a, b, da/dw and db/dw."""
    beta = np.sqrt(w)
    x = beta / p
    theta, slope = (beta, 1 + 0 * beta) if np.isinf(p) else (p * np.arctan(x), 1 / (1 + x * x))
    over = theta > (math.inf if cap is None else cap)
    theta, slope = np.where(over, cap or 0, theta), np.where(over, 0, slope)
    short = beta < 1e-6
    beta, w = np.where(short, 1, beta), np.where(short, 1, w)
    b = np.where(short, 1, np.sin(theta) / beta)
    db = np.where(short, -1 / (3 * p * p) - wide(1) / 6, (np.cos(theta) * slope - b) / (2 * w))
    return theta, np.cos(theta), b, -0.5 * np.where(short, 1, b * slope), db


def truth(h, f, g, name, cap, gain=None):
    """out, dh, df and each row's dalpha, the angle, and |f|/|z|, the factor by which rounding f moves the angle."""
    h, f, g = map(exact, (h, f, g))
    n = f
    if gain is not None:
        r = 1 / np.sqrt((f * f).mean(-1, keepdims=True) + wide(EPS))
        n, gain = r * f, exact(gain)
        f = gain * n
    hh = dot(h, h)
    c = dot(h, f) / hh
    z = f - c * h
    zz = dot(z, z)
    theta, a, b, da, db = turn(ALPHA**2 * zz / hh, wide(RETRACTIONS[name].p), cap)
    q, gh, gz = ALPHA * b, dot(g, h), dot(g, z)
    k = 2 * (da * gh + ALPHA * db * gz) * ALPHA**2 / hh
    df = q * g + k * z - q * gh / hh * h
    dh = (a - c * q) * g - q * gh / hh * f + (2 * q * c * gh - k * zz) / hh * h - c * k * z
    dalpha = k * zz / ALPHA + b * gz
    if gain is not None:
        df = r * (gain * df - n * (n * gain * df).mean(-1, keepdims=True))
    lost = np.sqrt(dot(f, f) / np.maximum(zz, wide(1e-4900)))
    return (a * h + q * z, dh, df, dalpha), theta, lost, (h, f, z)


def length(x):
    return np.sqrt(dot(x, x))


def check(backend, got, h, f, g, name, cap, gain=None):
    dtype, finfo = h.dtype, torch.finfo(h.dtype)
    double = dtype == torch.float64
    expected, theta, lost, (wide_h, y, z) = truth(h, f, g, name, cap, gain)
    norm, f_norm, g_norm = length(wide_h), length(exact(f)), length(exact(g))
    eps, work = finfo.eps, 1e-15 if double else 2e-7
    flushed = SMALLEST.get((backend, dtype), 0)
    last = 8 * wide(finfo.smallest_normal) * (1 if flushed else eps)

    def assert_small(what, error, bar, rows):
        bad = (error > bar) & rows
        assert not bad.any(), (what, [x[bad][:3].tolist() for x in (norm, f_norm, error, bar, theta, lost)])

    flushed = (norm < flushed) | (f_norm < flushed)
    # the length is kept at any angle
    assert_small(
        "norm",
        np.abs(length(exact(got[0])) - norm),
        (4 * eps + 3 * work * lost) * norm + last,
        (lost < 1e3) & ~flushed,
    )
    # an angle of many turns, or a direction that is nothing but rounding, has no digits to compare
    known = (theta * work * lost < 1e-3) & (lost < 1e3)
    assert known.mean() > 0.4
    # the normed output of a branch below the normal numbers is below them, too, and has lost digits
    known &= ~flushed & ((gain is None) | (f_norm > 8 * finfo.smallest_normal))
    shrink = np.minimum(ALPHA, norm / np.maximum(length(z), wide(1e-4900)))
    through_norm = 1
    if gain is not None:
        through_norm = 2 * length(exact(gain)) / np.sqrt((exact(f) ** 2).mean(-1, keepdims=True) + wide(EPS))
    # beside a stream of that length, a branch is as good as zero
    nothing = wide(2.0) ** (-1060 if double else -140)
    sizes = (
        norm,
        g_norm * (1 + shrink * length(y) / norm),
        through_norm * g_norm * shrink,
        g_norm * np.minimum(length(y), norm),
    )
    floors = (last, 0, last * (1 + through_norm), nothing * norm * g_norm)
    low, high = (1e-150, 1e150) if double else (1e-19, 1e19)
    for index, (x, true, size, floor) in enumerate(zip(got, expected, sizes, floors, strict=True)):
        if index and backend == "reference":
            # autograd's own intermediate gradients leave the range
            known &= (norm > low) & (norm < high) & (f_norm > low) & (f_norm < high)
        fits = length(true) < finfo.max / 100
        assert (np.isfinite(exact(x)).all(-1, keepdims=True) | ~fits).all(), index
        bar = (eps + 20 * work * lost**2 * (1 + theta) ** 2) * size + floor + last * (1 + lost)
        assert_small(index, length(exact(x) - true), bar, known & fits)


def results(backend, h, f, g, name, cap, gain=None):
    h, f = h.clone().requires_grad_(), f.clone().requires_grad_()
    scalar = torch.promote_types(h.dtype, torch.float32)
    alpha = torch.full((len(h), 1), ALPHA, dtype=scalar, requires_grad=True)
    with use(backend):
        out = retract(h, f, alpha, name, cap, gain=gain)
    return [out.detach(), *torch.autograd.grad(out, (h, f, alpha), g)]


# Triton's interpreter makes zeros of bfloat16's numbers below the normal ones
SMALLEST = {("triton", torch.bfloat16): 1e-30}
CASES = [
    (backend, dtype)
    for backend in BACKENDS
    for dtype in SIZES
    if backend in ("closed", "reference") or dtype != torch.float64
]


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("name", [name for name in RETRACTIONS if BACKENDS["native"].knows(RETRACTIONS[name])])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_retract(backend, dtype, normed, name):
    h, f, g = pairs(dtype)
    gain = (0.3 + 0.2 * rows(1, D, seed=3)[0]).to(torch.promote_types(dtype, torch.float32)) if normed else None
    for cap in (None, math.pi / 4):
        check(backend, results(backend, h, f, g, name, cap, gain), h, f, g, name, cap, gain)


@pytest.mark.parametrize("d", [D, 24])
@pytest.mark.parametrize("backend", ["native", "closed"])
def test_scaled_rows_have_the_bits_of_ordinary_ones(backend, d):
    """A power of two in h and f only moves the exponents of the next state."""
    h, f, g = (rows(16, d, seed=seed).float() for seed in range(3))
    ordinary = results("closed", h, f, g, "cayley", 0.5)
    for size in (2.0**-60, 2.0**60):
        out, dh, df, dalpha = results(backend, size * h, size * f, g, "cayley", 0.5)
        assert torch.equal(out / size, ordinary[0])
        for x, y in zip((dh, df, dalpha / size), ordinary[1:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
def test_normalize(backend, dtype):
    h, _, g = pairs(dtype)
    x, radius = (
        h.clone().requires_grad_(),
        torch.tensor([3.0], dtype=torch.float64 if dtype == torch.float64 else None),
    )
    with use(backend):
        out = normalize(x, radius)
    (dh,) = torch.autograd.grad(out, x, g)
    u = exact(h) / length(exact(h))
    eps = torch.finfo(dtype).eps
    kept = length(exact(h)) > SMALLEST.get((backend, dtype), 0)
    assert (length(exact(out) - 3 * u) <= 6 * eps)[kept].all()
    true = 3 * (exact(g) - dot(exact(g), u) * u) / length(exact(h))
    fits = length(true) < torch.finfo(dtype).max / 100
    small = 4 * torch.finfo(dtype).smallest_normal
    assert (
        (length(exact(dh) - true) <= 8 * eps * (length(true) + 3 / length(exact(h))) + small) | ~fits | ~kept
    ).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_angle(dtype):
    h, f, g = pairs(dtype)
    norm = SpheretNorm(D, 1, dtype=dtype, alpha=ALPHA, learnable_alpha=False)
    _, theta, lost, _ = truth(h, f, g, "projection", None)
    work = 1e-15 if dtype == torch.float64 else 2e-7
    bar = 20 * work * lost * theta + 1e-17
    assert (np.abs(exact(norm.angle(h, f))[:, None] - theta) <= bar).all()
    turned = torch.cat([-h[:, 1:2], h[:, :1]], -1)
    right = angle_between(h[:, :2], turned)
    torch.testing.assert_close(right, torch.full_like(right, math.pi / 2))
