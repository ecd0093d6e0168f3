"""Someone else's files and settings, damaged in ways that their libraries do not check: one sentence, exit code 2.

Every case runs a command in a fork, which a signal ends if it computes or waits for long.
"""

import json
import os
import shutil
from unittest import mock

import forked
import pytest
import torch
import transformers as t
from saved_decoders import build, save
from small_models import randomize

from spheret import GPT, GPTConfig, conversion
from spheret.data.tokenizers import describe, load
from spheret.hub import transfer  # noqa: F401 (imported before the fork, so that no case pays for it)
from spheret.runs.run import create_run

HUGE = 10**9
WEIGHTS = "model.safetensors"
TEXT = "../text.txt"
COMMANDS = {
    "inspect": ["inspect", "model", "--windows", "1", "--data", TEXT, "--out", "out/a"],
    "certify": ["certify", "model", "--tokens", "2", "--sequence", "2", "--data", TEXT, "--out", "out/a"],
    "convert": [
        "convert", "model", "--data", TEXT, "--out", "out/a", "--steps", "1", "--batch-size", "1", "--block", "8",
        "--eval-windows", "1", "--threads", "1", "--quiet",
    ],
    "import": ["import", "model", "--out", "out/a"],
    "export": ["export", "model", "--out", "out/a"],
    "explore": ["explore", "model", "--windows", "1", "--data", TEXT, "--out", "out/a.html"],
    "sample": ["sample", "model", "--tokens", "2"],
}  # fmt: skip


def keys(**changes):
    """Other values in config.json."""

    def damage(model):
        config = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def settings(**changes):
    """Other values in the config.json of a run, in the section of the model."""

    def damage(model):
        config = json.loads((model / "config.json").read_bytes())
        config["model"] |= changes
        (model / "config.json").write_text(json.dumps(config))

    return damage


def tokenizer(**changes):
    def damage(model):
        definition = json.loads((model / "tokenizer.json").read_bytes())
        (model / "tokenizer.json").write_text(json.dumps({**definition, **changes}))

    return damage


def many_dimensions(model):
    data = (model / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [1] * 70 + header[name]["shape"]
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def pipe(name):
    def damage(model):
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return damage


def index(value):
    def damage(model):
        (model / WEIGHTS).unlink()
        (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": value}}))

    return damage


PANIC = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}
NO_WORDS = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "x"}
ENTRY = {"scheme": "proj-spheretnorm", "options": {"model": 1}}
# the model, what is wrong with it, and the commands that meet it
CASES = {
    "a word for a text config": ("llama", keys(text_encoder=3), ("inspect", "certify")),
    "a nested text config": ("llama", keys(text_config={"text_config": {"vocab_size": 3}}), ("inspect", "convert")),
    "dropout 2": ("llama", keys(attention_dropout=2.0), ("convert",)),
    "no dropout": ("llama", keys(attention_dropout=None), ("convert",)),
    "positions as a word": ("llama", keys(max_position_embeddings="many"), ("inspect", "convert")),
    "architectures as a number": ("converted", keys(architectures=3), ("inspect",)),
    "a class of another kind": ("converted", keys(architectures=["BertForMaskedLM"]), ("inspect",)),
    "options that convert has itself": ("converted", keys(spheret=ENTRY), ("inspect",)),
    "a model type in a list": ("llama", keys(model_type=["llama"]), ("inspect", "import")),
    "no heads": ("llama", keys(num_attention_heads=0), ("inspect",)),
    "a vocabulary of fractions": ("gpt2", keys(vocab_size=257.5), ("import", "inspect")),
    "a base of 0": ("llama", keys(rope_parameters={"rope_type": "default", "rope_theta": 0}), ("certify",)),
    "dropout in words": ("gpt2", keys(resid_pdrop="a", attn_pdrop=None), ("import",)),
    "an activation in a list": ("gpt2", keys(activation_function=[1]), ("import", "inspect")),
    "an index of numbers": ("gpt2", index(3), ("import", "inspect", "convert")),
    "70 dimensions": ("gpt2", many_dimensions, ("import", "inspect", "convert")),
    "an expression without its end": ("llama", tokenizer(pre_tokenizer=PANIC), ("inspect",)),
    "no word for what is unknown": ("llama", tokenizer(model=NO_WORDS, added_tokens=[]), ("inspect", "convert")),
    # sizes: nothing is allocated, and nothing is built for long
    "layers of a model": ("llama", keys(num_hidden_layers=HUGE), ("inspect", "convert")),
    "layers of a decoder": ("llama", keys(decoder={"decoder_layers": HUGE}), ("inspect",)),
    "labels": ("llama", keys(num_labels=10**8), ("inspect", "convert")),
    "kinds of attention": ("neo", keys(attention_types=[[["global", "local"], HUGE]]), ("inspect",)),
    "positions": ("gpt2", keys(n_positions=300_000), ("inspect", "convert", "import")),
    "positions beyond memory": ("gpt2", keys(n_positions=10**12), ("inspect", "import")),
    "layers of a run": ("run", settings(layers=HUGE), ("inspect", "explore", "export", "sample", "convert")),
    "the width of a run": ("run", settings(width=2 * HUGE), ("inspect", "export")),
    "positions of a run": ("run", settings(block=10**11), ("explore", "export")),
    # pipes
    "a pipe of settings": ("llama", pipe("generation_config.json"), ("inspect", "convert")),
    "a pipe for a tokenizer": ("gpt2", pipe("tokenizer.json"), ("import", "inspect")),
    "a pipe for weights": ("gpt2", pipe(WEIGHTS), ("import", "convert")),
    "a pipe for the config of a run": ("run", pipe("config.json"), ("inspect", "explore", "export")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models, one of each kind that a case needs."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        save(build(name), folder / name)
    sizes = {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32}
    kinds = [[["global", "local"], 1]]
    torch.manual_seed(0)
    save(t.GPTNeoForCausalLM(t.GPTNeoConfig(**sizes, attention_types=kinds)), folder / "neo")
    model, _ = conversion.convert(build("llama"))
    save(model, folder / "converted")
    config = GPTConfig(layers=2, heads=2, width=16, block=32, vocab=257, scheme="proj-spheretnorm")
    create_run(folder / "run", randomize(GPT(config)), describe(load("bytes")))
    return folder


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Commands in a directory of their own, which holds a copy of the model."""
    root = tmp_path_factory.mktemp("child")
    (root / "text.txt").write_text("some words about a sphere, and more of them. " * 200)
    (root / "stage").mkdir()
    # without a compiler, so that no kernel is built
    with forked.surroundings(root / "cache"), mock.patch.dict(os.environ, {"CC": "no-compiler"}):
        child = forked.Child(root / "stage", root)
        yield child
        child.end()


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name, models, child):
    source, damage, commands = CASES[name]
    for command in commands:
        shutil.copytree(models / source, child.stage / "model")
        (child.stage / "out").mkdir()
        damage(child.stage / "model")
        outcome = child.run(COMMANDS[command])
        shutil.rmtree(child.stage / "model")
        shutil.rmtree(child.stage / "out")
        lines = outcome.errors.strip().splitlines()
        assert outcome.code == 2, (command, outcome)
        assert lines[-1].startswith(f"spheret {command}: "), outcome
        assert lines[-1].endswith("."), outcome
        assert "internal error" not in outcome.errors
        assert not outcome.made, outcome
