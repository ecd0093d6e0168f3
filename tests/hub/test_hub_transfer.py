"""A run exported for transformers and imported again is the same run, bit for bit."""

import pytest
import torch
from damage import full_disk
from hub_helpers import randomize, tiny, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import spheret.hub  # noqa: F401
from spheret import SCHEMES
from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.gpt2 import from_gpt2, to_gpt2
from spheret.hub.tokenizer_files import built_name
from spheret.hub.transfer import export, import_
from spheret.model.head import HEADS
from spheret.runs.run import create_run

TEXTS = ["We the People", "  two  spaces,\n\ttabs", "naïve café 東京 🙂", "don't you'll 1234567", "", "a" * 50]


def make_run(path, model, spec="bytes", texts=()):
    tokenizer = load_tokenizer(spec, texts)
    return create_run(path, model, describe(tokenizer), tokenizer.file)


def assert_same_run(a, b):
    """The same model, weights and tokenizer. A trained tokenizer is named after its file then."""
    assert a.config.model == b.config.model
    assert a.tokenizer().sha256 == b.tokenizer().sha256
    first, second = (run.checkpoint().path / "model.safetensors" for run in (a, b))
    assert first.read_bytes() == second.read_bytes()
    assert a.tokenizer().file == b.tokenizer().file


# options that change what is saved, on top of the table's defaults
VARIANTS = [
    *((name, {"learnable_p": True} if name == "p-spheretnorm" else {}) for name in SCHEMES),
    ("proj-spheretnorm", {"learnable_alpha": False, "alpha": 0.5, "radius": 2.0, "output_init": "full"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_there_and_back(name, options, tmp_path):
    model = tiny(name, vocab=320, scheme_options=options, head_bias="unigram")
    run = make_run(tmp_path / "run", model)
    exported = export(run, tmp_path / "hub")
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert (loaded(tokens()).logits - model(tokens())).abs().max() <= 1e-6
    assert_same_run(run, import_(exported, tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hub", "run"]


@pytest.mark.parametrize("limit", [50, 3000])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(limit, tmp_path, capsys):
    make_run(tmp_path / "run", tiny("pre-ln", vocab=320))
    for command, source, out in (("export", "run", "hub"), ("import", "hub", "back")):
        words = [command, str(tmp_path / source), "--out", str(tmp_path / out)]
        before = sorted(tmp_path.iterdir())
        with full_disk(limit):
            assert main(words) == 2
        assert "run the same command again" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
        assert main(words) == 0


@pytest.mark.parametrize("spec", ["bytes", pytest.param("gpt2", marks=pytest.mark.slow), "bpe:300"])
def test_the_tokenizer_goes_along(spec, tmp_path):
    run = make_run(
        tmp_path / "run", tiny("pre-ln", vocab=50304 if spec == "gpt2" else 320), spec, ["we the people"] * 9
    )
    exported = export(run, tmp_path / "hub")
    # also after transformers has saved it again
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    for folder in (exported, tmp_path / "again"):
        assert built_name((folder / "tokenizer.json").read_bytes()) == (None if spec == "bpe:300" else spec)
    tokenizer, loaded = run.tokenizer(), AutoTokenizer.from_pretrained(exported)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.end_of_text
    assert loaded.model_max_length == 24
    assert_same_run(run, import_(exported, tmp_path / "back"))


class TestGPT2:
    """Against transformers' own GPT-2."""

    def saved(self, path, **changes):
        options = {"vocab_size": 320, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1}
        torch.manual_seed(0)
        model = randomize(GPT2LMHeadModel(GPT2Config(**{**options, "eos_token_id": 1, **changes})))
        model.eval().save_pretrained(path)
        return model

    @pytest.mark.parametrize(
        ("activation", "tied"), [("gelu_new", True), ("gelu", False), ("gelu_pytorch_tanh", True)]
    )
    def test_in_and_out_to_the_bit(self, tmp_path, activation, tied):
        gpt2 = self.saved(tmp_path / "gpt2", activation_function=activation, tie_word_embeddings=tied)
        run = import_(tmp_path / "gpt2", tmp_path / "run", "bytes")
        config = run.model_config
        assert (config.scheme, config.dropout, config.head) == ("pre-ln", 0.1, "tied" if tied else "untied")
        assert config.activation == ("gelu" if activation == "gelu" else "gelu_tanh")
        x = tokens()
        truth = gpt2(x).logits
        assert (run.model()(x) - truth).abs().max() <= 2e-6 * truth.abs().max()
        back = export(run, tmp_path / "back", "gpt2")
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("gpt2", "back"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        stock = AutoModelForCausalLM.from_pretrained(back)
        assert type(stock) is GPT2LMHeadModel
        # gelu_new and gelu_pytorch_tanh are one function, written twice
        close = 1e-6 if activation == "gelu_pytorch_tanh" else 0
        torch.testing.assert_close(stock(x).logits, truth, rtol=close, atol=close)
        assert_same_run(run, import_(back, tmp_path / "again"))

    @pytest.mark.parametrize("head", HEADS)
    def test_every_head(self, head, tmp_path):
        """A shift goes into an untied head. What comes back is untied, and computes the same."""
        model = tiny("pre-ln", vocab=320, head=head)
        run, truth = make_run(tmp_path / "run", model), model(tokens())
        stock = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "hub", "gpt2"))
        assert type(stock) is GPT2LMHeadModel
        close = 1e-6 * truth.abs().max().item()
        torch.testing.assert_close(stock(tokens()).logits, truth, rtol=0, atol=close)
        back = import_(tmp_path / "hub", tmp_path / "back").model()
        assert back.config.head == ("tied" if head == "tied" else "untied")
        torch.testing.assert_close(back(tokens()), truth, rtol=0, atol=close)
        double = model.double()
        stock = to_gpt2(double)
        torch.testing.assert_close(stock(tokens()).logits, double(tokens()), rtol=0, atol=1e-12)
        torch.testing.assert_close(from_gpt2(stock)(tokens()), double(tokens()), rtol=0, atol=1e-12)
        if head != "tied":
            weight = double.shift.fold(double.tokens.weight) if head == "shifted" else double.head.weight
            assert torch.equal(stock.lm_head.weight, weight)

    def test_half_precision_is_widened_exactly(self, tmp_path):
        gpt2 = self.saved(tmp_path / "gpt2")
        gpt2.bfloat16().save_pretrained(tmp_path / "half")
        run = import_(tmp_path / "half", tmp_path / "run", "bytes")
        weight = run.model().tokens.weight
        assert weight.dtype == torch.float32
        assert torch.equal(weight, gpt2.transformer.wte.weight.float())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_inner": 32}, "n_inner = 32"),
            ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
            ({"activation_function": "relu"}, "activation_function .*relu"),
            ({"attn_pdrop": 0.3}, "attn_pdrop"),
        ],
    )
    def test_unsupported_options(self, tmp_path, changes, message):
        self.saved(tmp_path / "gpt2", **changes)
        with pytest.raises(ValueError, match=message):
            import_(tmp_path / "gpt2", tmp_path / "run", "bytes")

    def test_openais_own_file_has_bare_names_and_masks(self, tmp_path):
        gpt2 = self.saved(tmp_path / "gpt2")
        state = load_file(tmp_path / "gpt2" / "model.safetensors")
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
        state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24).tril() for layer in range(2)}
        save_file(state, tmp_path / "gpt2" / "model.safetensors", {"format": "pt"})
        run = import_(tmp_path / "gpt2", tmp_path / "run", "bytes")
        assert torch.equal(run.model().tokens.weight, gpt2.transformer.wte.weight)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"scheme": "peri-ln"}, "peri-ln"),
            ({"scheme_options": {"norm": "rmsnorm"}}, "norm"),
            ({"bias": False}, "biases"),
            ({"head_bias": "zero"}, "head_bias"),
        ],
    )
    def test_models_that_are_not_a_gpt2(self, tmp_path, changes, reason):
        run = make_run(tmp_path / "run", tiny(changes.pop("scheme", "pre-ln"), vocab=320, **changes))
        with pytest.raises(ValueError, match=reason):
            export(run, tmp_path / "hub", "gpt2")
        assert not (tmp_path / "hub").exists()


def test_a_tokenizer_of_more_tokens(tmp_path):
    exported = export(make_run(tmp_path / "run", tiny("pre-ln", vocab=320)), tmp_path / "hub")
    with pytest.raises(ValueError, match="50,257"):
        import_(exported, tmp_path / "back", "gpt2")
