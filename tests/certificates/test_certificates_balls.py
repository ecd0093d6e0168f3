"""Ball arithmetic and proven singular values: the exact result lies inside, for random and for awkward arguments."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spheret.certificates import balls
from spheret.certificates.balls import Ball, NotEnclosed
from spheret.certificates.enclosures import Matrices, singular_values
from spheret.certificates.midpoint_radius import ULPS


def uniform(seed, *shape, low=-1.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64, generator=generator)


def ball(seed, *shape, radius=1e-10, **options):
    """A random ball, and real numbers inside it, as mpf."""
    mid, share = uniform(seed, *shape, **options), uniform(seed + 1, *shape)
    points = [
        mp.mpf(float(m)) + mp.mpf(float(s)) * radius for m, s in zip(mid.flatten(), share.flatten(), strict=True)
    ]
    return Ball.of(mid, torch.full_like(mid, radius)), points


def contains(result, truth):
    pairs = zip(result.mid.flatten(), result.rad.flatten(), truth, strict=True)
    return all(abs(mp.mpf(float(m)) - t) <= mp.mpf(float(r)) for m, r, t in pairs)


@pytest.fixture(autouse=True, scope="module")
def precise():
    with mp.workdps(50):
        yield


FUNCTIONS = {
    "exp": (mp.exp, -30, 30),
    "tanh": (mp.tanh, -5, 5),
    "erf": (mp.erf, -5, 5),
    "sin": (mp.sin, -7, 7),
    "cos": (mp.cos, -7, 7),
    "atan": (mp.atan, -50, 50),
    "asin": (mp.asin, -0.99, 0.99),
    "sqrt": (mp.sqrt, 1e-6, 9),
    "rsqrt": (lambda x: 1 / mp.sqrt(x), 1e-3, 9),
}
RADII = st.sampled_from([0.0, 1e-18, 1e-14, 1e-9, 1e-4])


@pytest.mark.parametrize("name", FUNCTIONS)
@given(st.integers(0, 10**6), RADII)
def test_functions(name, seed, radius):
    truth, low, high = FUNCTIONS[name]
    x, points = ball(seed, 8, radius=min(radius, 1e-7), low=low, high=high)
    assert contains(getattr(x, name)(), [truth(p) for p in points])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes(name):
    """The tangent of every function, against the difference of its values in 50 digits."""
    truth, low, high = FUNCTIONS[name]
    x, points = ball(0, 8, radius=0.0, low=low, high=high)
    y = getattr(Ball.of(x.mid, None, Ball.of(torch.ones(1, 8, dtype=torch.float64))), name)()
    assert contains(y.tangent, [mp.diff(truth, p) for p in points])
    assert float((y.tangent.rad / (1 + y.tangent.mid.abs())).max()) < 1e-13


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sin", "cos", "atan", "asin"])
def test_the_library_is_as_accurate_as_assumed(name):
    truth, low, high = FUNCTIONS[name]
    for scale in (1.0, 1e-3):
        x = scale * uniform(7, 2000, low=low, high=high)
        y = getattr(torch, name)(x)
        errors = [
            abs(mp.mpf(float(b)) - truth(mp.mpf(float(a)))) / math.ulp(float(b)) for a, b in zip(x, y, strict=True)
        ]
        assert max(errors) < ULPS / 2


ARITHMETIC = {
    "+": (lambda a, b: a + b),
    "-": (lambda a, b: a - b),
    "*": (lambda a, b: a * b),
    "/": (lambda a, b: a / b),
}


@pytest.mark.parametrize("sign", ARITHMETIC)
@given(st.integers(0, 10**6), RADII, RADII)
def test_arithmetic(sign, seed, one, other):
    operation = ARITHMETIC[sign]
    a, first = ball(seed, 8, radius=one)
    b, second = ball(seed + 5, 8, radius=other, low=0.1, high=2.0)
    assert contains(operation(a, b), [operation(x, y) for x, y in zip(first, second, strict=True)])
    # with exact numbers on either side
    assert contains(operation(a, 3.0), [operation(x, mp.mpf(3)) for x in first])
    assert contains(operation(3.0, b), [operation(mp.mpf(3), y) for y in second])


@given(st.integers(0, 10**6), RADII, st.sampled_from([1.0, 1e-9, 1e9]))
def test_products_and_sums(seed, radius, scale):
    a, first = ball(seed, 4, 6, radius=radius)
    b, second = ball(seed + 5, 6, 3, radius=radius, low=-scale, high=scale)
    # rows that nearly cancel are where a wrong radius would show
    left, right = mp.matrix(4, 6), mp.matrix(6, 3)
    for i, x in enumerate(first):
        left[i // 6, i % 6] = x
    for i, x in enumerate(second):
        right[i // 3, i % 3] = x
    assert contains(a @ b, list(left * right))
    assert contains(a.sum(-1), [mp.fsum(first[6 * i : 6 * i + 6]) for i in range(4)])
    assert contains(a.mean(-1), [mp.fsum(first[6 * i : 6 * i + 6]) / 6 for i in range(4)])


def test_cancellation_is_in_the_radius():
    x = Ball.of(torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64))
    total = x.sum(-1)
    assert abs(float(total.mid) - 1.0) <= float(total.rad)


def test_a_divisor_that_may_be_zero():
    quotient = 1.0 / Ball.of(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert float(quotient.rad) == math.inf


def test_the_derivative_of_a_composite():
    """softmax(x) * tanh(x).sum() / |x|, along three directions, against 50 digits."""
    mid, directions = uniform(1, 5), uniform(2, 3, 5)
    x = Ball.of(mid, None, Ball.of(directions))
    y = x.softmax(-1) * x.tanh().sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).sqrt()

    def truth(values):
        weights = [mp.exp(v) for v in values]
        factor = mp.fsum(map(mp.tanh, values)) / mp.sqrt(mp.fsum(v * v for v in values)) / mp.fsum(weights)
        return [w * factor for w in weights]

    point = [mp.mpf(float(v)) for v in mid]
    assert contains(y, truth(point))
    for number, direction in enumerate(directions.tolist()):
        for i in range(5):
            slope = mp.diff(
                lambda t, i=i, d=direction: truth([p + t * v for p, v in zip(point, d, strict=True)])[i], 0
            )
            # the difference itself is good to about 1e-16 only
            assert abs(slope - float(y.tangent.mid[number, i])) <= float(y.tangent.rad[number, i]) + 1e-15


def test_an_operation_without_a_rule():
    x = Ball.of(torch.ones(3, dtype=torch.float64))
    with pytest.raises(NotEnclosed, match="cumsum"):
        x.cumsum(0)
    with pytest.raises(NotEnclosed, match="conversion"):
        x.to(torch.float32)
    with pytest.raises(NotEnclosed, match="power"):
        x**0.3
    with pytest.raises(NotEnclosed, match="add"):
        torch.add(x, x, alpha=2)


def test_every_rule_is_callable():
    assert all(callable(rule) for rule in balls.RULES.values())


def orthogonal(seed, n):
    return torch.linalg.qr(uniform(seed, n, n))[0]


SPECTRA = {
    "equal": lambda n: torch.ones(n),
    "spread": lambda n: torch.linspace(0.1, 3.0, n),
    "graded": lambda n: torch.logspace(3, -5, n),
    "near singular": lambda n: torch.cat([torch.ones(n - 1), torch.tensor([1e-13])]),
    "singular": lambda n: torch.cat([torch.ones(n - 1), torch.zeros(1)]),
    "zero": lambda n: torch.zeros(n),
}


@pytest.mark.parametrize("kind", SPECTRA)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([1.0, 1e-200, 1e200]), st.sampled_from([0.0, 1e-9]))
def test_singular_values_of_matrices_with_known_ones(kind, seed, n, scale, share):
    """The singular values of the float64 matrix in 50 digits, and those of a matrix at the radius from it."""
    spectrum = SPECTRA[kind](n).double()
    M = scale * (orthogonal(seed, n) @ torch.diag(spectrum) @ orthogonal(seed + 1, n))
    radius = share * scale
    e = singular_values(Matrices(M[None], torch.tensor([radius], dtype=torch.float64)))
    shift = orthogonal(seed + 2, n) * radius * (1 - 1e-12)
    for matrix in (M, M + shift):
        values = mp.svd_r(mp.matrix(matrix.tolist()), compute_uv=False)
        assert float(e.max_low) <= max(values) * (1 + mp.mpf(10) ** -40) <= float(e.max_high) * (1 + 1e-15)
        assert float(e.min_low) <= min(values) + scale * mp.mpf(10) ** -40
        assert min(values) <= float(e.min_high) + scale * mp.mpf(10) ** -40
    if kind in ("equal", "spread"):
        assert float(e.min_high - e.min_low) <= (1e-11 + 4 * share) * scale
        assert float(e.max_high - e.max_low) <= (1e-11 + 4 * share) * scale


def test_matrices_that_are_not_finite_prove_nothing():
    M = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    M[0, 1, 1] = math.nan
    e = singular_values(Matrices(M, torch.zeros(2, dtype=torch.float64)))
    assert (float(e.min_low[0]), float(e.max_high[0])) == (0.0, math.inf)
    assert float(e.min_low[1]) == pytest.approx(1)
