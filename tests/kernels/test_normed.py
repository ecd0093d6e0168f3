"""The normed branch inside the kernels: gain f/rms(f) takes the place of f, on every backend.

The truth is torch's own RMSNorm followed by the paper's arithmetic, in float64, differentiated by autograd.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import rows

from spheret import RETRACTIONS, SpheretNorm, retract
from spheret.kernels import BACKENDS, native, reference, triton, use
from spheret.kernels.closed import EPS, normed
from spheret.retractions import Retraction, as_retraction

FUSED = ("native", "triton")
NAMES = ("out", "dh", "df", "dalpha", "dgain")


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(n, d, h_dtype=torch.float32, f_dtype=torch.float32):
    """Rows whose branch outputs have lengths from far below the epsilon to large ones; some are parallel to h."""
    h, f, g = (rows(n, d, seed=seed) for seed in (0, 1, 2))
    f = f * torch.logspace(-4, 1, n, dtype=torch.float64).view(n, 1)
    gain = 0.3 + 0.2 * rows(1, d, seed=3)[0]
    f[1::3] += h[1::3] / gain
    return h.to(h_dtype), f.to(f_dtype), g.to(h_dtype), gain.float()


def truth(h, f, g, gain, retraction, cap, alpha=0.7):
    """Results in float64, and the terms of dalpha and dgain, which are sums over rows."""
    h, f, g, gain = (x.detach().double() for x in (h, f, g, gain))
    h, f, gains = h.requires_grad_(), f.requires_grad_(), gain.expand_as(f).clone().requires_grad_()
    step = torch.full((*h.shape[:-1], 1), alpha, dtype=torch.float64, requires_grad=True)
    retraction = as_retraction(retraction)
    unit = F.rms_norm(f, f.shape[-1:], None, EPS)
    out = reference.retract(h, gains * unit, step, retraction, retraction.p, cap)
    dh, df, dalpha, dgain = torch.autograd.grad(out, (h, f, step, gains), g)
    return [out.detach(), dh, df, dalpha, dgain]


def results(backend, h, f, g, gain, retraction, cap, alpha=0.7):
    h, f, gain = (x.detach().clone().requires_grad_() for x in (h, f, gain))
    wide = torch.float64 if gain.dtype == torch.float64 else torch.float32
    step = torch.tensor([alpha], dtype=wide, requires_grad=True)
    with use(backend):
        out = retract(h, f, step, retraction, cap, gain=gain)
    return [out.detach(), *torch.autograd.grad(out, (h, f, step, gain), g)]


def check(found, exact, tolerance):
    """Rows relative to their lengths, sums over rows relative to the sum of the sizes of their terms."""
    for name, x, y in zip(NAMES, found, exact, strict=False):
        assert x.isfinite().all(), name
        eps = torch.finfo(x.dtype).eps if x.dtype in (torch.bfloat16, torch.float16) else 0.0
        if name in ("dalpha", "dgain"):
            dims = tuple(range(y.dim() - 1))
            error, size = (x.double() - y.sum(dims)).abs(), y.abs().sum(dims)
        else:
            error, size = (x.double() - y).norm(dim=-1), y.norm(dim=-1)
        assert (error <= (tolerance + eps) * size + 1e-30).all(), (name, (error / size).max().item())


CAPS = {"projection": 0.5, "cayley": math.pi / 4, "angular": None, "exponential": math.pi / 4}


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend, code in BACKENDS.items() for name in RETRACTIONS if code.knows(RETRACTIONS[name])],
)
class TestAgainstTorch:
    @pytest.mark.parametrize(("n", "d"), [(70, 24), (9, 769)])
    def test_float32(self, backend, name, n, d):
        h, f, g, gain = inputs(n, d)
        for cap in (None, CAPS.get(name)):
            check(results(backend, h, f, g, gain, name, cap), truth(h, f, g, gain, name, cap), 2e-6)

    def test_half_precision(self, backend, name):
        for h_dtype, f_dtype in (
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ):
            h, f, g, gain = inputs(20, 40, h_dtype, f_dtype)
            check(results(backend, h, f, g, gain, name, None), truth(h, f, g, gain, name, None), 2e-6)


# the kernels compute in float32
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in FUSED])
@pytest.mark.parametrize("name", RETRACTIONS)
def test_float64(backend, name):
    h, f, g, gain = (x.double() for x in inputs(20, 40))
    check(results(backend, h, f, g, gain, name, None), truth(h, f, g, gain, name, None), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
class TestEdges:
    def test_zero_rows(self, backend):
        h, f, g, gain = inputs(6, 24)
        f[2], h[4] = 0, 0
        found = results(backend, h, f, g, gain, "projection", None)
        assert all(x.isfinite().all() for x in found)
        # a branch without output leaves the state where it is, and so does a state without direction
        torch.testing.assert_close(found[0][2], h[2], rtol=1e-6, atol=1e-6)
        assert torch.equal(found[0][4], h[4])
        assert not found[2][4].any()
        # the gradient of an output of zeros is that of f/sqrt(eps)
        exact = truth(h[:3], f[:3], g[:3], gain, "projection", None)[:3]
        check([x[:3] for x in found[:3]], exact, 2e-6)


class TestDerivatives:
    @pytest.mark.parametrize("name", RETRACTIONS)
    def test_finite_differences(self, name):
        h, f, _, gain = (x.double().requires_grad_() for x in inputs(3, 5))
        alpha = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
        f = f.detach().clamp(-2, 2).requires_grad_()

        def update(h, f, alpha, gain):
            with use("closed"):
                return retract(h, f, alpha, name, CAPS.get(name), gain=gain)

        # outputs far below the epsilon have derivatives of the size of 1/sqrt(eps)
        assert torch.autograd.gradcheck(update, (h, f, alpha, gain), atol=1e-4, rtol=1e-4, check_forward_ad=True)

    def test_double_backward(self):
        h, f, _, gain = (x.double() for x in inputs(3, 5))
        f = f / f.norm(dim=-1, keepdim=True)

        def update(h, f, gain):
            with use("closed"):
                return retract(h, f, 0.7, "cayley", gain=gain)

        assert torch.autograd.gradgradcheck(update, tuple(x.requires_grad_() for x in (h, f, gain)))

    def test_the_branch_is_scale_invariant(self):
        # <f, df> = eps r^2 <y, dy>, the identity of docs/mathematics.md
        h, f, g, gain = (x.double() for x in inputs(6, 24))
        f.requires_grad_()
        y = normed(f, gain)
        (dy,) = torch.autograd.grad(retract(h, y, 0.7), y, g, retain_graph=True)
        (df,) = torch.autograd.grad(y, f, dy)
        r2 = 1 / (f.detach().square().mean(-1) + EPS)
        torch.testing.assert_close((f * df).sum(-1), EPS * r2 * (y * dy).sum(-1), rtol=1e-9, atol=1e-12)

    def test_a_retraction_of_ones_own(self):
        h, f, g, gain = inputs(5, 24)
        own = Retraction.from_angle(torch.atan)
        found, exact = (results("closed", h, f, g, gain, each, None) for each in (own, "projection"))
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", FUSED)
class TestSums:
    def test_the_gradient_of_the_gain_has_the_same_bits_for_any_number_of_threads(self, backend):
        h, f, g, gain = inputs(700 if backend == "native" else 70, 64)
        before = torch.get_num_threads()
        found = []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(results(backend, h, f, g, gain, "projection", None))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))

    def test_wide_rows(self, backend):
        # Triton goes through these in a loop over tiles
        h, f, g, gain = inputs(3, 4200)
        check(results(backend, h, f, g, gain, "cayley", 0.5), truth(h, f, g, gain, "cayley", 0.5), 2e-6)

    def test_many_rows(self, backend):
        n = triton.STRIP * triton.shape(24, triton.STRIP)["ROWS"] + 3 if backend == "triton" else 5 * native.CHUNK + 3
        h, f, g, gain = inputs(n, 24)
        check(results(backend, h, f, g, gain, "projection", None), truth(h, f, g, gain, "projection", None), 2e-6)


class TestModule:
    def test_angles_are_bounded_by_the_gain(self):
        norm = SpheretNorm(24, 3, branch_norm=True)
        h = 5.0 * F.normalize(torch.randn(50, 24), dim=-1)
        f = 1e3 * torch.randn(50, 24)
        eta = (norm.angle(h, f).tan() / norm.alpha).max().item()
        assert eta <= 0.3 * math.sqrt(24) / 5.0 * (1 + 1e-6)

    def test_without(self):
        assert not list(SpheretNorm(24, 1, branch_norm=False).branch_norm or ())
        assert SpheretNorm(24, 1, branch_norm=0.7).branch_norm.weight.unique().item() == pytest.approx(0.7)
