import copy
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import PS

from spheret import RETRACTIONS, Retraction, angular, retract
from spheret.kernels import BACKENDS, use
from spheret.retractions import (
    LARGEST_P,
    SMALLEST_P,
    as_retraction,
    atan_root,
    cos_root,
    datan_root,
    dsinc_root,
    sinc_root,
)

ROWS = [*RETRACTIONS.values(), *(angular(p) for p in PS)]
# tanh has no closed form in the table: autograd must supply all of it
CUSTOM = Retraction.from_angle(torch.tanh, "tanh")
EVERY = [*ROWS, CUSTOM]
W = torch.cat([torch.zeros(1), torch.logspace(-30, 3, 67)]).double()


@pytest.mark.parametrize("retraction", EVERY, ids=repr)
def test_coefficients_are_cosine_and_sine_of_the_angle(retraction):
    beta = W.sqrt()
    theta = retraction.angle(beta)
    torch.testing.assert_close(retraction.a(W), theta.cos(), rtol=0, atol=4e-15)
    torch.testing.assert_close(retraction.b(W)[1:], (theta.sin() / beta)[1:], rtol=1e-12, atol=1e-15)
    assert retraction.a(W)[0] == 1
    assert retraction.b(W)[0] == 1


@pytest.mark.parametrize("retraction", EVERY, ids=repr)
def test_derivatives_are_those_of_the_coefficients(retraction):
    w = W.clone().requires_grad_()
    a, b = retraction.coefficients(w, retraction.p)
    da, db = retraction.derivatives(w.detach(), retraction.p)
    for value, derivative in ((a, da), (b, db)):
        (truth,) = torch.autograd.grad(value.sum(), w, retain_graph=True)
        # autograd divides a difference of nearly equal numbers by w; the row's own formula does not
        slack = 1e-12 + 4e-15 / W.clamp(min=1e-6)
        assert ((derivative - truth).abs() <= slack * (1 + truth.abs())).all()


# in arithmetic of 50 digits, which no cancellation can spoil
EXACT = {
    cos_root: lambda x: mpmath.cos(mpmath.sqrt(x)),
    sinc_root: lambda x: mpmath.sin(mpmath.sqrt(x)) / mpmath.sqrt(x),
    dsinc_root: lambda x: (mpmath.cos(mpmath.sqrt(x)) - mpmath.sin(mpmath.sqrt(x)) / mpmath.sqrt(x)) / (2 * x),
    atan_root: lambda x: mpmath.atan(mpmath.sqrt(x)) / mpmath.sqrt(x),
    datan_root: lambda x: (1 / (1 + x) - mpmath.atan(mpmath.sqrt(x)) / mpmath.sqrt(x)) / (2 * x),
}


@pytest.mark.parametrize("function", EXACT, ids=lambda function: function.__name__)
def test_series_and_direct_formula_have_all_digits_around_the_switch(function):
    points = [1e-12, 1e-3, 0.03, 0.0624, 0.0625, 0.0626, 0.09, 0.12, 0.2, 0.5, 0.99, 1.0, 1.01, 1.7, 3.0, 50.0]
    with mpmath.workdps(50):
        exact = torch.tensor([float(EXACT[function](mpmath.mpf(x))) for x in points], dtype=torch.float64)
    # above the switch the direct formula of datan_root subtracts numbers that share their first digit or two
    slack = 2e-14 if function is datan_root else 2e-15
    torch.testing.assert_close(function(torch.tensor(points, dtype=torch.float64)), exact, rtol=slack, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 2.0, 3.7, 50.0])
def test_derivatives_in_p(p):
    w = torch.logspace(-12, 3, 31).double()
    free = torch.tensor([p], dtype=torch.float64, requires_grad=True)
    retraction = angular(free)
    da, db = retraction.p_derivatives(w, free.detach())
    beta = w.sqrt()
    x = beta / p
    turn = x.atan() - x / (1 + x * x)
    theta = p * x.atan()
    torch.testing.assert_close(da, -theta.sin() * turn, rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(db, theta.cos() * turn / beta, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("retraction", EVERY, ids=repr)
def test_cubic_coefficient_and_largest_angle(retraction):
    beta = torch.tensor(min(1e-3, 1e-3 * retraction.p) if retraction.p == retraction.p else 1e-3, dtype=torch.float64)
    fitted = (retraction.angle(beta) - beta) / beta**3
    assert float(fitted) == pytest.approx(retraction.cubic, rel=1e-4, abs=1e-7)
    far = retraction.angle(torch.tensor(1e12, dtype=torch.float64))
    assert far <= retraction.largest_angle
    if math.isfinite(retraction.largest_angle):
        assert float(far) == pytest.approx(retraction.largest_angle, rel=1e-5)


@given(st.floats(0.01, 100), st.floats(0, 1e4))
def test_an_angular_step_never_turns_further_than_its_length(p, beta):
    theta = angular(p).angle(torch.tensor(beta, dtype=torch.float64))
    assert 0 <= theta <= min(beta, p * math.pi / 2) * (1 + 1e-15) + 1e-300


def test_named_rows_are_members_of_the_family():
    assert angular(1) is RETRACTIONS["projection"]
    assert angular(2) is RETRACTIONS["cayley"]
    assert angular(math.inf) is RETRACTIONS["exponential"]
    w = W[W < 100]
    for p in (1.0, 2.0):
        free = angular(torch.tensor([p], dtype=torch.float64))
        for got, named in zip(free.coefficients(w, free.p), angular(p).coefficients(w, p), strict=True):
            torch.testing.assert_close(got, named, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", RETRACTIONS)
def test_every_retraction_of_the_table_is_a_constant(name):
    retraction = RETRACTIONS[name]
    assert retraction.formula
    assert retraction.cap is None or 0 < retraction.cap < retraction.largest_angle
    for same in (pickle.loads(pickle.dumps(retraction)), copy.copy(retraction), copy.deepcopy(retraction)):
        assert same is retraction
    with pytest.raises(FrozenInstanceError):
        retraction.cap = 1.0
    # a retraction is itself and no other, even one of the same fields
    assert retraction != replace(retraction)


class TestPickle:
    def test_other_members_of_the_family_by_p(self):
        assert pickle.loads(pickle.dumps(angular(0.3))).p == 0.3
        free = pickle.loads(pickle.dumps(angular(torch.tensor([0.7]))))
        assert free.p.tolist() == pytest.approx([0.7])

    def test_an_angle_by_its_function(self):
        retraction = Retraction.from_angle(torch.asin, "orthographic", math.pi / 2, 1.0, cap=1.0)
        again = pickle.loads(pickle.dumps(retraction))
        fields = ("name", "largest_angle", "largest_step", "cap", "angle_function", "cubic")
        assert [getattr(again, x) for x in fields] == [getattr(retraction, x) for x in fields]

    @pytest.mark.parametrize(
        "own", [Retraction.from_angle(lambda beta: beta.tanh()), replace(RETRACTIONS["projection"], name="mine")]
    )
    def test_what_cannot_be_pickled(self, own):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(own)


class TestCap:
    @pytest.mark.parametrize(
        ("retraction", "cap"),
        [
            ("projection", None), ("cayley", math.pi / 4), ("angular", None), ("exponential", math.pi / 4),
            (0.3, None), (0.9, None), (1.0, None), (1.1, math.pi / 4), (1.5, math.pi / 4),
            (50.0, math.pi / 4), (torch.ones(1), math.pi / 4),
        ],
        ids=str,
    )  # fmt: skip
    def test_of_the_family(self, retraction, cap):
        assert as_retraction(retraction).cap == cap

    def test_of_an_angle(self):
        assert Retraction.from_angle(torch.tanh).cap == math.pi / 4
        assert Retraction.from_angle(torch.tanh, largest_angle=1.0).cap is None
        assert Retraction.from_angle(torch.tanh, cap=0.5).cap == 0.5
        assert Retraction.from_angle(torch.tanh, cap=None).cap is None


class TestLargestStep:
    """theta = arcsin(beta) ends at a step of 1; from there on the angle is pi/2."""

    retraction = Retraction.from_angle(torch.asin, "arcsin", math.pi / 2, 1.0)

    def test_the_angle_stays_there(self):
        beta = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 1e9], dtype=torch.float64, requires_grad=True)
        angle = self.retraction.angle(beta)
        half = math.pi / 2
        assert angle.tolist() == pytest.approx([-half, -half, 0.0, math.asin(0.5), half, half])
        (slope,) = torch.autograd.grad(angle.sum(), beta)
        assert slope.tolist() == pytest.approx([0, 0, 1, 1 / math.sqrt(0.75), 0, 0])
        assert self.retraction.angle(torch.tensor(math.nan)).isnan()

    def test_no_gradient_is_nan(self):
        w = torch.tensor([0.0, 1e-20, 0.5, 1.0, 2.0, 1e12], dtype=torch.float64, requires_grad=True)
        a, b = self.retraction.coefficients(w, self.retraction.p)
        (da,) = torch.autograd.grad(a.sum(), w, retain_graph=True)
        (db,) = torch.autograd.grad(b.sum(), w)
        derivatives = self.retraction.derivatives(w, self.retraction.p)
        seconds = [torch.autograd.grad(x.sum(), w, retain_graph=True)[0] for x in derivatives]
        assert all(x.isfinite().all() for x in (a, b, da, db, *derivatives, *seconds))

    # 2 arcsin(beta/2), the chord: defined up to a step of 2, where it turns to the antipode
    chord = Retraction.from_angle(lambda beta: 2 * (beta / 2).asin(), "chord", math.pi, 2.0)

    @pytest.mark.parametrize(("limit", "angle"), [(1.0, math.pi / 2), (2.0, math.pi), (2.0, 2.5)])
    def test_the_coefficients_are_those_of_the_held_angle(self, limit, angle):
        retraction = replace(self.chord, largest_step=limit, largest_angle=angle)
        w = torch.tensor([0.3, 0.99, 1.01, 3.9, 4.0, 4.1, 25.0], dtype=torch.float64, requires_grad=True)
        beta = w.sqrt()
        held = torch.where(w >= limit**2, angle, 2 * (beta.clamp(max=1.999) / 2).asin())
        a, b = retraction.coefficients(w, retraction.p)
        torch.testing.assert_close(retraction.angle(beta)[w < 3.99], held[w < 3.99])
        torch.testing.assert_close(a, held.cos())
        torch.testing.assert_close(b, held.sin() / beta)
        for value, truth, derivative in zip(
            (a, b), (held.cos(), held.sin() / beta), retraction.derivatives(w.detach(), retraction.p), strict=True
        ):
            (expected,) = torch.autograd.grad(truth.sum(), w, retain_graph=True)
            torch.testing.assert_close(derivative, expected)
            torch.testing.assert_close(torch.autograd.grad(value.sum(), w, retain_graph=True)[0], expected)

    def test_a_learned_p_is_refused(self):
        with pytest.raises(ValueError, match="p_derivatives"):
            replace(angular(0.3), largest_step=1.0)


class TestOwnAngle:
    def test_a_function_is_a_retraction_wherever_one_is_taken(self):
        h, f = torch.randn(2, 4, 8).unbind()
        assert torch.equal(retract(h, f, retraction=torch.tanh), retract(h, f, retraction=CUSTOM))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_the_polynomial_near_0_has_the_derivatives_of_the_angle(self, dtype):
        own, retraction = Retraction.from_angle(lambda beta: 0.5 * torch.atan(beta / 0.5)), angular(0.5)
        eps = torch.finfo(dtype).eps
        w = math.sqrt(eps) * torch.tensor([0.0, 1e-3, 0.3, 0.5, 0.9], dtype=torch.float64)
        got = (*own.coefficients(w.to(dtype), own.p), *own.derivatives(w.to(dtype), own.p))
        truth = (*retraction.coefficients(w, retraction.p), *retraction.derivatives(w, retraction.p))
        # the polynomials leave out w^3 in a and w^2 in b, so w^2 in da/dw and w in db/dw; w^2 < eps
        for x, y, slack in zip(got, truth, (8 * eps, 8 * eps, 32 * eps, 8 * math.sqrt(eps)), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0, atol=slack)

    @pytest.mark.parametrize("theta", [lambda b: b * (1 + 1e-7), lambda b: b + 1e-10, lambda b: b + 1e-8 * b * b])
    def test_rounding_is_not(self, theta):
        assert Retraction.from_angle(theta).cubic == pytest.approx(0, abs=1e-9)

    def test_an_angle_with_a_parameter_of_its_own(self):
        c = torch.ones((), dtype=torch.float64, requires_grad=True)
        assert Retraction.from_angle(lambda beta: c * beta).cubic == 0


@pytest.mark.parametrize("p", [SMALLEST_P, LARGEST_P])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_holds_the_ends_of_the_range_of_p(p, backend):
    h, f = torch.randn(2, 8, 16)
    for size in (1e-3, 1.0, 1e3):
        with use(backend):
            leaves = [h.clone().requires_grad_(), (size * f).requires_grad_()]
            # as the schemes do: without a cap, float32 would lose the phase of many turns
            out = retract(*leaves, 1.0, p, math.pi / 4)
            gradients = torch.autograd.grad(out.square().sum() + out[:, 0].sum(), leaves)
        with use("reference"):
            exact = retract(h.double(), (size * f).double(), 1.0, p, math.pi / 4)
        assert (out - exact).norm() < 1e-5 * exact.norm()
        assert all(gradient.isfinite().all() for gradient in gradients)
