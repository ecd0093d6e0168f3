"""A converted model goes on to do what the original did: generate, save, checkpoint, compile, train."""

import copy
import itertools
import threading

import pytest
import torch
import transformers as tf
from foreign_models import build, example, output
from torch import nn

import spheret
from spheret.conversion import Annealing, ConversionError, anneal, load, position, steps, trainer_callback, watched

STAGES = (0.0, 0.4, 1.0)


@pytest.fixture(scope="module")
def converted():
    """A Llama in eval mode, its converted copy and a batch. Each test leaves them as they were."""
    original = build("llama")
    return original, spheret.convert(copy.deepcopy(original))[0], example("llama", original)["input_ids"]


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def gradients(model, ids):
    model.zero_grad()
    loss_of(model, ids).backward()
    return {key: p.grad.clone() for key, p in model.named_parameters()}


def test_generation_with_and_without_cache(converted):
    original, model, ids = converted
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    anneal(model, 0.0)
    assert torch.equal(model.generate(ids, **options), original.generate(ids, **options))
    for t in STAGES:
        anneal(model, t)
        assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_gradient_checkpointing(converted):
    _, model, ids = converted
    model = copy.deepcopy(model).train()
    for t in STAGES:
        anneal(model, t)
        truth = gradients(model, ids)
        model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = loss_of(model, ids)
        # another pass before the recomputation, with other lengths
        other = loss_of(model, ids[:1].flip(1))
        loss.backward()
        assert all(torch.allclose(p.grad, truth[key], atol=1e-7) for key, p in model.named_parameters())
        other.backward()
        model.gradient_checkpointing_disable()
    anneal(model, 0.0)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match="reentrant"):
        loss_of(model, ids).backward()


@pytest.mark.parametrize(
    ("t", "backend"),
    [(0.0, "eager"), *(pytest.param(t, "aot_eager", marks=pytest.mark.slow) for t in STAGES)],
)
def test_one_whole_graph_under_compile(converted, t, backend):
    _, model, ids = converted
    anneal(model, t)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    truth = gradients(model, ids)
    model.zero_grad()
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, truth[key], atol=1e-5), key
    model.zero_grad()


def test_saving_and_loading(converted, tmp_path):
    _, model, ids = converted
    anneal(model, 0.25)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = load(tmp_path).eval()
        assert type(again) is type(model)
        assert position(again) == 0.25
        assert torch.equal(output(again, {"input_ids": ids}), output(model, {"input_ids": ids}))
        assert again.config.spheret == model.config.spheret
    plain = tf.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=r"spheret\.conversion\.load"):
        spheret.convert(plain)
    spheret.revert(again)
    again.save_pretrained(tmp_path / "reverted")
    with pytest.raises(ValueError, match="not saved as a converted one"):
        load(tmp_path / "reverted")


def test_copies_and_threads_do_not_disturb_each_other(converted):
    _, model, ids = converted
    anneal(model, 0.0)
    twin = copy.deepcopy(model)
    anneal(twin, 1.0)
    batches = [ids[:1], ids, ids.flip(0), ids.flip(1)]
    with torch.no_grad():
        truth = [output(model, {"input_ids": batch}) for batch in batches]
        assert position(model) == 0
        assert not torch.allclose(output(twin, {"input_ids": ids}), truth[1], atol=1e-3)
    results = {}

    def work(number):
        with torch.no_grad():
            for _ in range(5):
                results[number] = output(model, {"input_ids": batches[number]})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], truth[number]) for number in range(4))


def test_half_precision_rounds_no_more_than_twice(converted):
    original, _, ids = converted
    half = copy.deepcopy(original).to(torch.bfloat16)
    with torch.no_grad():
        truth = output(copy.deepcopy(half).float(), {"input_ids": ids})
        error = float((output(half, {"input_ids": ids}) - truth).abs().mean())
        spheret.convert(half)
        assert all(p.dtype == torch.bfloat16 for p in half.parameters())
        after = output(half, {"input_ids": ids})
        assert after.dtype == torch.bfloat16
        assert float((after - truth).abs().mean()) < 2 * error
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        _, model, _ = converted
        anneal(model, 0.0)
        gap = output(model, {"input_ids": ids}) - output(original, {"input_ids": ids})
        assert float(gap.abs().mean()) < error


def test_frozen_weights_stay_frozen_and_modes_are_kept():
    model = build("gpt2")
    frozen = {key for number, (key, p) in enumerate(model.named_parameters()) if number % 2}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in frozen)
    model.transformer.h[0].train()
    spheret.convert(model)
    assert frozen == {key for key, p in model.named_parameters() if not p.requires_grad}
    assert not model.training
    assert model.transformer.h[0].training
    assert not model.transformer.h[1].training


def test_distributed_data_parallel_finds_every_parameter(converted):
    _, model, ids = converted
    model = copy.deepcopy(model).train()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for t in STAGES:
            anneal(wrapped, t)
            # a parameter without a gradient would make the second pass an error
            for _ in range(2):
                wrapped(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_the_trainer_anneals_resumes_and_decays_only_matrices(converted, tmp_path):
    _, model, ids = converted
    model = copy.deepcopy(model).train()
    anneal(model, 0.0)
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, learning_rate=0.01, weight_decay=0.1, report_to=[], use_cpu=True,
        save_steps=2, per_device_train_batch_size=1, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids] * 2
    trainer = tf.Trainer(model, arguments, train_dataset=data, callbacks=[trainer_callback(steps=4)])
    decaying = set(trainer.get_decay_parameter_names(model))
    assert not [key for key in decaying if ".spheret." in key]
    start = steps(model)[0].alpha.item()
    trainer.train()
    assert position(model) == 1
    assert steps(model)[0].alpha.item() != start
    again, _ = spheret.convert(build("llama").train())
    trainer = tf.Trainer(again, arguments, train_dataset=data, callbacks=[trainer_callback(steps=4)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (key, first), second in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.allclose(first, second, atol=1e-5), key


def test_adapters_of_peft(converted):
    import peft

    original, model, ids = converted
    model = copy.deepcopy(model)
    anneal(model, 0.0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj", "o_proj"], r=2, init_lora_weights=False)
    with torch.no_grad():
        torch.manual_seed(0)
        truth = output(peft.get_peft_model(copy.deepcopy(original), config), {"input_ids": ids})
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config)
        assert torch.allclose(output(adapted, {"input_ids": ids}), truth, atol=1e-4)
        # or the other way round, which also adapts modules that end a branch
        torch.manual_seed(0)
        again, _ = spheret.convert(peft.get_peft_model(copy.deepcopy(original), config))
        assert torch.allclose(output(again, {"input_ids": ids}), truth, atol=1e-4)
    anneal(adapted, 0.5)
    loss_of(adapted, ids).backward()
    assert all(torch.isfinite(p.grad).all() for p in adapted.parameters() if p.requires_grad)


def test_a_schedule_moves_t_and_can_be_saved(converted):
    _, model, _ = converted
    schedule = Annealing(model, steps=4, wait=2)
    seen = [position(model)]
    for _ in range(7):
        schedule.step()
        seen.append(position(model))
    assert seen == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    other = Annealing(model, steps=4, wait=2)
    other.load_state_dict({"done": 4})
    assert (position(model), other.state_dict()) == (0.5, {"done": 4})
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Annealing(model, steps=0)
    for t in (-0.1, 1.1, float("nan"), True):
        with pytest.raises(ValueError, match="from 0, the original, to 1"):
            anneal(model, t)


def test_a_watcher_sees_every_sum(converted):
    _, model, ids = converted
    for t in STAGES:
        anneal(model, t)
        seen = []
        with watched(model, lambda *both, seen=seen: seen.append(both)), torch.no_grad():
            model(input_ids=ids)
        assert [step for step, _ in seen] == steps(model)
        for (_, before), (step, passage) in itertools.pairwise(seen):
            assert torch.allclose(before.after, passage.stream, atol=1e-6)
            assert passage.branch.shape == (3, 12, 32)
            assert torch.allclose(passage.after.norm(dim=-1), step.radius.expand(3, 12), rtol=1e-5)
            assert (passage.ratio is None) == (t == 1)
        model(input_ids=ids)
        assert len(seen) == len(steps(model))


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


@pytest.mark.parametrize("name", ["gpt2", "bart", "vit", "bert", "post-norm encoder"])
def test_dropout_draws_the_numbers_of_the_original(name):
    model = build(name).train()
    inputs = example(name, model)
    with torch.no_grad():
        outputs = []
        for convert in (False, True):
            if convert:
                spheret.convert(model)
            torch.manual_seed(7)
            outputs.append(output(model, inputs))
        model.eval()
        assert not torch.allclose(outputs[0], output(model, inputs), atol=1e-3)
        assert torch.allclose(outputs[0], outputs[1], atol=1e-4)
        spheret.revert(model.train())
        torch.manual_seed(7)
        assert torch.equal(output(model, inputs), outputs[0])
