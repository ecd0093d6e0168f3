"""The norms and connections one by one: defaults, signs, bounds, and arguments that they refuse."""

import inspect
import math

import pytest
import torch
from oracle import rows

from spheret import Connection, SpheretNorm, scheme
from spheret.connections import angle_between, norms
from spheret.connections.ngpt import NGPTNorm

D = 12
NORMS = [kind for _, kind in inspect.getmembers(norms, inspect.isclass) if issubclass(kind, norms.Norm)]
NORMS.remove(norms.Norm)


@pytest.mark.parametrize("kind", NORMS, ids=lambda kind: kind.__name__)
class TestEveryNorm:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_rows_are_widened_and_rounded_once(self, kind, dtype):
        x = (3 * rows(40, D)).to(dtype)
        for norm in (kind(D), kind(D, dtype=dtype)):
            assert norm(x).dtype == dtype
            assert torch.equal(norm(x), norm(x.float()).to(dtype))

    def test_parameters_follow_the_dtype_of_the_rows(self, kind):
        norm, x = kind(D), rows(40, D).float()
        wide = norm.double().apply_wide(x)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, norm.float().apply_wide(x))


class TestSigns:
    x = rows(5, D)

    def test_a_negative_b_of_dyisru_counts_as_its_size(self):
        norm = norms.DynamicISRU(D).double()
        expected = norm(self.x)
        with torch.no_grad():
            norm.b.neg_()
        torch.testing.assert_close(norm(self.x), expected, rtol=0, atol=0)

    def test_a_negative_rate_of_ngpt_counts_as_its_size(self):
        norm, f = NGPTNorm(D).double(), rows(5, D, seed=1)
        expected = norm(self.x, f)
        with torch.no_grad():
            norm.a.neg_()
        torch.testing.assert_close(norm(self.x, f), expected, rtol=0, atol=0)

    def test_a_fixed_factor(self):
        torch.testing.assert_close(norms.Gain(1, 2.0)(self.x), 2 * self.x)
        torch.testing.assert_close(norms.Gain(1, 2.0, fixed=1.5)(self.x), 3 * self.x)

    @pytest.mark.parametrize("fixed", [1.0, 2.0, 3.3])
    def test_a_gain_in_half_precision_is_rounded_once(self, fixed):
        x, gain = self.x.bfloat16(), norms.Gain(D, 0.3, fixed=fixed, dtype=torch.bfloat16)
        assert torch.equal(gain(x), (fixed * gain.weight.float() * x.float()).bfloat16())


@pytest.mark.parametrize(("blocks", "post"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_a_quarter_of_mix_ln_is_post_ln(blocks, post):
    built = scheme("mix-ln")
    placed = [built.connect(D, sublayer, 2 * blocks).outer_norm for sublayer in range(1, 2 * blocks + 1)]
    assert [isinstance(norm, norms.LayerNorm) for norm in placed] == [True] * 2 * post + [False] * 2 * (blocks - post)


class TestAngle:
    h = rows(6, D)

    @pytest.mark.parametrize("p", [0.5, 1.0, math.inf])
    def test_its_gradient_is_finite_where_the_branch_is_parallel_or_the_row_is_0(self, p):
        update = SpheretNorm(D, 1, retraction=p).double()
        f = (0.5 * self.h).requires_grad_()
        h = self.h.clone()
        h[2] = 0
        h.requires_grad_()
        angle = update.angle(h, f)
        assert (angle.abs() < 1e-7).all()
        angle.sum().backward()
        assert all(x.isfinite().all() for x in (h.grad, f.grad, update.a.grad))

    @pytest.mark.parametrize(
        ("options", "cap"),
        [
            ({"retraction": "exponential", "max_angle": 0.3}, 0.3),
            # that of its own value, not of the start
            ({"retraction": 4.0, "learnable_p": True, "max_angle": 2.0}, 2.0),
        ],
    )
    def test_it_stops_at_the_cap(self, options, cap):
        update = SpheretNorm(D, 1, **options).double()
        f = 100 * rows(6, D, seed=1)
        assert update.angle(self.h, f).tolist() == pytest.approx([cap] * 6)
        assert angle_between(self.h, update(self.h, f)).tolist() == pytest.approx([cap] * 6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_rows_are_widened(self, dtype):
        h, f = (100 * self.h).to(dtype), (100 * rows(6, D, seed=1)).to(dtype)
        truth = SpheretNorm(D, 1).double().angle(h.double(), f.double())
        torch.testing.assert_close(SpheretNorm(D, 1).angle(h, f), truth.float(), rtol=1e-6, atol=0)

    def test_between_rows(self):
        x = torch.eye(3, dtype=torch.float64)
        assert angle_between(x, 7 * x).tolist() == [0, 0, 0]
        assert angle_between(x, x.roll(1, 0)).tolist() == pytest.approx([math.pi / 2] * 3)
        assert angle_between(x, -2 * x).tolist() == pytest.approx([math.pi] * 3)
        small = torch.tensor([1.0, 1e-9, 0.0], dtype=torch.float64)
        assert float(angle_between(x[0], small)) == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_learned_p_is_computed_in_float32_or_better(dtype):
    update = SpheretNorm(D, 1, retraction=0.3, learnable_p=True, dtype=dtype)
    assert update.p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert update.p.item() == pytest.approx(math.log1p(math.exp(update.raw_p.item())), rel=1e-6)
    assert update.p.item() == pytest.approx(0.3, rel=1e-2)


class TestConnectionAlone:
    def test_a_sum_is_rounded_once(self):
        h = torch.ones(1, 2, dtype=torch.bfloat16)
        # a little above half the spacing of bfloat16 at 1; f rounded by itself would be the half, and go down to even
        f = torch.full((1, 2), 2**-8 * (1 + 2**-10))
        out = Connection(2).write(h, f)
        assert out.dtype == torch.bfloat16
        assert out.tolist() == [[1 + 2**-7] * 2]


class TestRMSNorm:
    @pytest.mark.parametrize("shape", [(7, D), (2, 3, 5, D)])
    def test_its_backward_is_autograds_bit_for_bit(self, shape):
        norm = norms.RMSNorm(D)
        torch.manual_seed(0)
        with torch.no_grad():
            norm.weight.normal_()

        def plain(x):
            return norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

        start, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
        results = []
        for function in (norm, plain):
            h = start * 3
            # beside a residual path the gradient of h is a sum of three parts, in one order
            out = 2 * h + function(h).sin()
            results.append((out, *torch.autograd.grad(out, (start, norm.weight), g)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_it_keeps_its_input_and_one_number_per_row(self):
        norm, x = norms.RMSNorm(D), torch.randn(50, D, requires_grad=True)
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
            norm(x)
        assert sum(t.numel() for t in kept.values()) == 50 * D + D + 50
