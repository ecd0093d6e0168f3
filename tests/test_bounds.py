"""Both bounded scalars start on their upper bound, beyond which torch.clamp has no gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from spheret import ScaleNorm, SpheretNorm
from spheret.bounds import bounded_softplus, inverse_softplus, stop_outward
from spheret.optim import stop_outward_gradients, sum_bounded_gradients

MAKERS = {
    "a": lambda **options: SpheretNorm(16, 1, **options),
    "gamma": lambda **options: ScaleNorm(16, **options),
}
VALUES = {"a": lambda m: m.alpha, "gamma": lambda m: m.radius}


def push(module, name, up):
    """One plain gradient step that raises (or lowers) the scalar's value."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    optimizer.zero_grad()
    (VALUES[name](module).sum() * (-1 if up else 1)).backward()
    optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_an_inward_gradient_brings_it_back_from_beyond_the_bound(name):
    module = MAKERS[name]()
    parameter, start = getattr(module, name), VALUES[name](module).item()
    with torch.no_grad():
        parameter.add_(0.3)
    assert VALUES[name](module).item() == pytest.approx(start)
    above = parameter.item()
    push(module, name, up=True)
    assert parameter.item() == above
    for _ in range(3):
        push(module, name, up=False)
    assert parameter.item() < above
    assert VALUES[name](module).item() < start


@pytest.mark.parametrize("name", MAKERS)
def test_exact_clamp_is_dead_there(name):
    module = MAKERS[name](exact_clamp=True)
    parameter = getattr(module, name)
    with torch.no_grad():
        parameter.add_(0.3)
    before = parameter.item()
    for up in (True, False):
        push(module, name, up)
    assert parameter.item() == before


def test_the_lower_bound_works_the_same_way():
    norm = ScaleNorm(16)
    with torch.no_grad():
        norm.gamma.fill_(-3.0)
    assert norm.radius.item() == 1
    push(norm, "gamma", up=False)
    assert norm.gamma.item() == -3
    push(norm, "gamma", up=True)
    assert norm.gamma.item() > -3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 48, 64, 112, 208, 384, 400, 768, 1280])
def test_alive_at_step_0(width, dtype):
    norm, update = ScaleNorm(width).to(dtype), SpheretNorm(width, 1).to(dtype)
    norm.radius.sum().backward()
    update.alpha.sum().backward()
    assert norm.gamma.grad.item() > 0.7
    assert update.a.grad.item() > 0.6
    assert norm.radius.item() == pytest.approx(math.sqrt(width), rel=5e-3)
    assert update.alpha.item() == pytest.approx(1, rel=5e-3)


@given(st.floats(-30, 30), st.floats(-2, 2), st.booleans())
def test_values_are_clamps_and_only_the_outward_gradient_stops(x, g, exact):
    free = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    plain = free.detach().clone().requires_grad_()
    y = bounded_softplus(free, 1.0, 4.0, exact)
    truth = torch.clamp(F.softplus(plain), 1.0, 4.0)
    assert torch.equal(y, truth)
    y.backward(torch.tensor([g], dtype=torch.float64))
    truth.backward(torch.tensor([g], dtype=torch.float64))
    soft = F.softplus(free.detach()).item()
    inside = 1 < soft < 4
    if exact:
        assert torch.equal(free.grad, plain.grad)
    elif inside:
        assert free.grad.item() == pytest.approx(plain.grad.item(), rel=1e-13)
    else:
        passes = (soft >= 4 and g > 0) or (soft <= 1 and g < 0)
        assert free.grad.item() == pytest.approx(g * torch.sigmoid(free.detach()).item() if passes else 0)


def test_transforms():
    x = torch.tensor([-3.0, 0.8, 9.0], dtype=torch.float64, requires_grad=True)

    def value(x):
        return bounded_softplus(x, 0.1, 4.0)

    assert torch.autograd.gradcheck(lambda x: value(x)[1:2], (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: value(x)[1:2], (x,))
    assert torch.equal(torch.func.vmap(value)(x), value(x))
    for backend in ("aot_eager",):
        compiled = torch.compile(value, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), value(x))
    tangent = torch.func.jvp(value, (x.detach(),), (torch.ones(3, dtype=torch.float64),))[1]
    # one-sided directional derivatives: moving up is possible from below, not beyond the upper bound
    assert tangent[0] > 0
    assert tangent[2] == 0


@pytest.mark.parametrize("y", [1e-6, 0.1, 1.0, 5.0, 19.9, 20.0, 35.8])
def test_inverse_softplus(y):
    assert F.softplus(torch.tensor(inverse_softplus(y), dtype=torch.float64)).item() == pytest.approx(y, rel=1e-8)


@pytest.mark.parametrize("exact_clamp", [False, True])
def test_micro_batches_add_up_to_their_batch(exact_clamp):
    torch.manual_seed(0)
    h, f = torch.randn(64, 8, dtype=torch.float64), torch.randn(64, 8, dtype=torch.float64)
    target = torch.randn(64, 8, dtype=torch.float64)

    def gradients(parts):
        enter, update = ScaleNorm(8, exact_clamp).double(), SpheretNorm(8, 1, exact_clamp=exact_clamp).double()
        model = torch.nn.ModuleList([enter, update])
        sum_bounded_gradients(model)
        for a, b, c in zip(*(x.chunk(parts) for x in (h, f, target)), strict=True):
            (update(enter(a), b) * c).sum().backward()
        stop_outward_gradients(model)
        return torch.stack([enter.gamma.grad, update.a.grad])

    whole = gradients(1)
    assert torch.allclose(gradients(16), whole, rtol=1e-12)
    # without micro-batches it is the plain gradient
    enter, update = ScaleNorm(8, exact_clamp).double(), SpheretNorm(8, 1, exact_clamp=exact_clamp).double()
    (update(enter(h), f) * target).sum().backward()
    assert torch.allclose(torch.stack([enter.gamma.grad, update.a.grad]), whole, rtol=1e-12)


@given(st.floats(-4, 4), st.floats(-2, 2))
def test_the_sum_stops_what_a_single_backward_stops(x, g):
    x = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    bounded_softplus(x, 0.2, 1.0).mul(g).sum().backward()
    stopped, x.grad = x.grad, None
    bounded_softplus(x, 0.2, 1.0, passing=True).mul(g).sum().backward()
    assert torch.allclose(stop_outward(x.detach(), x.grad, 0.2, 1.0), stopped)
