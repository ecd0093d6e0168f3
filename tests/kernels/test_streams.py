"""Sums of streams, products of normed rows and Sinkhorn's loop: their own backwards against torch ops in float64."""

import pytest
import torch
from oracle import rows

from spheret.kernels import native, streams, use

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no native kernel")


def leaf(*shape, seed):
    return rows(torch.Size(shape).numel() // shape[-1], shape[-1], seed=seed).view(shape).float().requires_grad_()


def mixed(tokens, m, n, d, layout):
    """Weights per token, per token and transposed in memory, or the same for all tokens."""
    lead = () if layout == "shared" else (tokens,)
    weights, post = leaf(*lead, m, n, seed=0), leaf(*lead, m, seed=2)
    if layout == "transposed":
        weights = leaf(n, m, tokens, seed=0).detach().permute(2, 1, 0).requires_grad_()
        post = leaf(m, tokens, seed=2).detach().mT.requires_grad_()
    return weights, leaf(tokens, n, d, seed=1), post, leaf(tokens, d, seed=3)


SIZES = [(37, 4, 4, 64), (5, 1, 3, 13), (300, 9, 2, 70)]
CASES = {
    **{
        f"mix-{layout}-{size}": (streams.mix, mixed(*size, layout))
        for layout in ("own", "transposed", "shared")
        for size in SIZES
    },
    "read": (streams.mix, mixed(20, 1, 4, 40, "own")[:2]),
    **{f"sinkhorn-{n}": (streams.sinkhorn, (leaf(2, 21, n, n, seed=0),)) for n in (2, 4, 8, 9)},
    "rms": (lambda x, v: streams.normed_products(x, v, 1e-5), (leaf(3, 7, 40, seed=0), leaf(6, 40, seed=1))),
    "layernorm": (
        lambda x, v: streams.normed_products(3 + x, v, 1e-5, centre=True),
        (leaf(3, 7, 40, seed=0), leaf(6, 40, seed=1)),
    ),
    "attend": (
        lambda q, *x: streams.attend(x, q, 1e-5),
        (leaf(2, 40, seed=9), *(leaf(7, 40, seed=i) for i in range(3))),
    ),
    "length": (streams.length, (leaf(9, 40, seed=0),)),
}


def weights(x):
    return (7 * torch.arange(x.numel()) ** 2).double().cos().view(x.shape).to(x.dtype)


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_second_gradients(case):
    function, inputs = CASES[case]

    def results(inputs):
        out = function(*inputs)
        g = weights(out)
        plain = torch.autograd.grad(out, inputs, g, retain_graph=True)
        first = torch.autograd.grad(out, inputs, g, create_graph=True)
        second = torch.autograd.grad(sum((weights(x) * x * x).sum() for x in first), inputs, allow_unused=True)
        return [out, *plain, *first, *(x for x in second if x is not None)]

    with use("closed"):
        # views, so that no case is changed
        truth = results([x.detach().double().requires_grad_() for x in inputs])
    for x, y in zip(results(inputs), truth, strict=True):
        assert (x.double() - y).norm() <= 5e-6 * y.norm()


def test_the_same_bits_for_any_number_of_threads():
    inputs = mixed(2000, 4, 4, 64, "own")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = streams.mix(*inputs)
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_who_serves():
    x = torch.ones(2, 3, 4)
    assert streams.native_serves(x)
    assert not streams.native_serves(x.double())
    with use("closed"):
        assert not streams.native_serves(x)
