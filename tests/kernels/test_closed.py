"""The closed form by itself, in float32 and at its edges: elsewhere float32 rows run on the native kernel."""

import math

import pytest
import torch
from oracle import definition, normwise, rows

from spheret import angular, retract
from spheret.kernels import use


def along_and_across(n, d, h_size, f_size, c=0.0):
    """Rows h of norm `h_size`, and f with a part of norm `f_size` orthogonal to h and a part c h; float64."""
    h = torch.nn.functional.normalize(rows(n, d), dim=-1)
    z = rows(n, d, seed=1)
    z = torch.nn.functional.normalize(z - (h * z).sum(-1, keepdim=True) * h, dim=-1)
    return h * h_size, f_size * z + c * h_size * h


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("retraction", ["angular", torch.tanh], ids=["angular", "own"])
@pytest.mark.parametrize("f_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("h_dtype", DTYPES, ids=str)
def test_results_have_the_dtypes_of_their_inputs_and_are_rounded_once(h_dtype, f_dtype, retraction):
    def update(h, f):
        with use("closed"):
            return retract(h, f, 0.7, retraction, math.pi / 4)

    def results(h, f, th, tf, g):
        out, pull = torch.func.vjp(update, h, f)
        return out, torch.func.jvp(update, (h, f), (th, tf))[1], *pull(g)

    h, f = along_and_across(4, 48, 2.0, 1.5, 0.4)
    th, tf, g = (rows(4, 48, seed=seed) for seed in (5, 6, 7))
    inputs = [h.to(h_dtype), f.to(f_dtype), th.to(h_dtype), tf.to(f_dtype), g.to(h_dtype)]
    truth, wide = results(*(x.double() for x in inputs)), torch.float64 in (h_dtype, f_dtype)
    for got, exact, dtype in zip(results(*inputs), truth, (h_dtype, h_dtype, h_dtype, f_dtype), strict=True):
        assert got.dtype == dtype
        # the arithmetic is float32 unless a row is float64
        assert (normwise(got, exact) <= max(torch.finfo(dtype).eps, 1e-13 if wide else 5e-7)).all()
    if retraction == "angular" and not wide:
        for got, same in zip(results(*inputs), results(*(x.float() for x in inputs)), strict=True):
            assert torch.equal(got, same.to(got.dtype))


class TestOneArgumentAtATime:
    """Derivatives in one argument while the others are constants, with a row of zeros among the rows."""

    h, f = along_and_across(4, 5, 2.0, 1.5, 0.4)
    h[1] = 0
    inputs = (h, f, torch.tensor([0.6], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64))
    directions = (rows(4, 5, seed=5), rows(4, 5, seed=6), *torch.tensor([[0.9], [1.1]], dtype=torch.float64))

    @pytest.mark.parametrize("cap", [None, 0.3])
    @pytest.mark.parametrize("index", range(4), ids=["h", "f", "alpha", "p"])
    def test_forward_mode_and_backward(self, index, cap):
        def update(x):
            with use("closed"):
                return retract(*(x if k == index else y for k, y in enumerate(self.inputs)), cap)

        def truth(t):
            h, f, alpha, p = (
                x + t * v if k == index else x
                for k, (x, v) in enumerate(zip(self.inputs, self.directions, strict=True))
            )
            return definition(h, f, alpha, angular(float(p)).angle, cap)[0]

        step = 1e-5
        expected = (truth(step) - truth(-step)) / (2 * step)
        # a row of zeros follows h alone, and shares in no gradient but its own
        expected[1] = self.directions[0][1] if index == 0 else 0
        pushed = torch.func.jvp(update, (self.inputs[index],), (self.directions[index],))[1]
        torch.testing.assert_close(pushed, expected, rtol=1e-6, atol=1e-7)
        g = rows(4, 5, seed=7)
        (pulled,) = torch.func.vjp(update, self.inputs[index])[1](g)
        torch.testing.assert_close(
            (pulled * self.directions[index]).sum(), (g * expected).sum(), rtol=1e-6, atol=1e-7
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_narrow_scalars_are_widened_before_they_are_squared(self, dtype):
        h, f, *scalars = self.inputs
        alpha, p = (x.to(dtype) for x in scalars)
        with use("closed"):
            got, truth = retract(h, f, alpha, p, 0.9), retract(h, f, alpha.double(), p.double(), 0.9)
        torch.testing.assert_close(got, truth, rtol=1e-14, atol=1e-14)

    def test_steps_per_row(self):
        """One alpha and one p for each row: their gradients have that shape, and are 0 for the row of zeros."""
        alpha, p = (x.expand(4, 1).clone().requires_grad_() for x in self.inputs[2:])
        with use("closed"):
            retract(self.h, self.f, alpha, p).sum().backward()
        for x in (alpha, p):
            assert x.grad.shape == (4, 1)
            assert (x.grad[[0, 2, 3]] != 0).all()
            assert x.grad[1] == 0
