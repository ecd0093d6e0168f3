"""The one opener of other people's directories: no code, no pickle, no other place."""

import json
import os
import pickle
import shutil

import huggingface_hub
import pytest
from hub_helpers import tiny
from safetensors.torch import load_file, save_file
from saved_decoders import build, save
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub import SpheretForCausalLM
from spheret.hub.open import SavedModel, is_saved_model, load_decoder
from spheret.hub.transfer import KINDS, export, import_
from spheret.runs.run import create_run

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An export of each kind, and a Llama."""
    place, tokenizer = tmp_path_factory.mktemp("saved"), load_tokenizer("bytes")
    run = create_run(place / "run", tiny("pre-ln", vocab=320), describe(tokenizer))
    for kind in KINDS:
        export(run, place / kind, kind)
    save(build("llama"), place / "llama")
    return place


@pytest.fixture(params=KINDS)
def model(request, saved, tmp_path):
    """A copy of an export, to be spoilt."""
    return shutil.copytree(saved / request.param, tmp_path / "model")


@pytest.fixture
def llama(saved, tmp_path):
    return shutil.copytree(saved / "llama", tmp_path / "llama")


def refused(model, capsys, command="import", name=None):
    """The sentence with which a command refuses a model. Nothing is written."""
    out = model.parent / "out"
    capsys.readouterr()
    assert main([command, name or str(model), "--out", str(out)]) == 2
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


def change_config(model, **changes):
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def index(model, name):
    """Replace the weights by an index that says that all of them are in one file."""
    names = load_file(model / WEIGHTS).keys()
    (model / WEIGHTS).unlink()
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))


@pytest.mark.parametrize("name", ["weights.bin", "../weights.safetensors", "{}/weights.safetensors", "", 3])
def test_an_index_leads_to_safetensors_beside_it_only(model, name, capsys):
    mark, name = model.parent / "ran", name.format(model.parent) if isinstance(name, str) else name
    plant_pickle(model / "weights.bin", mark)
    shutil.copy(model / WEIGHTS, model.parent / "weights.safetensors")
    index(model, name)
    assert INDEX in refused(model, capsys)
    assert not mark.exists()


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}', "[" * 200_000])
def test_a_damaged_index(model, content, capsys):
    index(model, "")
    (model / INDEX).write_text(content)
    assert INDEX in refused(model, capsys)


def test_pickles_are_not_read(model, capsys):
    plant_pickle(model / WEIGHTS, model.parent / "ran")
    assert str(model) in refused(model, capsys)
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    assert "pickles" in refused(model, capsys)
    assert not (model.parent / "ran").exists()


def test_a_tensor_of_70_dimensions(model, capsys):
    """A header that safetensors reads, and torch does not."""
    data = (model / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = next(entry for name, entry in header.items() if name != "__metadata__")
    entry["shape"] = [1] * 70 + entry["shape"]
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert str(model) in refused(model, capsys)


def test_an_adapter_does_not_lead_elsewhere(model, capsys):
    """transformers would load the base model that this file names, and the adapter's pickle."""
    config = {"base_model_name_or_path": str(model.parent / "other"), "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(config))
    plant_pickle(model / "adapter_model.bin", model.parent / "ran")
    assert "adapter" in refused(model, capsys)
    assert not (model.parent / "ran").exists()


def test_code_beside_the_weights_does_not_run(model, llama, capsys):
    for place in (model, llama):
        (place / "evil.py").write_text(f"open({str(model.parent / 'ran')!r}, 'w')\n")
        change_config(place, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    import_(model, model.parent / "imported")
    load_decoder(SavedModel(llama))
    change_config(llama, model_type="own")
    assert str(llama) in refused(llama, capsys, "inspect")
    assert not (model.parent / "ran").exists()


def test_a_file_does_not_choose_the_kernels(llama):
    change_config(llama, attn_implementation="someone/kernels", experts_implementation="someone/kernels")
    assert load_decoder(SavedModel(llama)).config._attn_implementation == "eager"


def test_a_model_in_parts(model, capsys):
    whole = load_file(model / WEIGHTS)
    names = sorted(whole)
    parts = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    expected = import_(model, model.parent / "whole").checkpoint().path / WEIGHTS
    index(model, "")
    weight_map = {name: file for file, some in parts.items() for name in some}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert str(model) in refused(model, capsys)
    for file, some in parts.items():
        save_file({name: whole[name] for name in some}, model / file, {"format": "pt"})
    again = import_(model, model.parent / "parts").checkpoint().path / WEIGHTS
    assert again.read_bytes() == expected.read_bytes()


def test_a_name_on_the_hub(saved, tmp_path, capsys, monkeypatch):
    """Here without a network, from what an earlier download left in the cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "hub" / "models--some--model"
    snapshot = shutil.copytree(saved / "gpt2", kept / "snapshots" / "1234")
    (kept / "blobs").mkdir()
    (snapshot / WEIGHTS).rename(kept / "blobs" / "abc")
    (snapshot / WEIGHTS).symlink_to("../../blobs/abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1234")
    run = import_("some/model", tmp_path / "imported")
    assert run.tokenizer().name == "bytes"
    assert run.config.environment.imported == "some/model"
    assert "Hugging Face hub" in refused(tmp_path / "model", capsys, name="some/other")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_in_the_config_changes_no_weight(model, key):
    """transformers would round every weight to it."""
    expected = import_(model, model.parent / "whole").checkpoint().path / WEIGHTS
    change_config(model, **{"dtype": None, key: "bfloat16"})
    again = import_(model, model.parent / "again").checkpoint().path / WEIGHTS
    assert again.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 3, "n_layer": 3}, {"vocab": 999, "vocab_size": 999}, {"layers": "2", "n_layer": "2"},
        {"model_type": ["gpt2"]}, {"architectures": ["BertForMaskedLM"]}, {"heads": 0, "n_head": 0},
        {"vocab": 257.5, "vocab_size": 257.5}, {"activation": [1], "activation_function": [1]},
        {"spheret": {"scheme": "proj-spheretnorm", "options": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_does_not_fit(model, changes, capsys):
    change_config(model, **changes)
    assert str(model) in refused(model, capsys)


def test_sizes_are_compared_before_memory_is_taken(model, llama, capsys, monkeypatch):
    for kind in (GPT2LMHeadModel, SpheretForCausalLM, LlamaForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", lambda *words, **named: pytest.fail("memory was taken"))
    huge = 2_500_000
    change_config(model, width=huge, n_embd=huge)
    assert "numbers" in refused(model, capsys)
    change_config(llama, intermediate_size=huge)
    assert "numbers" in refused(llama, capsys, "inspect")


# changes to a Llama's config.json, and a word of what `inspect` says
NOT_DECODERS = {
    "translator": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
    "encoder": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    "export": ({"model_type": "spheret"}, "spheret import"),
    "no heads": ({"num_attention_heads": 0}, "llama"),
    "positions as a word": ({"max_position_embeddings": "many"}, "llama"),
}


@pytest.mark.parametrize("name", NOT_DECODERS)
def test_what_inspect_does_not_take(name, llama, capsys):
    changes, word = NOT_DECODERS[name]
    change_config(llama, **changes)
    assert word in refused(llama, capsys, "inspect")


def test_a_saved_model_is_no_run(saved, tmp_path):
    assert is_saved_model(saved / "llama")
    assert not is_saved_model(saved / "run")
    assert not is_saved_model(tmp_path / "nothing")


def test_a_tokenizer_in_its_file(llama, capsys):
    path = llama / "tokenizer.json"
    definition = json.loads(path.read_bytes())
    # older files do not say the type
    del definition["model"]["type"]
    path.write_text(json.dumps(definition))
    assert SavedModel(llama).tokenizer.name == "bytes"
    definition["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(definition))
    assert SavedModel(llama).tokenizer.encode("A").tolist() == [ord("a")]
    # an expression without its end is a panic of the library
    panic = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}
    broken = json.dumps({**definition, "pre_tokenizer": panic})
    for content in ("{", "[]", '{"model": 3}', '{"model": {"type": "BPE"}}', broken):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            SavedModel(llama).tokenizer  # noqa: B018
    path.unlink()
    assert "tokenizer.json" in refused(llama, capsys, "inspect")
