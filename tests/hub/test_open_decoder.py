"""What `inspect` and `certify` take of other people's directories, and what they refuse."""

import json
import math
import os

import pytest
import torch
import transformers as t
from saved_decoders import GROUPED, SIZE, build, save
from small_models import randomize

from spheret import GPT, GPTConfig
from spheret.analysis import saved_models
from spheret.cli import main
from spheret.data import cached
from spheret.hub.loading import load_decoder, quietly
from spheret.hub.open import SavedModel, is_saved_model
from spheret.hub.transfer import export
from spheret.runs.run import create_run, open_run

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama, and a run with its export as GPT-2."""
    folder = tmp_path_factory.mktemp("models")
    save(build("llama"), folder / "llama")
    config = GPTConfig(layers=2, heads=2, width=16, block=32, vocab=257, scheme="pre-ln", head_bias="none")
    create_run(folder / "run", randomize(GPT(config)), cached("sotu", "bytes").manifest.tokenizer)
    export(open_run(folder / "run"), folder / "exported", "gpt2")
    return folder


def bare(directory, config, *files):
    directory.mkdir()
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in files:
        (directory / name).write_bytes(b"")


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
WEIGHTS = "model.safetensors"
# the config.json, the other files, and what is said
REFUSED = {
    "pickle": (LLAMA, ["pytorch_model.bin"], "pickles are never read"),
    "gguf": (LLAMA, ["model.gguf"], "holds GGUF (model.gguf), whose weights are quantised"),
    "adapter": (LLAMA, ["adapter_config.json", WEIGHTS], "holds an adapter"),
    "quantised": ({**LLAMA, "quantization_config": {"bits": 4}}, [WEIGHTS], "holds quantised weights"),
    "translator": ({"model_type": "t5", "is_encoder_decoder": True}, [WEIGHTS], "is an encoder with a decoder"),
    "export": ({"model_type": "spheret"}, [WEIGHTS], "make a run of it with spheret import"),
    "damaged": ('{"model_type": ', [WEIGHTS], "is damaged"),
    "list": ("[1]", [WEIGHTS], "it holds no JSON object"),
    "no tokenizer": (LLAMA, [WEIGHTS], "has no tokenizer.json"),
}


@pytest.mark.parametrize("command", ["inspect", "certify"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_loaded(name, command, capsys, tmp_path):
    config, others, sentence = REFUSED[name]
    bare(tmp_path / "model", config, *others)
    assert is_saved_model(tmp_path / "model")
    assert main([command, str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class TestRefused:
    def refused(self, directory, capsys, *words, command="inspect"):
        assert main([command, str(directory), *words]) == 2
        return capsys.readouterr().err

    def with_tokenizer(self, folder, directory, config, *files):
        bare(directory, config, *files)
        (directory / "tokenizer.json").write_bytes((folder / "llama" / "tokenizer.json").read_bytes())
        return directory

    def test_a_model_that_needs_its_own_code(self, folder, capsys, tmp_path):
        config = {
            "model_type": "own",
            "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        }
        model = self.with_tokenizer(folder, tmp_path / "model", config, WEIGHTS)
        (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        (model / WEIGHTS).write_bytes((folder / "llama" / WEIGHTS).read_bytes())
        assert "Code of a model's own is never run" in self.refused(model, capsys)
        assert not (tmp_path / "ran").exists()

    def test_an_encoder(self, folder, capsys, tmp_path):
        config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
        model = self.with_tokenizer(folder, tmp_path / "model", config, WEIGHTS)
        (model / WEIGHTS).write_bytes((folder / "llama" / WEIGHTS).read_bytes())
        assert "is a BertForMaskedLM, which does not predict the next token" in self.refused(model, capsys)

    @pytest.mark.parametrize("part", ["pytorch_model.bin", "../llama/model.safetensors", 3])
    def test_weights_elsewhere(self, folder, capsys, tmp_path, part):
        model = self.with_tokenizer(folder, tmp_path / "model", LLAMA)
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": part}}))
        assert "weights are read only from .safetensors files beside it" in self.refused(model, capsys)

    def test_files_that_are_not_weights(self, folder, capsys, tmp_path):
        model = self.with_tokenizer(folder, tmp_path / "model", {**LLAMA, **SIZE}, WEIGHTS)
        assert "model.safetensors is not a safetensors file" in self.refused(model, capsys)

    def test_a_config_that_does_not_fit(self, folder, capsys, tmp_path):
        config = json.loads((folder / "exported" / "config.json").read_text())
        for name, change, sentence in (
            ("wide", {"n_embd": 24}, "transformers cannot load"),
            ("deep", {"n_layer": 1 << 40}, "has n_layer = 1099511627776, and the weights are"),
            ("many", {"n_head": -1}, "a trial forward pass of GPT2LMHeadModel on 13 tokens failed"),
        ):
            model = self.with_tokenizer(folder, tmp_path / name, {**config, **change})
            (model / WEIGHTS).write_bytes((folder / "exported" / WEIGHTS).read_bytes())
            assert sentence in self.refused(model, capsys)

    def test_weights_that_are_missing(self, capsys, tmp_path):
        with quietly():
            save(t.LlamaModel(t.LlamaConfig(**GROUPED)), tmp_path / "model")
        assert (
            "lacks lm_head.weight, or has it in another shape (1 in all), so that it would be random"
            in self.refused(tmp_path / "model", capsys)
        )

    def test_not_a_number(self, capsys, tmp_path):
        model = build("gpt2")
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight[0, 0] = math.nan
        save(model, tmp_path / "model")
        assert "NaN or infinity in transformer.h.1.mlp.c_fc.weight" in self.refused(tmp_path / "model", capsys)

    def test_a_tokenizer_of_more_tokens(self, capsys, tmp_path):
        save(
            t.LlamaForCausalLM(t.LlamaConfig(**{**GROUPED, "vocab_size": 99, "eos_token_id": 1})), tmp_path / "model"
        )
        assert "has 257 tokens and the model's embedding has 99 rows" in self.refused(tmp_path / "model", capsys)

    def test_words_that_do_not_fit(self, folder, capsys, tmp_path):
        model = folder / "llama"
        assert "leave --step out" in self.refused(model, capsys, "--step", "1")
        assert "leave --step out" in self.refused(model, capsys, "--step", "1", command="certify")
        out = ["--out", str(tmp_path)]
        assert "--data nowhere is neither a file nor" in self.refused(model, capsys, "--data", "nowhere", *out)
        assert "no run directory at" in self.refused(tmp_path / "nothing", capsys)


def test_a_run_is_no_saved_model(folder, tmp_path):
    for recognise in (is_saved_model, saved_models.is_saved_model):
        assert not recognise(folder / "run")
        assert not recognise(tmp_path)
        assert not recognise(tmp_path / "nothing")
        assert recognise(folder / "llama")


def copied(model, directory, **changes):
    """A copy with other values in its config.json."""
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


class TestSizes:
    """Nothing is allocated, and nothing is built for long, because a config.json says so."""

    @pytest.mark.parametrize(
        ("changes", "fact"),
        [
            ({"vocab_size": 10**12}, "TB.* has .*GB"),
            ({"intermediate_size": 10**12}, "TB.* has .*GB"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
            ({"text_config": {"decoder_layers": 10**9}}, "decoder_layers = 1000000000"),
            ({"architectures": 3, "num_attention_heads": None}, "transformers.* model"),
            ({"attention_dropout": None, "hidden_size": "16"}, "transformers.* model"),
        ],
    )
    def test_a_config_that_asks_for_too_much(self, folder, tmp_path, changes, fact):
        saved = SavedModel(copied(folder / "llama", tmp_path / "model", **changes))
        with pytest.raises(ValueError, match=fact):
            load_decoder(saved)

    def test_modules_without_end(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("spheret.hub.loading.MOST_MODULES", 10)
        with pytest.raises(ValueError, match="10 modules"):
            load_decoder(SavedModel(folder / "llama"))
        monkeypatch.undo()
        # nothing counts on
        assert load_decoder(SavedModel(folder / "llama")).config.num_hidden_layers == 2


def test_a_file_does_not_choose_the_kernels(folder, tmp_path):
    changes = {"attn_implementation": "someone/kernels", "experts_implementation": "someone/kernels"}
    model = load_decoder(SavedModel(copied(folder / "llama", tmp_path / "model", **changes)))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", WEIGHTS, INDEX])
def test_pipes_are_refused_or_not_opened(folder, tmp_path, name, capsys):
    model = copied(folder / "llama", tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    code = main(["inspect", str(model), "--windows", "1", "--out", str(tmp_path / "out")])
    # the whole weights are there, and then an index is not asked
    assert code == (0 if name == INDEX else 2)
    assert code == 0 or f"{name} is a pipe, not a file" in capsys.readouterr().err


def test_older_tokenizer_files_do_not_say_their_type(folder, tmp_path):
    model = copied(folder / "llama", tmp_path / "model")
    definition = json.loads((model / "tokenizer.json").read_bytes())
    del definition["model"]["type"]
    (model / "tokenizer.json").write_text(json.dumps(definition))
    assert SavedModel(model).tokenizer.name == "bytes"
    definition["normalizer"] = {"type": "Lowercase"}
    (model / "tokenizer.json").write_text(json.dumps(definition))
    assert SavedModel(model).tokenizer.encode("A").tolist() == [ord("a")]


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', "3", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_not_a_tokenizer(folder, tmp_path, content):
    model = copied(folder / "llama", tmp_path / "model")
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        SavedModel(model).tokenizer  # noqa: B018
