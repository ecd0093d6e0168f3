"""SpheretForCausalLM gives what the GPT inside gives, through transformers' own functions."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from hub_helpers import tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from spheret import SCHEMES, GPTConfig
from spheret.hub import SpheretConfig, SpheretForCausalLM
from spheret.model.head import HEADS

OPTIONS = {
    "p-spheretnorm": {"learnable_p": True},
    "geonorm": {"schedule": "constant"},
    "ngpt": {"normalize_weights": False},
}


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
        expected = model.model.generate(prompt, new=19, temperature=0)
        for cache in (True, False):
            generated = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=19, do_sample=False, use_cache=cache
            )
            assert torch.equal(generated, expected)

    def test_a_padded_batch_is_each_row_alone(self, name):
        model = wrapped(name).double()
        lengths = (3, 9, 6)
        rows = [tokens(1, n, seed=n) for n in lengths]
        padded = torch.cat([torch.cat([torch.zeros(1, 9 - r.shape[1]).long(), r], 1) for r in rows])
        mask = torch.stack([(torch.arange(9) >= 9 - n).long() for n in lengths])
        for how in ({"num_beams": 1}, {"num_beams": 3}):
            options = {"max_new_tokens": 8, "do_sample": False, **how}
            together = model.generate(padded, attention_mask=mask, **options)
            for row, generated in zip(rows, together, strict=True):
                alone = model.generate(row, attention_mask=torch.ones_like(row), **options)
                assert torch.equal(alone[0, -8:], generated[-8:])


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

    @pytest.mark.parametrize("name", SCHEMES)
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
