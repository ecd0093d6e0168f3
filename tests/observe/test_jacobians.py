"""The closed form against float64 autograd and finite differences, and the paper's bounds as properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import definition

from spheret import RETRACTIONS, Retraction, angular, retract
from spheret.kernels import use
from spheret.observe.jacobians import bounds, closed_form, turn

EXACT = 1e-10
P_VALUES = (0.1, 0.5, 1.0, 2.0, 3.7, math.inf)
KINDS = ("linear", "nonlinear", "zero tangent", "nearly zero tangent")


def branch(kind, d, generator, scale):
    """A map F and a state h; for the zero tangents F(h) is a multiple of h (but for 1e-9)."""
    h = torch.randn(d, dtype=torch.float64, generator=generator) * 3
    M, N = (scale * torch.randn(d, d, dtype=torch.float64, generator=generator) / math.sqrt(d) for _ in range(2))
    if kind == "linear":
        return h, lambda x: M @ x
    if kind == "nonlinear":
        return h, lambda x: N @ torch.tanh(M @ x) + torch.sin(x)
    unit = h / h.norm()
    bent = M - torch.outer(M @ unit, unit) + 0.7 * torch.outer(unit, unit)
    shift = torch.zeros(d, dtype=torch.float64)
    if kind == "nearly zero tangent":
        shift = 1e-9 * torch.randn(d, dtype=torch.float64, generator=generator)
    # M h is 0.7 h exactly only in exact arithmetic: the rest is a constant that no derivative sees
    rest = 0.7 * h - bent @ h
    return h, lambda x: bent @ x + rest + shift


@st.composite
def cases(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kind, d = draw(st.sampled_from(KINDS)), draw(st.integers(2, 9))
    h, F = branch(kind, d, generator, draw(st.sampled_from([0.1, 1.0, 5.0])))
    alpha = draw(st.sampled_from([1.0, 0.3, 0.01, -0.6, 2.0]))
    return h, F, alpha, draw(st.sampled_from(P_VALUES)), draw(st.sampled_from([None, math.pi / 4, 0.05]))


def at_kink(t, p, cap, width=1e-6):
    """Whether the angle is too near its cap for a derivative to exist numerically."""
    return cap is not None and abs(float(angular(p).angle(t.beta)) - cap) < width


def parts_of(h, F, alpha, p, cap):
    A = torch.autograd.functional.jacobian(F, h)
    t = turn(h, F(h), alpha, p, cap)
    return t, closed_form(t, A), A


@settings(max_examples=150)
@given(cases())
def test_closed_form_is_autograd(case):
    h, F, alpha, p, cap = case
    t, parts, _ = parts_of(*case)
    if at_kink(t, p, cap):
        return
    with use("closed"):
        J = torch.autograd.functional.jacobian(lambda x: retract(x, F(x), alpha, p, cap), h)
    if alpha > 0 and t.eta >= 1e-6:
        stated = torch.autograd.functional.jacobian(lambda x: definition(x, F(x), alpha, p, cap)[0], h)
        assert (parts.J - stated).abs().max() <= EXACT * max(1, float(J.abs().max()))
    assert (parts.J - J).abs().max() <= EXACT * max(1, float(J.abs().max()))


@settings(max_examples=300)
@given(cases())
def test_bounds(case):
    h, F, alpha, p, cap = case
    t, parts, _ = parts_of(*case)
    d = len(h)
    size = 1 + float(parts.J.abs().max())
    q_values, values = torch.linalg.svdvals(parts.Q), torch.linalg.svdvals(parts.J)
    b = bounds(t, torch.linalg.matrix_norm(parts.B, ord=2))
    assert abs(float(q_values[0]) - 1) < 1e-12
    # in the plane alone Q is a rotation; with any other direction it shrinks that by the cosine
    smallest = 1.0 if d == 2 or t.eta == 0 else abs(math.cos(float(t.theta)))
    assert abs(float(q_values[-1]) - smallest) < 1e-12
    assert float(q_values[-1]) >= float(b.q) - 1e-12
    assert torch.linalg.matrix_norm(parts.E, ord=2) <= b.delta + 1e-12 * size
    assert b.delta <= b.Delta
    assert b.Delta == pytest.approx(
        abs(alpha) * (2 * float(torch.linalg.matrix_norm(parts.B, ord=2)) + float(t.eta)), rel=1e-12, abs=1e-15
    )
    assert values[0] <= b.largest + 1e-12 * size
    assert values[-1] >= b.m - 1e-12 * size
    with use("closed"):
        out = retract(h, F(h), alpha, p, cap)
    torch.testing.assert_close(parts.J.mT @ out, h, rtol=1e-9, atol=1e-9 * size)
    assert values[0] >= 1 - 1e-12


def test_delta_of_the_paper():
    """For the angular family theta' = p^2/(p^2 + beta^2), and delta is the appendix's formula."""
    generator = torch.Generator().manual_seed(0)
    h, F = branch("nonlinear", 6, generator, 1.0)
    for p in (0.3, 1.0, 2.0, 7.0):
        t, parts, _ = parts_of(h, F, 0.8, p, None)
        norm, beta = float(torch.linalg.matrix_norm(parts.B, ord=2)), float(t.beta)
        ratio, theta = p**2 / (p**2 + beta**2), p * math.atan(beta / p)
        stated = 0.8 * abs(math.sin(theta)) / beta * norm + ratio * (0.8 * norm + beta)
        assert float(bounds(t, torch.tensor(norm, dtype=torch.float64)).delta) == pytest.approx(stated, rel=1e-12)


@pytest.mark.parametrize("name", RETRACTIONS)
def test_many_rows_at_once_are_each_alone(name):
    h, f = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    A = torch.randn(5, 4, 6, 6, dtype=torch.float64)
    alpha = torch.rand(5, 4, 1, dtype=torch.float64)
    together = closed_form(turn(h, f, alpha, name, 0.7), A).J
    alone = closed_form(turn(h[2, 3], f[2, 3], alpha[2, 3], name, 0.7), A[2, 3]).J
    torch.testing.assert_close(together[2, 3], alone, rtol=1e-13, atol=1e-13)


def test_an_angle_that_turns_faster_than_its_step_keeps_true_bounds():
    """sinh has slope above 1: the paper's Delta is no bound for it, so Delta grows to the exact delta."""
    retraction = Retraction.from_angle(torch.sinh)
    generator = torch.Generator().manual_seed(3)
    h, F = branch("linear", 5, generator, 3.0)
    t = turn(h, F(h), 0.9, retraction)
    parts = closed_form(t, torch.autograd.functional.jacobian(F, h))
    with use("closed"):
        J = torch.autograd.functional.jacobian(lambda x: retract(x, F(x), 0.9, retraction), h)
    torch.testing.assert_close(parts.J, J, rtol=1e-9, atol=1e-9)
    norm = torch.linalg.matrix_norm(parts.B, ord=2)
    b = bounds(t, norm)
    assert float(t.slope) > 1
    assert b.Delta > 0.9 * (2 * norm + t.eta)
    assert torch.linalg.matrix_norm(parts.E, ord=2) <= b.Delta


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("p", P_VALUES)
def test_an_angle_of_0_bounds_nothing(alpha, p):
    """The paper's counterexample has any norm, or is singular."""
    for K, largest, smallest in (((10 - 1) / alpha, 10, 1), (-1 / alpha, 1, 0)):
        h, A = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0.0], [[0.3, 0.0], [0.0, 0.3 + K]]))
        t = turn(h, A @ h, alpha, p)
        assert float(t.beta) == float(t.theta) == 0
        with use("closed"):
            J = torch.autograd.functional.jacobian(lambda x, A=A: retract(x, A @ x, alpha, p), h)
        for matrix in (closed_form(t, A).J, J):
            assert torch.linalg.svdvals(matrix).tolist() == pytest.approx([largest, smallest], abs=1e-12)
