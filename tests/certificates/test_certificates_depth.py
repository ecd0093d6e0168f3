"""Sums along depth against their definitions and the paper's table."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spheret.certificates.certificate_json import FitRecord
from spheret.certificates.depth import GROWTH, budgets, dyadic, fitted, growth
from spheret.schedules import SCHEDULES, factor


def lambdas(name, layers):
    return torch.tensor([factor(name, l, layers) for l in range(1, layers + 1)], dtype=torch.float64)


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_budgets(seed, layers):
    generator = torch.Generator().manual_seed(seed)
    Delta = 0.4 * torch.rand(layers, 3, dtype=torch.float64, generator=generator)
    theta = 0.5 * torch.rand(layers, 3, dtype=torch.float64, generator=generator)
    m = (theta.cos() - Delta).clamp(min=0)
    b = budgets(Delta, theta, m)
    for token in range(3):
        S, A = float(Delta[:, token].sum()), float(theta[:, token].square().sum())
        least = float(m[:, token].min())
        assert float(b.S[-1, token]) == pytest.approx(S)
        assert float(b.A[-1, token]) == pytest.approx(A)
        assert float(b.product_m[-1, token]) == pytest.approx(math.prod(m[:, token].tolist()))
        stated = math.exp(-(A / 2 + S) / least) if least > 0 else 0.0
        assert float(b.criterion[-1, token]) == pytest.approx(stated)
    # the criterion is the weaker of the two
    assert (b.criterion <= b.product_m * (1 + 1e-12)).all()


def test_a_bound_of_zero_stays_zero():
    b = budgets(*(torch.tensor([[0.1], [2.0], [0.1]]) for _ in range(2)), torch.tensor([[0.9], [0.0], [0.9]]))
    assert b.product_m.flatten().tolist() == pytest.approx([0.9, 0, 0])
    assert b.criterion[1:].flatten().tolist() == [0, 0]


@pytest.mark.parametrize("name", GROWTH)
def test_growth_recognises_its_schedule(name):
    layers, K, H = 48, 0.7, 0.3
    steps = lambdas(name, layers)
    S, A = (K * steps).cumsum(0), (H * steps).square().cumsum(0)
    sums = growth(S, A, torch.full((layers, 2), K), torch.full((layers, 2), H), steps, name)
    assert sums.S_grows_as == name
    assert sums.fits[name].S.factor == pytest.approx(K)
    assert sums.fits[name].S.r2 == pytest.approx(1)
    assert sums.fits[name].A.factor == pytest.approx(H**2)
    assert pytest.approx(sums.S_envelope, rel=1e-6) == sums.S
    assert pytest.approx(sums.A_envelope, rel=1e-6) == sums.A


@pytest.mark.parametrize(("name", "S_limit", "A_limit"), [
    ("constant", lambda L: L, lambda L: L),
    ("sqrt", lambda L: 2 * math.sqrt(L), lambda L: 1 + math.log(L)),
    ("harmonic", lambda L: 1 + math.log(L), lambda L: math.pi**2 / 6),
])  # fmt: skip
def test_the_table_of_the_paper(name, S_limit, A_limit):
    for layers in (1, 7, 64, 1000):
        steps = lambdas(name, layers)
        assert float(steps.sum()) <= S_limit(layers) + 1e-9
        assert float(steps.square().sum()) <= A_limit(layers) + 1e-9


def test_dyadic_budgets_of_the_paper():
    theta = 0.2
    for name, low, high in (
        ("sqrt", lambda m: m / (2 * m - 1), lambda m: 1.0),
        ("harmonic", lambda m: 1 / (4 * m), lambda m: 1 / m),
    ):
        steps = lambdas(name, 127)
        rows = dyadic((theta * steps).square(), steps)
        assert [row.m for row in rows] == [1, 2, 4, 8, 16, 32, 64]
        for row in rows:
            assert low(row.m) - 1e-12 <= row.lambda_squared <= high(row.m) + 1e-12
            assert row.ratio == pytest.approx(theta**2)


def test_every_schedule_of_the_table_has_its_growth():
    assert set(GROWTH) == set(SCHEDULES) - {"linear-paper"}


def test_a_constant_sum_is_no_division_by_zero():
    assert fitted(torch.zeros(3), torch.ones(3)) == FitRecord(factor=0.0, r2=1.0)
