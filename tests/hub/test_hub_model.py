"""SpheretForCausalLM gives what the GPT inside gives, through transformers' own functions and its Trainer."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from hub_helpers import TINY, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from spheret import GPT, SCHEMES, GPTConfig, parameter_groups
from spheret.hub import SpheretConfig, SpheretForCausalLM, to_gpt2
from spheret.model.head import HEADS

OPTIONS = {
    "p-spheretnorm": {"learnable_p": True},
    "geonorm": {"schedule": "constant"},
    "ngpt": {"normalize_weights": False},
}


# a plain stream, the sphere, constrained weights, and several streams
FEW = ("pre-ln", "proj-spheretnorm", "ngpt", "mhc")


def wrapped(scheme, **changes):
    return SpheretForCausalLM.of(tiny(scheme, scheme_options=OPTIONS.get(scheme, {}), **changes)).eval()


# a value other than the default for every option of GPTConfig; an option that is not listed is tested at its default
CHANGED = {
    "layers": 3,
    "heads": 2,
    "width": 16,
    "block": 24,
    "vocab": 50,
    "bias": False,
    "dropout": 0.1,
    "scheme": "p-spheretnorm",
    "scheme_options": {"p": 3.0, "schedule": "harmonic"},
    "activation": "gelu_tanh",
    "head_bias": "zero",
    "recompute": True,
    "head": "untied",
}


class TestConfig:
    def test_every_option_goes_there_and_back(self, tmp_path):
        config = GPTConfig(**CHANGED)
        for option in fields(GPTConfig):
            if option.name in CHANGED:
                assert getattr(config, option.name) != getattr(GPTConfig(), option.name), option.name
        SpheretConfig.of(config).save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model() == config

    def test_names_of_transformers(self):
        config = SpheretConfig.of(GPTConfig(**CHANGED))
        assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (3, 2, 16)
        assert (config.max_position_embeddings, config.vocab_size) == (24, 50)
        config.vocab_size = 64
        assert config.model() == replace(GPTConfig(**CHANGED), vocab=64)
        assert SpheretConfig(num_hidden_layers=5).layers == 5
        assert SpheretConfig(num_key_value_heads=2).kv_heads == 2


@pytest.mark.parametrize("name", SCHEMES)
class TestEveryScheme:
    def test_saved_and_loaded(self, name, tmp_path):
        model = wrapped(name, head_bias="zero")
        model.save_pretrained(tmp_path)
        assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors", ".py"}
        assert isinstance(AutoConfig.from_pretrained(tmp_path), SpheretConfig)
        twin = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert twin.config.model() == model.model.config
        assert (twin(tokens()).logits - model.model(tokens())).abs().max() <= 1e-6
        state = model.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in twin.state_dict().items())

    def test_greedy_generation_is_the_models_own(self, name):
        model = wrapped(name).double()
        prompt = tokens(2, 5)
        # to the end of the context with one scheme
        new = 19 if name == "proj-spheretnorm" else 5
        expected = model.model.generate(prompt, new=new, temperature=0)
        for cache in (True, False):
            generated = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, use_cache=cache
            )
            assert torch.equal(generated, expected)

    def test_a_padded_batch_is_each_row_alone(self, name):
        model = wrapped(name).double()
        lengths = (3, 9, 6)
        rows = [tokens(1, n, seed=n) for n in lengths]
        padded = torch.cat([torch.cat([torch.zeros(1, 9 - r.shape[1]).long(), r], 1) for r in rows])
        mask = torch.stack([(torch.arange(9) >= 9 - n).long() for n in lengths])
        for beams in (1, 3) if name == "proj-spheretnorm" else (1,):
            options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
            together = model.generate(padded, attention_mask=mask, **options)
            for row, generated in zip(rows, together, strict=True):
                alone = model.generate(row, attention_mask=torch.ones_like(row), **options)
                assert torch.equal(alone[0, -5:], generated[-5:])


class TestGeneration:
    def test_a_cache_grows_by_several_tokens(self):
        model = wrapped("geonorm").double()
        x = tokens(2, 12)
        past = model(x[:, :5], use_cache=True).past_key_values
        part = model(x[:, 5:], past_key_values=past, use_cache=True)
        torch.testing.assert_close(part.logits, model(x).logits[:, 5:])
        assert part.past_key_values.get_seq_length() == 12

    def test_beyond_the_context(self):
        model = wrapped("proj-spheretnorm")
        with pytest.raises(ValueError, match=r"\b25\b.*\b24\b"):
            model.generate(tokens(1, 20), attention_mask=torch.ones(1, 20), max_new_tokens=6, do_sample=False)

    def test_logits_to_keep_and_hidden_states(self):
        model = wrapped("proj-spheretnorm")
        full = model(tokens(), output_hidden_states=True)
        torch.testing.assert_close(model(tokens(), logits_to_keep=2).logits, full.logits[:, -2:])
        torch.testing.assert_close(model(tokens(), logits_to_keep=torch.tensor([3])).logits, full.logits[:, 3:4])
        assert len(full.hidden_states) == 3
        assert model(tokens()).hidden_states is None
        torch.testing.assert_close(full.hidden_states[-1], model.model.stream(tokens()))


class TestCitizenship:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["pre-ln", "proj-spheretnorm"])
    def test_compiles_into_one_graph(self, name):
        model = wrapped(name)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = tokens()
        torch.testing.assert_close(compiled(x, use_cache=False).logits, model(x).logits, rtol=1e-5, atol=1e-5)
        loss = compiled(x, labels=x, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(loss, model(x, labels=x).loss, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", FEW)
    def test_gradient_checkpointing_changes_nothing(self, name):
        gradients = []
        for on in (False, True):
            model = wrapped(name).train()
            assert model.is_gradient_checkpointing is False
            if on:
                model.gradient_checkpointing_enable()
                assert model.model.recompute
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            gradients.append([loss, *(p.grad for p in model.parameters())])
            model.gradient_checkpointing_disable()
            assert not model.model.recompute
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    @pytest.mark.parametrize("head", HEADS)
    @pytest.mark.parametrize("name", ["proj-spheretnorm", "ngpt"])
    def test_embeddings_grow_and_shrink(self, name, head):
        model = wrapped(name, head_bias="zero", head=head)
        x = tokens(vocab=40)
        before = model(x).logits
        for size in (53, 48):
            model.resize_token_embeddings(size)
            assert model.config.vocab_size == model.model.config.vocab == size
            assert model(torch.full((1, 3), size - 1)).logits.shape == (1, 3, size)
            # the tokens that it had keep their logits, and the loss has them too
            torch.testing.assert_close(model(x).logits[..., :48], before[..., :48])
            torch.testing.assert_close(
                model.model.token_losses(x, x), F.cross_entropy(model(x).logits.mT, x, reduction="none")
            )

    @pytest.mark.parametrize("mean_resizing", [True, False])
    def test_a_head_of_its_own_is_saved_and_grows(self, mean_resizing, tmp_path):
        model = wrapped("proj-spheretnorm", head="untied")
        assert model.get_output_embeddings() is model.model.head
        assert not model.config.tie_word_embeddings
        own = model.model.head.weight.detach().clone()
        model.resize_token_embeddings(64, mean_resizing=mean_resizing)
        assert torch.equal(model.model.head.weight[: len(own)], own)
        # neither tied again by a save nor by a call
        model.tie_weights()
        model.save_pretrained(tmp_path)
        twin = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert not twin.config.tie_word_embeddings
        assert torch.equal(twin.model.head.weight, model.model.head.weight)
        assert torch.equal(twin(tokens()).logits, model(tokens()).logits)

    def test_an_adapter_learns_and_the_rest_does_not(self):
        peft = pytest.importorskip("peft")
        model = wrapped("proj-spheretnorm")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        config = peft.LoraConfig(r=2, target_modules=["attention.qkv", "mlp.output"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config)
        learning = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=1.0)
        first = adapted(tokens(), labels=tokens()).loss
        first.backward()
        optimizer.step()
        assert adapted(tokens(), labels=tokens()).loss < first
        plain = adapted.unload().state_dict()
        assert all(torch.equal(plain[name], value) for name, value in before.items())


@pytest.fixture(scope="module")
def pair():
    """A pre-ln model and transformers' GPT-2 with the same weights, in float64."""
    model = tiny("pre-ln", activation="gelu_tanh").double()
    gpt2 = to_gpt2(model)
    gpt2.set_attn_implementation("eager")
    return SpheretForCausalLM.of(model).eval(), gpt2


def padded(batch=3, time=8):
    """Ids, and a mask that pads the first row on the left and the last on the right."""
    mask = torch.ones(batch, time, dtype=torch.long)
    mask[0, :3], mask[-1, -2:] = 0, 0
    return tokens(batch, time), mask


class TestEmbeddings:
    @pytest.mark.parametrize("name", FEW)
    def test_they_stand_for_tokens(self, name):
        model = wrapped(name)
        ids, mask = padded()
        embeddings = model.get_input_embeddings()(ids)
        given = model(inputs_embeds=embeddings, attention_mask=mask, labels=ids)
        truth = model(ids, attention_mask=mask, labels=ids)
        assert torch.equal(given.logits, truth.logits)
        assert torch.equal(given.loss, truth.loss)

    def test_one_of_both(self):
        model = wrapped("pre-ln")
        with pytest.raises(ValueError, match="neither"):
            model()
        with pytest.raises(ValueError, match="both"):
            model(tokens(1, 4), inputs_embeds=torch.zeros(1, 4, 16))
        with pytest.raises(ValueError, match=r"16\).*\(1, 4, 8\)"):
            model(inputs_embeds=torch.zeros(1, 4, 8))


class TestStates:
    def test_those_of_gpt2(self, pair):
        ids, mask = padded()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        options = {"attention_mask": mask, "output_hidden_states": True}
        ours, gpt2 = pair[0](ids, **options), pair[1](ids, position_ids=positions, **options)
        assert len(ours.hidden_states) == len(gpt2.hidden_states) == 3
        real = mask.bool()
        for own, truth in zip(ours.hidden_states, gpt2.hidden_states, strict=True):
            torch.testing.assert_close(own[real], truth[real])


def test_a_tuple_instead_of_a_record():
    model, ids = wrapped("proj-spheretnorm"), tokens(1, 6)
    record, plain = model(ids, use_cache=False), model(ids, use_cache=False, return_dict=False)
    assert type(plain) is tuple
    assert [torch.equal(a, b) for a, b in zip(plain, record.to_tuple(), strict=True)] == [True]
    model.config.return_dict = False
    assert type(model(ids)) is tuple


class TestLabels:
    def test_minus_100_is_left_out(self):
        model = wrapped("proj-spheretnorm")
        ids = tokens(2, 8)
        labels = ids.masked_fill(torch.arange(8) < 4, -100)
        truth = F.cross_entropy(model(ids).logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten())
        torch.testing.assert_close(model(ids, labels=labels).loss, truth)

    def test_accumulated_gradients_are_those_of_one_batch(self, tmp_path):
        """Trainer divides by the labels of all micro-batches, although they have different numbers of them."""
        rows = [{"input_ids": row, "labels": row.clone()} for row in tokens(4, 16)]
        for row, kept in zip(rows, (16, 3, 8, 5), strict=True):
            row["labels"][kept:] = -100
        losses = []
        for size, accumulation in ((4, 1), (1, 4)):
            arguments = TrainingArguments(
                output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=size, report_to=[], use_cpu=True,
                gradient_accumulation_steps=accumulation, logging_steps=1, save_strategy="no", disable_tqdm=True,
                learning_rate=1e-2,
            )  # fmt: skip
            trainer = Trainer(wrapped("proj-spheretnorm").train(), arguments, train_dataset=rows)
            trainer.train()
            losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


VARIANTS = [
    *((name, {}) for name in FEW),
    ("p-spheretnorm", {"learnable_p": True}),
    ("proj-spheretnorm", {"inner_norm": True}),
    ("pre-ln", {"norm": "rmsnorm"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_no_scalar_gain_or_bias_decays(name, options, tmp_path):
    config = GPTConfig(**{**TINY, "head_bias": "zero"}, scheme=name, scheme_options=options)
    model = SpheretForCausalLM.of(GPT(config))
    arguments = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments)
    decaying = set(trainer.get_decay_parameter_names(model))
    assert decaying == {key for key, p in model.named_parameters() if p.dim() >= 2}
    groups = trainer.create_optimizer().param_groups
    truth = parameter_groups(model, 0.1)
    for group, own in zip(groups, truth, strict=True):
        assert group["weight_decay"] == own["weight_decay"]
        assert [id(p) for p in group["params"]] == [id(p) for p in own["params"]]


def test_weights_that_a_scheme_constrains_stay_so(tmp_path):
    model = SpheretForCausalLM.of(GPT(GPTConfig(**TINY, scheme="ngpt")))
    gpt = model.model
    before = gpt.tokens.weight.detach().clone()
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, learning_rate=0.1, report_to=[], use_cpu=True, save_strategy="no",
        per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[row] * 6).train()
    assert not torch.allclose(gpt.tokens.weight, before, atol=1e-3)
    reading = [w for b in gpt.each_block() for w in (b.attention.qkv.weight, b.mlp.hidden.weight)]
    writing = [w.mT for b in gpt.each_block() for w in (b.attention.output.weight, b.mlp.output.weight)]
    for weight in (gpt.tokens.weight, *reading, *writing):
        torch.testing.assert_close(weight.norm(dim=-1), torch.ones(len(weight)))
