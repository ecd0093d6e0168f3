"""An import reads config.json, tokenizer.json and safetensors of one directory: no pickle, no other place."""

import json
import os
import pickle
import shutil

import huggingface_hub
import pytest
import torch
from hub_helpers import tiny
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.gpt2 import to_gpt2
from spheret.hub.transfer import KINDS, export, import_
from spheret.runs.run import create_run

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An export of each kind."""
    place, tokenizer = tmp_path_factory.mktemp("saved"), load_tokenizer("bytes")
    run = create_run(place / "run", tiny("pre-ln", vocab=320), describe(tokenizer))
    for kind in KINDS:
        export(run, place / kind, kind)
    return place


@pytest.fixture(params=KINDS)
def model(request, saved, tmp_path):
    """A copy of one of them, to be spoilt."""
    return shutil.copytree(saved / request.param, tmp_path / "model")


def refused(model, capsys, name=None):
    """The sentence with which an import is refused. Nothing is written."""
    out = model.parent / "out"
    capsys.readouterr()
    assert main(["import", name or str(model), "--out", str(out)]) == 2
    assert not out.exists()
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    return sentence


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def plant_pickle(path, mark):
    path.write_bytes(pickle.dumps(Bomb(mark)))


class TestPlaces:
    def index(self, model, name):
        """Replace the weights by an index that says that all of them are in one file."""
        names = load_file(model / WEIGHTS).keys()
        (model / WEIGHTS).unlink()
        document = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
        (model / INDEX).write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "name",
        [
            "weights.bin", "../weights.bin", "../weights.safetensors", "{}/weights.safetensors", "sub/a.safetensors",
            ".safetensors", "..safetensors", "a.safetensors\n", "", 3, None,
        ],
    )  # fmt: skip
    def test_an_index_leads_to_safetensors_beside_it_alone(self, model, name, capsys):
        mark, name = model.parent / "ran", name.format(model.parent) if isinstance(name, str) else name
        (model / "sub").mkdir()
        for place in (model, model.parent):
            plant_pickle(place / "weights.bin", mark)
            shutil.copy(model / WEIGHTS, place / "weights.safetensors")
        shutil.copy(model / WEIGHTS, model / "sub" / "a.safetensors")
        self.index(model, name)
        assert "weights are read only from .safetensors files beside it" in refused(model, capsys)
        assert not mark.exists()

    def test_a_pickle_under_the_name_of_weights_is_refused(self, model, capsys):
        plant_pickle(model / WEIGHTS, model.parent / "ran")
        assert "is a pickle, not safetensors" in refused(model, capsys)
        assert not (model.parent / "ran").exists()

    def test_an_adapter_does_not_lead_elsewhere(self, model, saved):
        """transformers would load the base model that this file names, and the adapter's pickle."""
        config = {"base_model_name_or_path": str(model.parent / "other"), "peft_type": "LORA"}
        (model / "adapter_config.json").write_text(json.dumps(config))
        plant_pickle(model / "adapter_model.bin", model.parent / "ran")
        import_(model, model.parent / "out")
        assert not (model.parent / "ran").exists()

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
    def test_no_link_leads_out(self, model, name, capsys):
        (model / name).rename(model.parent / "elsewhere")
        (model / name).symlink_to(model.parent / "elsewhere")
        assert f"{name} is a link out of its directory" in refused(model, capsys)
        (model / name).unlink()
        (model / name).symlink_to("/dev/zero")
        assert f"{name} is a link out of its directory" in refused(model, capsys)

    def test_the_links_of_huggingfaces_cache_are_followed(self, model):
        snapshot = model.parent / "models--a--b" / "snapshots" / "1234"
        (snapshot.parents[1] / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in model.iterdir():
            path.rename(snapshot.parents[1] / "blobs" / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        assert import_(snapshot, model.parent / "out").model_config.scheme == "pre-ln"

    def test_a_model_in_parts(self, model):
        whole = load_file(model / WEIGHTS)
        names = sorted(whole)
        parts = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
        expected = import_(model, model.parent / "whole").checkpoint().path / WEIGHTS
        self.index(model, "")
        for file, some in parts.items():
            save_file({name: whole[name] for name in some}, model / file)
        weight_map = {name: file for file, some in parts.items() for name in some}
        (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        again = import_(model, model.parent / "parts").checkpoint().path / WEIGHTS
        assert again.read_bytes() == expected.read_bytes()

    def test_a_part_that_is_missing(self, model, capsys):
        self.index(model, "model-1-of-1.safetensors")
        assert "has no model-1-of-1.safetensors, which its" in refused(model, capsys)

    @pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', "[" * 200_000])
    def test_a_damaged_index(self, model, index, capsys):
        self.index(model, "")
        (model / INDEX).write_text(index)
        assert "is damaged" in refused(model, capsys)


class TestNames:
    """A name on the hub: here without a network, from what an earlier download left in the cache."""

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch, tmp_path):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))

    def test_one_that_was_fetched(self, model, tmp_path):
        kept = tmp_path / "cache" / "hub" / "models--some--model"
        snapshot = kept / "snapshots" / "1234"
        snapshot.parent.mkdir(parents=True)
        model.rename(snapshot)
        (kept / "blobs").mkdir()
        (snapshot / WEIGHTS).rename(kept / "blobs" / "abc")
        (snapshot / WEIGHTS).symlink_to("../../blobs/abc")
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("1234")
        run = import_("some/model", tmp_path / "out")
        assert run.tokenizer().name == "bytes"
        assert run.config.environment.imported == "some/model"

    def test_one_that_was_not(self, tmp_path, capsys):
        sentence = refused(tmp_path / "model", capsys, "some/model")
        assert "some/model is not a directory on this machine, and could not be loaded from the Hugging" in sentence


class TestContents:
    def change(self, model, change):
        """Change the largest tensor of the last block."""
        state = load_file(model / WEIGHTS)
        name = max((name for name in state if "1.mlp" in name), key=lambda name: state[name].numel())
        state[name] = change(state[name])
        save_file(state, model / WEIGHTS, {"format": "pt"})
        return name

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float64,
                                       torch.float8_e4m3fn, torch.complex64], ids=str)  # fmt: skip
    def test_a_dtype_that_float32_does_not_hold(self, model, dtype, capsys):
        name = self.change(model, lambda tensor: tensor.to(dtype))
        sentence = refused(model, capsys)
        assert f"holds {name} as {str(dtype).removeprefix('torch.')}, and a run holds float32" in sentence

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_numbers_that_are_not_finite(self, model, number, capsys):
        name = self.change(model, lambda tensor: tensor.index_fill(0, torch.tensor([1]), number))
        assert f"holds NaN or infinity in {name}" in refused(model, capsys)

    def test_another_shape(self, model, capsys):
        self.change(model, lambda tensor: tensor.T.contiguous())
        assert "has another shape of" in refused(model, capsys)

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_a_dtype_in_the_config_changes_no_weight(self, model, key):
        """transformers would round every weight to it."""
        expected = import_(model, model.parent / "whole").checkpoint().path / WEIGHTS
        config = json.loads((model / "config.json").read_bytes())
        config.pop("dtype", None)
        (model / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
        again = import_(model, model.parent / "again").checkpoint().path / WEIGHTS
        assert again.read_bytes() == expected.read_bytes()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"quantization_config": {"quant_method": "bitsandbytes"}}, "holds quantised weights"),
            ({"layers": 10**9, "n_layer": 10**9}, "has 1000000000 layers, and the weights are"),
            ({"vocab": 10**9, "vocab_size": 10**9}, "has another shape of"),
            ({"layers": "2", "n_layer": "2"}, "config.json"),
            ({"dropout": [], "resid_pdrop": []}, "does not describe a model"),
            ({"scheme_options": 3, "activation_function": 3}, "does not describe a model"),
            ({"width": 0, "n_embd": 0}, "config.json: width must be a positive integer, got 0"),
            ({"spheret_tokenizer": {"name": "/etc/passwd", "file": False}}, "is not the tokenizer that was exported"),
            ({"spheret_tokenizer": ["bytes"]}, "is not the tokenizer that was exported"),
            ({"model_type": ["gpt2"]}, "and only spheret and gpt2 can be imported"),
        ],
    )
    def test_a_config_that_asks_for_something_else(self, model, changes, message, capsys):
        config = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        assert message in refused(model, capsys)


def test_half_precision_is_widened_exactly(tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=320))
    gpt2.half().save_pretrained(tmp_path / "half")
    again = to_gpt2(import_(tmp_path / "half", tmp_path / "run", "bytes").model())
    assert torch.equal(again.transformer.wte.weight, gpt2.transformer.wte.weight.float())
