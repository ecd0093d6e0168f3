"""The exact start: the converted model computes what the original computes, and trains as it does."""

import copy

import pytest
import torch
from foreign_models import DECODERS, KINDS, LAYERS, MODELS, NUMBERS, build, example, output

import spheret
from spheret.conversion import anneal, position, steps
from spheret.conversion.steps import Hook, Position

# how far the outputs may be from the original's: the norms' eps at 0 in both precisions, and the models' own eps
CASES = [(0.0, torch.float32, 1e-5), (0.0, torch.float64, 1e-10), (None, torch.float32, 1e-4)]


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_are_those_of_the_original_and_come_back_to_the_bit(name):
    for eps, dtype, tolerance in CASES:
        model = build(name, dtype, eps)
        inputs = example(name, model)
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
        with torch.no_grad():
            before = output(model, inputs)
            same, report = spheret.convert(model)
            assert same is model
            assert position(model) == 0
            after = output(model, inputs)
            assert float((after - before).abs().max()) <= tolerance * max(1.0, float(before.abs().max())), (
                eps,
                dtype,
            )
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
        for module in model.modules():
            assert not isinstance(module, Position)
            for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
                assert not isinstance(getattr(hook, "__self__", None), Hook)


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
def test_the_stream_is_on_one_sphere_at_every_t(name):
    model = build(name)
    inputs = example(name, model)
    spheret.convert(model)
    for t in (0.0, 0.4, 1.0):
        anneal(model, t)
        sums = _sums(model, inputs)
        # two norms may read one sum
        assert len(sums) >= len(steps(model))
        for radius, stream in sums:
            assert float((stream.norm(dim=-1) / radius - 1).abs().max()) < 1e-5


def _sums(model, inputs):
    """The stream after each residual sum: what the next reader is given, before its hook."""
    from spheret.conversion.steps import Leave, ReadHook, Step

    sums, handles = [], []
    radii = {id(step.channel): float(step.radius.detach()) for step in steps(model)}

    def watch(module, args, kwargs, hook):
        sums.append(
            (radii[id(hook.place.channel)], args[hook.where] if isinstance(hook.where, int) else kwargs[hook.where])
        )

    for module in list(model.modules()):
        for bound in list(module._forward_pre_hooks.values()):
            hook = getattr(bound, "__self__", None)
            if isinstance(hook, ReadHook) and (isinstance(hook.place, Leave) or not hook.place.first):
                call = lambda module, args, kwargs, hook=hook: watch(module, args, kwargs, hook)  # noqa: E731
                handles.append(module.register_forward_pre_hook(call, with_kwargs=True, prepend=True))
        for bound in list(module._forward_hooks.values()):
            hook = getattr(bound, "__self__", None)
            if type(hook).__name__ == "OutputHook":
                call = lambda module, args, out, hook=hook: sums.append((radii[id(hook.place.channel)], out))  # noqa: E731
                handles.append(module.register_forward_hook(call, prepend=True))
    assert any(isinstance(place, Step) for place in model.modules())
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return [(radius, stream[0] if isinstance(stream, tuple) else stream) for radius, stream in sums]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral", "gemma2", "gemma3", "olmo2"])
def test_after_a_few_hundred_steps_of_training_too(name):
    assert name in DECODERS
    model = build(name).train()
    generator = torch.Generator().manual_seed(0)
    # a language with something to learn: the next token is three times the last one, with noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        rows = [torch.randint(97, (8, 1), generator=generator)]
        for _ in range(15):
            noise = torch.randint(2, (8, 1), generator=generator)
            rows.append((3 * rows[-1] + noise) % 97)
        ids = torch.cat(rows, 1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 3.0
    model.eval()
    with torch.no_grad():
        before = output(model, {"input_ids": ids})
        spheret.convert(model)
        after = output(model, {"input_ids": ids})
        assert float((after - before).abs().max()) < 1e-4 * max(1.0, float(before.abs().max()))
        spheret.revert(model)
        assert torch.equal(output(model, {"input_ids": ids}), before)


SPHERICAL = [name for name in spheret.SCHEMES if isinstance(spheret.scheme(name), spheret.connections.Spherical)]


@pytest.mark.parametrize("name", SPHERICAL)
@pytest.mark.parametrize("options", [{}, {"max_angle": 0.3, "schedule": "harmonic"}, {"learnable_p": True, "p": 0.7}])
def test_every_spherical_scheme_starts_exactly_and_ends_as_itself(name, options):
    model = build("llama", torch.float64)
    inputs = example("llama", model)
    with torch.no_grad():
        before = output(model, inputs)
        _, report = spheret.convert(model, name, example_inputs=inputs, **options)
        assert torch.allclose(output(model, inputs), before, atol=1e-9)
        # a way that leaves no gap at either end
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
