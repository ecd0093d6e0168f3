"""A converted model goes on to do what the original did: generate, save, checkpoint, compile, copy, shard, train."""

import copy
import threading

import pytest
import torch
import transformers as tf
from foreign_models import LAYERS, WIDTH, build, encoder, example, output
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import spheret
from spheret.conversion import Annealing, ConversionError, anneal, position, steps, trainer_callback
from spheret.hub import load

STAGES = (0.0, 0.4, 1.0)


@pytest.fixture(scope="module")
def llama():
    """A Llama in eval mode and a batch."""
    model = build("llama")
    return model, example("llama", model)


@pytest.fixture(scope="module")
def models(llama):
    """The converted Llama at each t. No test changes them."""
    model, _ = spheret.convert(copy.deepcopy(llama[0]))
    models = {t: copy.deepcopy(model) for t in STAGES}
    for t, copied in models.items():
        anneal(copied, t)
    return models


def logits(model, inputs):
    with torch.no_grad():
        return output(model, inputs)


def gradients(model, inputs):
    model.zero_grad()
    (output(model, inputs).float() ** 2).mean().backward()
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).float().clone()
        for name, p in model.named_parameters()
    }


def assert_close(found, truth, **tolerances):
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, truth[name], msg=name, **{"rtol": 1e-4, "atol": 1e-6, **tolerances})


def test_generation_with_and_without_cache(llama, models):
    original, inputs = llama
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **inputs}
    assert torch.equal(models[0.0].generate(**options), original.generate(**options))
    for model in models.values():
        assert torch.equal(model.generate(**options), model.generate(use_cache=False, **options))


@pytest.mark.parametrize("t", STAGES)
def test_gradient_checkpointing(llama, models, t):
    model, inputs = copy.deepcopy(models[t]).train(), llama[1]
    truth = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    model.zero_grad()
    loss = (output(model, inputs) ** 2).mean()
    # a second pass before the recomputation, with other lengths
    other = output(model, {"input_ids": inputs["input_ids"][:1].flip(1)}).mean()
    loss.backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, truth)
    other.backward()
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_close(gradients(model, inputs), truth)


@pytest.mark.slow
@pytest.mark.parametrize("t", STAGES)
def test_one_whole_graph_under_compile(llama, models, t):
    model, inputs = copy.deepcopy(models[t]), llama[1]
    truth = gradients(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(gradients(compiled, {**inputs, "use_cache": False}), {f"_orig_mod.{k}": x for k, x in truth.items()})


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
    with pytest.raises(RuntimeError, match="position"):
        compiled(x)
    assert position(model) == 1
    torch.testing.assert_close(compiled(x), model(x))
    assert not torch.allclose(model(x), before, atol=1e-3)


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


def functional(model, other):
    state = other.state_dict()
    return lambda **inputs: torch.func.functional_call(model, state, kwargs=inputs)


@pytest.mark.parametrize("way", [averaged, by_hand, functional])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.4), (1.0, 0.0)])
def test_t_is_read_from_where_copies_have_it(llama, models, way, before, after):
    truth = logits(models[after], llama[1])
    assert torch.equal(logits(way(models[before], models[after]), llama[1]), truth)
    assert not torch.allclose(logits(models[before], llama[1]), truth, atol=1e-3)


def test_an_ensemble_under_vmap(llama, models):
    state = torch.func.stack_module_state([models[0.0], models[1.0]])

    def call(parameters, buffers):
        return torch.func.functional_call(models[0.0], (parameters, buffers), kwargs=llama[1]).logits

    with torch.no_grad():
        ensemble = torch.func.vmap(call)(*state)
    for found, t in zip(ensemble, (0.0, 1.0), strict=True):
        torch.testing.assert_close(found, logits(models[t], llama[1]), rtol=1e-3, atol=1e-4)


def test_transformers_alone_loads_no_steps(models, tmp_path):
    models[0.4].save_pretrained(tmp_path)
    plain = tf.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="load"):
        spheret.convert(plain)
    spheret.revert(load(tmp_path)).save_pretrained(tmp_path / "reverted")
    with pytest.raises(ValueError, match="converted"):
        load(tmp_path / "reverted")


def test_threads_do_not_disturb_each_other(llama, models):
    ids = llama[1]["input_ids"]
    batches = [{"input_ids": batch} for batch in (ids[:1], ids, ids.flip(0), ids.flip(1))]
    model, results = models[0.4], {}
    truth = [logits(model, batch) for batch in batches]

    def work(number):
        for _ in range(5):
            results[number] = logits(model, batches[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], truth[number]) for number in range(4))


def test_half_precision_rounds_no_more_than_twice(llama, models):
    original, inputs = llama
    half = copy.deepcopy(original).to(torch.bfloat16)
    truth = logits(copy.deepcopy(half).float(), inputs)
    error = float((logits(half, inputs) - truth).abs().mean())
    spheret.convert(half)
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    after = logits(half, inputs)
    assert after.dtype == torch.bfloat16
    assert float((after - truth).abs().mean()) < 2 * error
    with torch.autocast("cpu", torch.bfloat16):
        assert float((logits(models[0.0], inputs) - logits(original, inputs)).abs().mean()) < error


def test_frozen_weights_stay_frozen_and_modes_are_kept():
    model = build("gpt2")
    frozen = {key for number, (key, p) in enumerate(model.named_parameters()) if number % 2}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in frozen)
    model.transformer.h[0].train()
    spheret.convert(model)
    assert frozen == {key for key, p in model.named_parameters() if not p.requires_grad}
    assert not model.training
    assert [layer.training for layer in model.transformer.h] == [True, False]
    # its embeddings are tied
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("mesh")
def test_distributed_data_parallel_finds_every_parameter(llama, models):
    model = copy.deepcopy(models[0.0]).train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for t in STAGES:
        anneal(wrapped, t)
        # a parameter without a gradient would make the second pass an error
        for _ in range(2):
            output(wrapped, llama[1]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("t", "cast"), [(0.0, None), (0.4, torch.bfloat16), (1.0, None)])
def test_fsdp2_with_gradient_checkpointing(llama, models, mesh, t, cast):
    model, inputs = copy.deepcopy(models[t]).train(), llama[1]
    truth = gradients(model, inputs)
    policy = MixedPrecisionPolicy(param_dtype=cast)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if cast is not None:
        truth = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    assert_close(gradients(model, inputs), truth)


def trainer(model, inputs, folder, **options):
    arguments = tf.TrainingArguments(
        output_dir=str(folder), learning_rate=0.01, weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=1, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in inputs["input_ids"]] * 2
    return tf.Trainer(model, arguments, train_dataset=data, callbacks=[trainer_callback(steps=4)])


def test_the_trainer_anneals_resumes_and_decays_only_matrices(llama, models, tmp_path):
    model = copy.deepcopy(models[0.0]).train()
    own = trainer(model, llama[1], tmp_path, max_steps=4, save_steps=2)
    assert not [key for key in own.get_decay_parameter_names(model) if ".spheret." in key]
    start = steps(model)[0].alpha.item()
    own.train()
    assert position(model) == 1
    assert steps(model)[0].alpha.item() != start
    again = copy.deepcopy(models[0.0]).train()
    trainer(again, llama[1], tmp_path, max_steps=4, save_steps=2).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert_close(dict(model.named_parameters()), dict(again.named_parameters()), atol=1e-5)
    # a model that is annealed stays so
    trainer(again, llama[1], tmp_path / "more", max_steps=2, save_strategy="no").train()
    assert position(again) == 1


def test_adapters_of_peft(llama, models):
    import peft

    (original, inputs), model = llama, copy.deepcopy(models[0.0])
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj", "o_proj"], r=2, init_lora_weights=False)

    def adapted(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)

    truth = logits(adapted(copy.deepcopy(original)), inputs)
    adapted_first = adapted(model)
    assert torch.allclose(logits(adapted_first, inputs), truth, atol=1e-4)
    # or the other way round, which also adapts modules that end a branch
    converted_last, _ = spheret.convert(adapted(copy.deepcopy(original)))
    assert torch.allclose(logits(converted_last, inputs), truth, atol=1e-4)
    anneal(adapted_first, 0.5)
    output(adapted_first, inputs).mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in adapted_first.parameters() if p.requires_grad)


@pytest.mark.parametrize("t", STAGES)
def test_peft_saves_the_step_sizes_and_t(llama, models, t, tmp_path):
    import peft

    inputs, base = llama[1], copy.deepcopy(models[0.0])
    ids = inputs["input_ids"]
    with torch.no_grad():
        # away from the bound
        steps(base)[0].entry_norm.gamma.fill_(2.0)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spheret"], r=2)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    assert len(steps(model)) == len(steps(base))
    anneal(model, t)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
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
    torch.testing.assert_close(logits(merged, inputs), truth)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged"), inputs), truth)


# from each t: where a schedule of 4 steps is, step by step
@pytest.mark.parametrize(("t", "seen"), [(0.0, [0, 0.25, 0.5, 0.75]), (0.5, [0.5, 0.75, 1, 1])])
def test_a_schedule_goes_on_from_the_model_s_own_t(models, t, seen):
    model = copy.deepcopy(models[0.4])
    anneal(model, t)
    schedule, positions = Annealing(model, steps=4), [position(model)]
    for _ in range(3):
        schedule.step()
        positions.append(position(model))
    assert positions == seen
    schedule.load_state_dict({"done": 2})
    assert (position(model), schedule.state_dict()) == (0.5, {"done": 2})


def test_padded_batches_of_torch_s_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x, padding = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=padding)
        spheret.convert(encoder)
        assert torch.allclose(encoder(x, src_key_padding_mask=padding)[~padding], before[~padding], atol=1e-5)
        spheret.revert(encoder)
        assert torch.equal(encoder(x, src_key_padding_mask=padding), before)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_s_causal_mask(norm_first):
    """Its entries are 0 and -inf."""
    model, x = encoder(norm_first=norm_first).eval(), torch.randn(2, 7, WIDTH)
    inputs = {"src": x, "mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True}
    before = model(**inputs)
    _, report = spheret.convert(model, example_inputs=inputs)
    assert (len(report.converted), report.left) == (2 * LAYERS, ())
    assert torch.allclose(model(**inputs), before, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bart", "vit", "bert", "post-norm encoder"])
def test_dropout_draws_the_numbers_of_the_original(name):
    model = build(name).train()
    inputs = example(name, model)

    def drawn():
        torch.manual_seed(7)
        return logits(model, inputs)

    before = drawn()
    spheret.convert(model)
    assert torch.allclose(drawn(), before, atol=1e-4)
    assert not torch.allclose(logits(model.eval(), inputs), before, atol=1e-3)
    spheret.revert(model.train())
    assert torch.equal(drawn(), before)
