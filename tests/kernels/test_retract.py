"""`retract` against its definition, at its edges, and under bad input, on every backend that runs here."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CAPS, PS, definition, normwise, rows
from torch.autograd import gradcheck, gradgradcheck

from spheret import RETRACTIONS, Retraction, angular, retract
from spheret.kernels import use
from spheret.retractions import as_retraction

CUSTOM = Retraction.from_angle(torch.tanh, "tanh")
# every row of the table, the members of its family by their p; a row outside the family has p = NaN
EVERY = [*PS, *(own for own in RETRACTIONS.values() if own.p not in PS), CUSTOM]
TORCH_BACKENDS = ("closed", "reference")


def pair(d=24, n=16, seed=0, size=1.0, along=0.0):
    """Rows h, and rows f with an orthogonal part of about `size` |h| and a part `along` h."""
    h, f = rows(n, d, seed=seed), rows(n, d, seed=seed + 1)
    f = f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    f = f / f.norm(dim=-1, keepdim=True) * h.norm(dim=-1, keepdim=True) * size
    return h, f + along * h


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("retraction", EVERY, ids=str)
def test_every_retraction_is_its_definition(retraction, cap, backend):
    angle = as_retraction(retraction).angle
    for size in (1e-20, 1e-8, 1e-3, 0.3, 1.0, 3.0, 30.0):
        h, f = pair(size=size, along=0.5 if size > 1e-6 else 0.0)
        truth, theta, _ = definition(h, f, 0.7, angle, cap)
        with use(backend):
            got = retract(h, f, 0.7, retraction, cap)
        assert (normwise(got, truth) <= 1e-12 * (1 + theta.squeeze(-1))).all()
    for size, along in ((1e-3, 0.0), (0.3, -2.0), (1.0, 3.0), (4.0, 0.1), (30.0, 1.0)):
        h, f = (x.float() for x in pair(d=768, size=size, along=along))
        truth, theta, c = definition(h, f, 0.7, angle, cap)
        with use(backend):
            got = retract(h, f, 0.7, retraction, cap)
        assert got.dtype == torch.float32
        assert (normwise(got, truth) <= 1e-6 * (1 + theta + c.abs()).squeeze(-1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("name", RETRACTIONS)
def test_a_capped_row_is_finite_at_every_step(name, backend, dtype):
    """Also around a step of 1, where an angle may have an infinite slope, and far beyond it."""
    eps = torch.finfo(dtype).eps
    cap = RETRACTIONS[name].cap or math.pi / 4
    for size in (0.0, 1e-12, 0.5, 1 - 2 * eps, 1 - eps, 1 - eps / 2, 1.0, 1 + eps, 1 + 2 * eps, 2.0, 1e3, 1e9):
        # h = (1, 0, 0) and f = (0.5, size, 0), so that beta is exactly size
        h, f = torch.tensor([[1.0, 0.0, 0.0]], dtype=dtype), torch.tensor([[0.5, size, 0.0]], dtype=dtype)
        alpha = torch.ones(1, dtype=dtype)
        for sign in (1.0, -1.0):
            inputs = [h.requires_grad_(), f.requires_grad_(), (sign * alpha).detach().requires_grad_()]
            with use(backend):
                out = retract(*inputs, name, cap)
                first = torch.autograd.grad(out.square().sum() + out.sum(), inputs, create_graph=True)
                second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
            assert all(x.isfinite().all() for x in (out, *first, *second)), (size, sign)
            torch.testing.assert_close(out.norm(dim=-1), h.norm(dim=-1), rtol=4 * eps, atol=0)


def reaches(retraction, cap):
    """Whether some step of the retraction turns by more than the cap."""
    own = as_retraction(retraction)
    return cap is not None and own.largest_angle > cap and float(own.angle(torch.tensor(1e6).double())) > cap


class TestGradients:
    def check(self, h, f, retraction, cap, alpha=0.7):
        h, f = h.clone().requires_grad_(), f.clone().requires_grad_()
        step = torch.tensor([alpha], dtype=torch.float64, requires_grad=True)
        assert gradcheck(
            lambda *x: retract(*x, retraction, cap), (h, f, step), eps=1e-7, atol=1e-6, check_forward_ad=True,
            fast_mode=True,
        )  # fmt: skip

    @pytest.mark.parametrize("cap", CAPS)
    @pytest.mark.parametrize("retraction", EVERY, ids=str)
    def test_everywhere(self, retraction, cap):
        for size, along in ((0.0, 0.0), (0.0, 2.0), (1e-20, 0.0), (1e-6, 0.0), (0.02, 1.0), (1.0, -1.0), (1e3, 0.5)):
            self.check(*pair(d=3, n=2, size=size, along=along), retraction, cap)

    # finite differences of the gradient: their own error grows with the curvature 1/p^2
    @pytest.mark.parametrize("cap", CAPS)
    @pytest.mark.parametrize("retraction", [each for each in EVERY if each != 1e-3], ids=str)
    def test_second_order(self, retraction, cap):
        for size in (0.0, 1e-6, 0.6):
            h, f = (x.requires_grad_() for x in pair(d=3, n=2, size=size, along=0.5))
            step = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
            assert gradgradcheck(lambda *x: retract(*x, retraction, cap), (h, f, step), atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize(
        ("retraction", "cap"), [(each, cap) for each in EVERY for cap in CAPS if reaches(each, cap)], ids=str
    )
    def test_both_sides_of_the_cap(self, retraction, cap):
        own, low, high = as_retraction(retraction), 0.0, 1e6
        for _ in range(200):
            edge = (low + high) / 2
            low, high = (edge, high) if own.angle(torch.tensor(edge).double()) <= cap else (low, edge)
        for size in (edge * (1 - 1e-3), edge * (1 + 1e-3)):
            self.check(*pair(d=3, n=2, size=size, along=0.3), retraction, cap, alpha=1.0)


@pytest.mark.parametrize("cap", [None, math.pi / 4])
@pytest.mark.parametrize("p", [0.1, 1.0, 3.7, 50.0])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-3, 1.0, 1e3])
def test_a_learned_p_gets_its_gradient(p, cap, size):
    h, f = (x.requires_grad_() for x in pair(d=3, n=2, size=size, along=0.5 if size > 1e-6 else 0.0))
    step = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    free = torch.tensor([p], dtype=torch.float64, requires_grad=True)

    def update(h, f, step, free):
        return retract(h, f, step, free, cap)

    assert gradcheck(update, (h, f, step, free), eps=1e-7, atol=1e-6, check_forward_ad=True)
    if size < 10:
        assert gradgradcheck(update, (h, f, step, free), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(update(h, f, step, free), retract(h, f, step, p, cap), rtol=1e-13, atol=1e-13)


@given(
    st.integers(2, 70), st.floats(0.05, 50), st.floats(0, 3), st.floats(-3, 3), st.floats(-1, 1), st.integers(0, 99)
)
def test_the_norm_is_kept_and_the_angle_is_theta(d, p, size, along, alpha, seed):
    h, f = pair(d=d, n=4, seed=seed, size=size, along=along)
    out = retract(h, f, alpha, p)
    torch.testing.assert_close(out.norm(dim=-1), h.norm(dim=-1), rtol=1e-12, atol=0)
    cosine = (out * h).sum(-1) / (h * h).sum(-1)
    z = f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    beta = abs(alpha) * z.norm(dim=-1) / h.norm(dim=-1)
    torch.testing.assert_close(cosine, angular(p).angle(beta).cos(), rtol=0, atol=1e-12)
    # a negative step turns the other way
    torch.testing.assert_close(retract(h, -f, -alpha, p), out, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16])
def test_norm_drift_over_1000_updates(retraction, branch):
    h = rows(32, 256).float()
    before = h.double().norm(dim=-1)
    cap = RETRACTIONS[retraction].cap
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        c = 6 * torch.rand(32, 1, generator=generator) - 3
        f = torch.randn(32, 256, generator=generator) + c * h
        h = retract(h, f.to(branch), 1.0, retraction, cap)
    drift = (h.double().norm(dim=-1) / before - 1).abs().max()
    assert drift < (3e-5 if branch == torch.float32 else 1e-3)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
class TestRows:
    @pytest.mark.parametrize("shape", [(24,), (2, 8, 24), (1, 4, 4, 24)], ids=str)
    def test_of_any_shape(self, backend, shape):
        h, f = (x[: math.prod(shape[:-1])] for x in pair(size=2.0, along=0.5))
        with use(backend):
            flat = retract(h, f, 0.7, "cayley", 0.9)
            torch.testing.assert_close(retract(h.view(shape), f.view(shape), 0.7, "cayley", 0.9), flat.view(shape))


class TestAlpha:
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5, 1, 1), (1, 4, 1), (5, 4, 1)])
    def test_shapes_that_broadcast(self, shape):
        h, f = torch.randn(2, 5, 4, 8, dtype=torch.float64).unbind()
        alpha = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        out = retract(h, f, alpha)
        torch.testing.assert_close(out, retract(h, f, alpha.expand(5, 4, 1)))
        out.sum().backward()
        assert alpha.grad.shape == shape
        assert gradcheck(lambda a: retract(h, f, a), (alpha,))
