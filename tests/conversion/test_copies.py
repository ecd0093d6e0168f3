"""A converted model that was copied, averaged, wrapped or sharded computes with the state that it has, t included."""

import copy

import pytest
import torch
import transformers as tf
from foreign_models import build, example, output
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import spheret
from spheret.conversion import Annealing, anneal, load, position, steps, trainer_callback


@pytest.fixture(scope="module")
def trio():
    """The same converted Llama at t = 0, at 0.4 and at 1, and a batch. No test changes them."""
    model = build("llama")
    inputs = example("llama", model)
    spheret.convert(model)
    models = {t: copy.deepcopy(model) for t in (0.0, 0.4, 1.0)}
    for t, copied in models.items():
        anneal(copied, t)
    return models, inputs


def logits(model, inputs):
    with torch.no_grad():
        return output(model, inputs)


def averaged(model, other):
    """torch's own average after the other model has come in once: it copies the buffers."""
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(other)
    return average


def by_hand(model, other):
    """An exponential moving average with a weight of 1 for the other model, as many write it."""
    average = copy.deepcopy(model)
    for x, y in zip(average.state_dict().values(), other.state_dict().values(), strict=True):
        x.data.mul_(0.0).add_(y.data)
    return average


class Functional:
    def __init__(self, model, other):
        self.model, self.state = model, other.state_dict()

    def __call__(self, **inputs):
        return torch.func.functional_call(self.model, self.state, kwargs=inputs)


@pytest.mark.parametrize("way", [averaged, by_hand, Functional])
@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (0.0, 0.4), (0.4, 1.0), (1.0, 0.0)])
def test_t_is_read_from_where_copies_have_it(trio, way, before, after):
    models, inputs = trio
    truth = logits(models[after], inputs)
    assert torch.equal(logits(way(models[before], models[after]), inputs), truth)
    assert not torch.allclose(logits(models[before], inputs), truth, atol=1e-3)


def test_an_average_between_the_ends_has_the_t_between(trio):
    models, inputs = trio
    average = copy.deepcopy(models[0.0])
    for x, y in zip(average.buffers(), models[1.0].buffers(), strict=True):
        x.lerp_(y, 0.4)
    torch.testing.assert_close(logits(average, inputs), logits(models[0.4], inputs))


def test_an_ensemble_under_vmap(trio):
    models, inputs = trio
    state = torch.func.stack_module_state([models[0.0], models[1.0]])
    ids = inputs["input_ids"]

    def call(parameters, buffers):
        return torch.func.functional_call(models[0.0], (parameters, buffers), kwargs={"input_ids": ids}).logits

    with torch.no_grad():
        ensemble = torch.func.vmap(call)(*state)
    for number, t in enumerate((0.0, 1.0)):
        torch.testing.assert_close(ensemble[number], logits(models[t], inputs), rtol=1e-3, atol=1e-4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, h):
        return h + self.branch(self.norm(h))


def test_a_compiled_graph_whose_t_was_changed_behind_it_raises():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block(), nn.LayerNorm(8)).eval(), torch.randn(2, 3, 8)
    before = model(x)
    spheret.convert(model, example_inputs=x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), before)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(".t"):
                buffer.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"spheret\.conversion\.position"):
        compiled(x)
    assert position(model) == 1
    torch.testing.assert_close(compiled(x), model(x))
    assert not torch.allclose(model(x), before, atol=1e-3)


@pytest.mark.parametrize(("t", "seen"), [(0.0, [0, 0, 0.25, 0.5]), (0.5, [0.5, 0.75, 1, 1]), (1.0, [1, 1, 1, 1])])
def test_a_schedule_goes_on_from_the_model_s_own_t(trio, t, seen):
    model = copy.deepcopy(trio[0][0.4])
    anneal(model, t)
    schedule, positions = Annealing(model, steps=4, wait=1), [position(model)]
    for _ in range(3):
        schedule.step()
        positions.append(position(model))
    assert positions == seen


def test_the_trainer_s_callback_leaves_an_annealed_model_annealed(trio, tmp_path):
    models, inputs = trio
    model = copy.deepcopy(models[1.0]).train()
    data = [{"input_ids": row, "labels": row} for row in inputs["input_ids"]]
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=1,
    )  # fmt: skip
    tf.Trainer(model, arguments, train_dataset=data, callbacks=[trainer_callback(steps=4, wait=1)]).train()
    assert position(model) == 1


@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_peft_saves_the_step_sizes_and_t(trio, t, tmp_path):
    import peft

    models, inputs = trio
    ids = inputs["input_ids"]
    base = copy.deepcopy(models[0.0])
    with torch.no_grad():
        # away from the bound
        steps(base)[0].entry_norm.gamma.fill_(2.0)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spheret"], r=2)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    assert len(steps(model)) == len(steps(base))
    anneal(model, t)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # at t = 0 the step sizes have gradients of zero
    moved = [(a.alpha - b.alpha).item() for a, b in zip(steps(model), steps(base), strict=True)]
    assert all(moved) == (t > 0)
    assert (steps(model)[0].radius != steps(base)[0].radius) == (t > 0)
    assert all(step.radius == steps(model)[0].radius for step in steps(model))
    truth = logits(model, inputs)
    assert not torch.allclose(truth, logits(base, inputs), atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(logits(model, inputs), logits(base, inputs))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert position(again) == pytest.approx(t)
    assert torch.equal(logits(again, inputs), truth)
    merged = again.merge_and_unload()
    assert len(steps(merged)) == len(steps(base))
    torch.testing.assert_close(logits(merged, inputs), truth)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged"), inputs), truth)


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def gradients(model, inputs):
    model.zero_grad()
    (output(model, inputs).float() ** 2).mean().backward()
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).float().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_fsdp2_with_gradient_checkpointing(trio, mesh, t, cast):
    models, inputs = trio
    model = copy.deepcopy(models[t]).train()
    truth = gradients(model, inputs)
    policy = MixedPrecisionPolicy(param_dtype=cast)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if cast is not None:
        truth = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-4, atol=1e-6, msg=name)


CHECKPOINTED = {
    "swin": lambda: tf.SwinModel(
        tf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
    ),
    "mobilevit": lambda: tf.MobileViTModel(
        tf.MobileViTConfig(
            image_size=64, patch_size=2, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
            num_attention_heads=2,
        )
    ),
    "groupvit": lambda: tf.GroupViTVisionModel(
        tf.GroupViTVisionConfig(
            image_size=16, patch_size=4, hidden_size=16, intermediate_size=24, depths=[2, 2, 1], num_hidden_layers=5,
            num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 0], num_attention_heads=2,
        )
    ),
    "timesformer": lambda: tf.TimesformerModel(
        tf.TimesformerConfig(
            image_size=16, patch_size=8, num_frames=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("t", [0.0, 0.4])
def test_gradient_checkpointing_of_layers_inside_of_stages(name, t):
    torch.manual_seed(0)
    model = CHECKPOINTED[name]().eval()
    size = model.config.image_size
    shape = (1, 2, 3, size, size) if name == "timesformer" else (1, 3, size, size)
    inputs = {"pixel_values": torch.randn(shape)}
    spheret.convert(model, example_inputs=inputs)
    anneal(model, t)
    model.train()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.BatchNorm2d)) or "droppath" in type(module).__name__.lower():
            module.eval()

    def found():
        # GroupViT draws
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs)[0].square().mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    truth = found()
    torch.manual_seed(1)
    with torch.no_grad():
        after = model(**inputs)[0]
    model.gradient_checkpointing_enable()
    for key, gradient in found().items():
        torch.testing.assert_close(gradient, truth[key], rtol=1e-3, atol=1e-6, msg=key)
    # recomputation stops early, and leaves nothing behind
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], after)
