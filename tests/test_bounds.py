"""Bounded scalars start on their upper bound. Gradients pass there, and an optimiser's step ends in the interval."""

import copy
import io
import math
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import rows
from torch import nn
from torch._subclasses import FakeTensorMode

from spheret import Bounded, ScaleNorm, SpheretNorm
from spheret.bounds import bounded_softplus, inverse_softplus
from spheret.connections import BoundedScalar
from spheret.observe.measures import on_bound
from spheret.optim import clip_gradients

MAKERS = {
    "a": lambda **options: SpheretNorm(16, 1, **options),
    "gamma": lambda **options: ScaleNorm(16, **options),
}
VALUES = {"a": lambda m: m.alpha, "gamma": lambda m: m.radius}
INTERVALS = {"a": (0.0, 1.0), "gamma": (1.0, 4.0)}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "ascent": lambda p: torch.optim.SGD(p, lr=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


def push(module, name, up, optimizer=None):
    """One gradient step that raises (or lowers) the scalar's value."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.5)
    optimizer.zero_grad()
    ascent = optimizer.param_groups[0].get("maximize", False)
    (VALUES[name](module).sum() * (1 if up == ascent else -1)).backward()
    optimizer.step()


class TestValue:
    @given(st.floats(-30, 30), st.floats(-2, 2), st.sampled_from([0.0, 0.3, 1.0]), st.floats(0.1, 2), st.booleans())
    def test_it_is_the_clamp_and_the_gradient_that_of_the_softplus(self, x, g, low, scale, exact):
        free = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        plain = free.detach().clone().requires_grad_()
        y = bounded_softplus(free, low, 4.0, exact, scale)
        truth = scale * torch.clamp(F.softplus(plain), low, 4.0)
        assert torch.equal(y, truth)
        y.backward(torch.tensor([g], dtype=torch.float64))
        if exact:
            truth.backward(torch.tensor([g], dtype=torch.float64))
            assert torch.equal(free.grad, plain.grad)
        else:
            # 1 - exp(-softplus) cancels where the slope is small
            slope = scale * torch.sigmoid(plain.detach()).item()
            assert free.grad.item() == pytest.approx(g * slope, rel=1e-12, abs=1e-15)

    def test_every_way_to_compute_it_agrees(self):
        x = torch.tensor([-3.0, 0.8, 9.0], dtype=torch.float64, requires_grad=True)

        def value(x):
            return bounded_softplus(x, 0.1, 4.0, scale=0.5)

        truth, slope = 0.5 * F.softplus(x).clamp(0.1, 4.0), 0.5 * torch.sigmoid(x.detach())
        assert torch.equal(value(x), truth)
        # one number on the CPU is computed in Python, as one node of the graph
        one = [x.detach()[i : i + 1].requires_grad_() for i in range(3)]
        assert all(value(part).grad_fn.name() == "_BoundedNumberBackward" for part in one)
        assert torch.equal(torch.cat([value(part) for part in one]), truth)
        with torch.no_grad():
            assert torch.equal(torch.cat([value(part) for part in one]), truth)
        for part, each in zip(one, slope, strict=True):
            (g,) = torch.autograd.grad(value(part), part)
            assert g.item() == pytest.approx(each.item(), rel=1e-13)
            (g,) = torch.autograd.grad(value(part), part, create_graph=True)
            (second,) = torch.autograd.grad(g, part)
            assert second.item() == pytest.approx(0.5 * each.item() * 2 * (1 - 2 * each.item()))
        torch.testing.assert_close(torch.autograd.grad(value(x).sum(), x)[0], slope)
        torch.testing.assert_close(torch.func.grad(lambda x: value(x).sum())(x.detach()), slope)
        ones = torch.ones(3, dtype=torch.float64)
        torch.testing.assert_close(torch.func.jvp(value, (x.detach(),), (ones,))[1], slope)
        assert torch.equal(torch.func.vmap(value)(x), truth)
        inside = x.detach()[1:2].requires_grad_()
        assert torch.autograd.gradcheck(value, (inside,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(value, (inside,))
        torch.compiler.reset()
        compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), truth)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], slope)

    def test_nan_stays_nan(self):
        x = torch.tensor([math.nan])
        assert bounded_softplus(x, 0.0, 1.0).isnan()
        assert bounded_softplus(x.repeat(2), 0.0, 1.0).isnan().all()

    @pytest.mark.parametrize("y", [1e-6, 0.1, 1.0, 5.0, 19.9, 20.0, 35.8])
    def test_inverse_softplus(self, y):
        assert F.softplus(torch.tensor(inverse_softplus(y), dtype=torch.float64)).item() == pytest.approx(y, rel=1e-8)
        assert inverse_softplus(y) == y or y < 20
        assert inverse_softplus(0.0) == -math.inf

    @pytest.mark.parametrize("size", [1, 3])
    def test_half_types_are_computed_in_float32(self, size):
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.full((size,), 0.3, dtype=dtype, requires_grad=True)
            for exact in (False, True):
                y = bounded_softplus(x, 0.1, 4.0, exact)
                assert torch.equal(y, F.softplus(x.float()))
                assert torch.autograd.grad(y.sum(), x)[0].dtype == dtype

    def test_a_tensor_without_a_value(self):
        with FakeTensorMode():
            assert bounded_softplus(torch.zeros(1, requires_grad=True), 0.1, 4.0).shape == (1,)


class TestGradients:
    @pytest.mark.parametrize("exact_clamp", [False, True])
    @pytest.mark.parametrize("beyond", [0.0, 1e-3])
    def test_micro_batches_add_up_to_their_batch_in_any_loop(self, exact_clamp, beyond):
        h, f, target = (rows(64, 8, seed=seed) for seed in (0, 1, 2))

        def gradients(parts):
            enter, update = ScaleNorm(8, exact_clamp).double(), SpheretNorm(8, 1, exact_clamp=exact_clamp).double()
            with torch.no_grad():
                enter.gamma.add_(beyond)
                update.a.add_(beyond)
            for a, b, c in zip(*(x.chunk(parts) for x in (h, f, target)), strict=True):
                (update(enter(a), b) * c).sum().backward()
            return torch.cat([enter.gamma.grad, update.a.grad])

        whole = gradients(1)
        torch.testing.assert_close(gradients(16), whole, rtol=1e-12, atol=1e-14)
        assert (whole == 0).all() == (exact_clamp and beyond > 0)


class Pair(Bounded):
    """A user's own module: two bounded scalars, one of them a vector in a list of parameters."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), inverse_softplus(2.0), dtype=dtype))
        self.others = nn.ParameterList([torch.full((8,), inverse_softplus(0.5), dtype=dtype)])

    def bounded_scalars(self):
        return [BoundedScalar("x", self.x, 0.1, 2.0), BoundedScalar("y", self.others[0], 0.5, 3.0)]

    def forward(self, h):
        return h * self.bounded_softplus(self.x, 0.1, 2.0) * self.bounded_softplus(self.others[0], 0.5, 3.0)


def beyond(*modules):
    """Put every parameter far beyond a bound, give each a gradient of 0, and return the parameters."""
    parameters = [p for module in modules for p in module.parameters()]
    with torch.no_grad():
        for p in parameters:
            p.add_(5.0)
            p.grad = torch.zeros_like(p)
    return parameters


class TestSteps:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("name", MAKERS)
    def test_outward_steps_stay_on_the_bound_and_the_value_never_leaves_the_interval(self, name, optimizer):
        module = MAKERS[name]()
        parameter, (low, high) = getattr(module, name), INTERVALS[name]
        start, value = parameter.item(), VALUES[name](module).item()
        stepper = OPTIMIZERS[optimizer](module.parameters())
        for _ in range(5):
            push(module, name, True, stepper)
            assert parameter.item() == start
            assert VALUES[name](module).item() == value == high
        for _ in range(60):
            push(module, name, False, stepper)
            assert low <= VALUES[name](module).item() <= high
        assert VALUES[name](module).item() < low + 0.3
        if low:
            assert parameter.item() == torch.tensor(inverse_softplus(low)).item()
            for _ in range(30):
                push(module, name, True, stepper)
            assert VALUES[name](module).item() > low

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("width", [2, 48, 112, 208, 768])
    def test_the_ceiling_is_the_starting_value(self, width, dtype):
        modules = nn.ModuleList([ScaleNorm(width, dtype=dtype), SpheretNorm(width, 1, dtype=dtype)])
        starts = [p.detach().clone() for p in modules.parameters()]
        torch.optim.SGD(beyond(modules), lr=1.0).step()
        assert all(torch.equal(p, start) for p, start in zip(modules.parameters(), starts, strict=True))

    def test_a_users_module(self):
        model = nn.Sequential(Pair(), nn.Linear(8, 8).double(), Pair(torch.float32))
        before = model[1].weight.detach().clone()
        optimizer = torch.optim.SGD(beyond(model), lr=1.0)
        optimizer.step()
        for module in (model[0], model[2]):
            assert module.x.item() == torch.tensor(inverse_softplus(2.0), dtype=module.x.dtype)
            assert (module.others[0] == torch.tensor(inverse_softplus(3.0), dtype=module.x.dtype)).all()
        assert torch.equal(model[1].weight, before + 5)

    def test_what_is_left_alone(self):
        held, exact, frozen, other = ScaleNorm(16), ScaleNorm(16, exact_clamp=True), ScaleNorm(16), ScaleNorm(16)
        beyond(held, exact, frozen, other)
        frozen.gamma.requires_grad_(False)
        torch.optim.SGD([*held.parameters(), *exact.parameters(), *frozen.parameters()], lr=1.0).step()
        start = ScaleNorm(16).gamma.item()
        assert held.gamma.item() == start
        for module in (exact, frozen, other):
            assert module.gamma.item() == pytest.approx(start + 5)
        exact.project_scalars()
        assert exact.gamma.item() == pytest.approx(start + 5)
        # another optimiser, and no optimiser
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert other.gamma.item() == start
        beyond(other)
        other.project_scalars()
        assert other.gamma.item() == start

    def test_copies_and_loaded_modules(self, tmp_path):
        module = nn.ModuleList([ScaleNorm(16), SpheretNorm(16, 1)])
        start = [p.item() for p in module.parameters()]
        stream = io.BytesIO()
        torch.save(module, stream)
        stream.seek(0)
        copies = [
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(stream, weights_only=False),
            nn.ModuleList(copy.copy(part) for part in module),
        ]
        for each in copies:
            torch.optim.SGD(beyond(each), lr=1.0).step()
            assert [p.item() for p in each.parameters()] == start

    def test_a_compiled_step(self):
        module = nn.ModuleList([ScaleNorm(16), SpheretNorm(16, 1)])
        start = [p.item() for p in module.parameters()]
        optimizer = torch.optim.SGD(beyond(module), lr=1.0)
        torch.compiler.reset()
        torch.compile(lambda: optimizer.step(), backend="aot_eager")()
        assert [p.item() for p in module.parameters()] == start

    def test_threads_build_modules_while_others_step(self):
        module, failed = SpheretNorm(16, 1), []
        optimizer = torch.optim.SGD(beyond(module), lr=1.0)
        stop = threading.Event()

        def build():
            while not stop.is_set():
                ScaleNorm(4)

        builder = threading.Thread(target=build)
        builder.start()
        try:
            for _ in range(200):
                optimizer.step()
        except RuntimeError as error:
            failed.append(error)
        finally:
            stop.set()
            builder.join()
        assert not failed


def test_optimisers_are_hooked_once_when_the_first_module_is_made():
    code = """
import spheret.connections
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
print(len(hooks))
kept = spheret.connections.ScaleNorm(4), spheret.connections.ScaleNorm(4)
print(len(hooks))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["0", "1"]


def test_scalars_on_a_bound_are_named():
    model = nn.ModuleDict({"pair": Pair(), "norm": SpheretNorm(8, 1), "enter": ScaleNorm(8)})
    assert on_bound(model) == ["pair.x", "pair.y", "norm.a", "enter.gamma"]
    with torch.no_grad():
        model["pair"].x -= 0.5
        model["pair"].others[0][1:] += 0.5
        model["norm"].a -= 0.5
    assert on_bound(model) == ["pair.y", "enter.gamma"]
    assert on_bound(model["enter"]) == ["gamma"]


class TestClipping:
    def test_outward_gradients_are_left_out(self):
        model = nn.ModuleList([Pair(), nn.Linear(4, 4).double(), SpheretNorm(8, 1, exact_clamp=True).double()])
        pair, free, exact = model
        with torch.no_grad():
            pair.others[0][:4] += 0.5
            # its gradient points outward, and torch.clamp has seen to that already
            exact.a += 0.5
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        # x is on its upper bound, and the rest of y on its lower bound
        pair.x.grad.neg_()
        exact.a.grad.neg_()
        norm = clip_gradients(model, 1.0)
        # 4 of y, 20 of the linear layer, and the one that torch.clamp bounds
        assert norm.item() == pytest.approx(5)
        size = 1 / (5 + 1e-6)
        assert pair.x.grad.item() == 0
        assert pair.others[0].grad.tolist() == pytest.approx([size] * 4 + [0] * 4)
        assert exact.a.grad.item() == pytest.approx(-size)
        assert free.weight.grad.flatten().tolist() == pytest.approx([size] * 16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", MAKERS)
    def test_inward_gradients_pass(self, name, dtype):
        module = MAKERS[name](dtype=dtype)
        parameter = getattr(module, name)
        # without a gradient there is nothing to clip
        clip_gradients(module, 1.0)
        for sign, left in ((1, 1), (-1, 0)):
            parameter.grad = torch.full_like(parameter, sign)
            assert clip_gradients(module, 2.0).item() == left
            assert parameter.grad.item() == left
