"""Singular values from products with vectors, against dense SVD."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from spheret.certificates.singular_values import lanczos


def operators(M):
    return (lambda v: (M @ v[..., None]).squeeze(-1)), (lambda u: (M.mT @ u[..., None]).squeeze(-1))


def both_ways(M, **options):
    return lanczos(*operators(M), M[..., 0], **options)


def matrix(kind, n, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    eye = torch.eye(n, dtype=torch.float64)
    if kind == "near identity":
        return eye + 0.3 * normal(n, n) / n**0.5
    if kind == "low rank change":
        return eye + normal(n, 1) @ normal(1, n)
    if kind == "singular":
        M = normal(n, n)
        return M - torch.outer(M[:, 0], eye[0])
    if kind == "zero":
        return torch.zeros(n, n, dtype=torch.float64)
    return {"any": normal(n, n), "identity": eye}[kind]


KINDS = ("any", "near identity", "low rank change", "identity", "singular", "zero")


@given(st.sampled_from(KINDS), st.integers(1, 24), st.integers(0, 10**6))
def test_all_steps_are_exact(kind, n, seed):
    M = matrix(kind, n, seed)
    extremes, truth = both_ways(M, steps=n), torch.linalg.svdvals(M)
    size = 1e-10 * float(1 + truth[0])
    assert abs(float(extremes.largest - truth[0])) <= size
    assert abs(float(extremes.smallest - truth[-1])) <= size


@given(st.integers(0, 10**6))
def test_few_steps_err_to_the_safe_side_within_the_residual(seed):
    M = matrix("any", 40, seed)
    extremes, truth = both_ways(M, steps=8), torch.linalg.svdvals(M)
    assert extremes.largest <= truth[0] * (1 + 1e-12)
    assert extremes.smallest >= truth[-1] * (1 - 1e-12)
    for value, residual in (
        (extremes.largest, extremes.largest_residual),
        (extremes.smallest, extremes.smallest_residual),
    ):
        assert residual > 0
        assert (truth - value).abs().min() <= residual + 1e-12


def test_each_operator_of_a_batch_is_alone():
    Ms = torch.stack([matrix(kind, 12, 5) for kind in KINDS])
    extremes = both_ways(Ms, steps=12)
    for index, M in enumerate(Ms):
        truth = torch.linalg.svdvals(M)
        torch.testing.assert_close(extremes.largest[index], truth[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(extremes.smallest[index], truth[-1], rtol=1e-9, atol=1e-9)


def test_converged_values_stop_early():
    calls = []
    M = matrix("low rank change", 64, 1)
    apply, transpose = operators(M)

    def counted(v):
        calls.append(1)
        return apply(v)

    lanczos(counted, transpose, M[0], steps=64)
    assert len(calls) <= 8


def test_no_random_state():
    M = matrix("any", 10, 0)
    before = torch.get_rng_state()
    both_ways(M)
    assert torch.equal(torch.get_rng_state(), before)
