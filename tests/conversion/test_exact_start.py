"""The exact start: the converted model computes what the original computes, and trains as it does."""

import copy

import pytest
import torch
from foreign_models import DECODERS, KINDS, LAYERS, MODELS, NUMBERS, WIDTH, build, example, output
from torch import nn

import spheret
from spheret.conversion import anneal, position, steps, watched

# how far the outputs may be from the original's: with the norms' eps at 0, and with the models' own eps
CASES = [(0.0, torch.float64, 1e-10), (None, torch.float32, 1e-4)]


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_are_those_of_the_original_and_come_back_to_the_bit(name):
    for eps, dtype, tolerance in CASES:
        model = build(name, dtype, eps)
        inputs = example(name, model)
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        hooks = [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in model.modules()]
        config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
        with torch.no_grad():
            before = output(model, inputs)
            same, report = spheret.convert(model)
            assert same is model
            assert position(model) == 0
            after = output(model, inputs)
            assert float((after - before).abs().max()) <= tolerance * max(1.0, float(before.abs().max())), dtype
            assert name not in DECODERS or torch.equal(after, before)
            assert {row.kind for row in report.converted} == {KINDS[name]}
            assert len(report.converted) == NUMBERS.get(name, 2 * LAYERS)
            # the hooks are what makes it so: without the lengths the outputs are others
            anneal(model, 1.0)
            assert float((output(model, inputs) - before).abs().max()) > 1e-3 * float(before.abs().max())
            assert spheret.revert(model) is model
            assert torch.equal(output(model, inputs), before)
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
        assert config is None or model.config.to_dict() == config
        assert [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in model.modules()] == hooks


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "gemma2", "cohere", "bert"])
def test_the_gradients_are_those_of_the_original(name):
    model = build(name, torch.float64)
    inputs = example(name, model)
    original = copy.deepcopy(model)
    spheret.convert(model)
    for either in (original, model):
        torch.logsumexp(output(either, inputs), -1).square().sum().backward()
    gradients = {key: p.grad for key, p in original.named_parameters()}
    new = set()
    for key, parameter in model.named_parameters():
        if key not in gradients:
            new.add(key)
            # zero, but there: DDP waits for it. The radius changes nothing at t = 0
            assert float(parameter.grad.abs().max()) < 1e-9 * float(inputs["input_ids"].numel())
        elif gradients[key] is not None:
            scale = float(gradients[key].abs().max())
            assert float((parameter.grad - gradients[key]).abs().max()) <= 1e-6 * scale + 1e-12, key
    assert len(new) == len(steps(model)) + 1


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_turns_on_one_sphere(name):
    model = build(name)
    inputs = example(name, model)
    spheret.convert(model)
    for t in (0.0, 0.4, 1.0):
        anneal(model, t)
        records = []
        with watched(model, lambda *both, records=records: records.append(both)), torch.no_grad():
            model(**inputs)
        assert {id(step) for step, _ in records} == {id(step) for step in steps(model)}
        assert all(
            float((one.after.norm(dim=-1) / step.radius.detach() - 1).abs().max()) < 1e-5 for step, one in records
        )
        assert all((one.ratio is None) == (t == 1) for _, one in records)
        model(**inputs)
        assert len(records) == len(steps(model))


def test_the_report_counts_the_turns_beyond_a_half_turn():
    model = build("llama")
    inputs = example("llama", model)
    with torch.no_grad():
        # a branch that undoes the stream: 1 + c < 0 in the first sublayer
        first = model.model.layers[0]
        first.self_attn.v_proj.weight.mul_(-30)
        first.self_attn.o_proj.weight.mul_(30)
        before = output(model, inputs)
        _, report = spheret.convert(model, example_inputs=inputs)
        assert torch.allclose(output(model, inputs), before, atol=1e-4, rtol=1e-4)
    row = report.converted[0]
    assert row.rows == 36
    assert row.beyond_reach >= row.beyond_half_turn > 0
    assert f"{row.beyond_half_turn / 36:.2%}" in str(report)
    for t in (0.5, 1.0):
        anneal(model, t)
        model.zero_grad()
        output(model, inputs).square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


SCHEMES = {name: spheret.scheme(name) for name in spheret.SCHEMES}
SPHERICAL = [
    name
    for name, built in SCHEMES.items()
    if isinstance(built, spheret.connections.Spherical) and not built.branch_norm
]


@pytest.mark.parametrize("name", SPHERICAL)
@pytest.mark.parametrize("options", [{}, {"max_angle": 0.3, "schedule": "harmonic"}, {"learnable_p": True, "p": 0.7}])
def test_every_spherical_scheme_starts_exactly_and_ends_as_itself(name, options):
    model = build("llama", torch.float64)
    inputs = example("llama", model)
    with torch.no_grad():
        before = output(model, inputs)
        _, report = spheret.convert(model, name, example_inputs=inputs, **options)
        assert torch.allclose(output(model, inputs), before, atol=1e-9)
        # there is no gap at either end
        for end, near in ((0.0, 1e-9), (1.0, 1 - 1e-9)):
            anneal(model, end)
            there = output(model, inputs)
            anneal(model, near)
            assert torch.allclose(output(model, inputs), there, atol=1e-6)
    anneal(model, 0.6)
    output(model, inputs).square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    anneal(model, 1.0)
    for number, step in enumerate(steps(model), start=1):
        own = spheret.scheme(name, **options).connect(32, number, 4).retraction_step()
        mine = step.connection.retraction_step()
        assert (mine.factor, mine.max_angle, mine.schedule) == (own.factor, own.max_angle, own.schedule)
        assert float(step.alpha.detach()) == pytest.approx(report.converted[number - 1].alpha)


@pytest.mark.parametrize("start", ["calibrated", "plain"])
def test_the_other_starts_are_the_scheme(start):
    model = build("llama")
    inputs = example("llama", model)
    with torch.no_grad():
        before = output(model, inputs)
        _, report = spheret.convert(model, start=start, batches=[inputs, inputs])
        after = output(model, inputs)
    assert position(model) == 1
    assert report.start == start
    assert report.converted[0].rows == 72
    if start == "plain":
        assert report.converted[0].radius == pytest.approx(WIDTH**0.5)
        assert [row.alpha for row in report.converted] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])
    else:
        plain, _ = spheret.convert(build("llama"), start="plain")
        with torch.no_grad():
            worse = output(plain, inputs)
        assert float((after - before).square().mean()) < 0.3 * float((worse - before).square().mean())
    # and every start can go back to the original
    anneal(model, 0.0)
    with torch.no_grad():
        assert torch.allclose(output(model, inputs), before, atol=1e-4)


def test_the_fit_finds_a_step_size_that_all_rows_share():
    """Where every row has the same length and its branch is orthogonal, one step size is exact."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.swap = nn.RMSNorm(8), nn.Linear(8, 8, bias=False)
            with torch.no_grad():
                # an antisymmetric matrix maps each row to one that is orthogonal to it
                a = torch.randn(8, 8)
                self.swap.weight.copy_(0.3 * (a - a.T))

        def forward(self, h):
            return h + self.swap(self.norm(h))

    torch.manual_seed(0)
    model = nn.Sequential(Turning(), nn.RMSNorm(8))
    x = 2 * nn.functional.normalize(torch.randn(50, 8), dim=-1)
    with torch.no_grad():
        before = model(x)
        _, report = spheret.convert(model, start="calibrated", example_inputs=x)
        assert torch.allclose(model(x), before, atol=1e-4)
    (row,) = report.converted
    assert (row.radius, row.kind) == (pytest.approx(2.0), "pre-norm")
    assert row.alpha == pytest.approx(1.0, rel=1e-4)
