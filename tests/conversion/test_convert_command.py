"""`spheret convert`: the exact start has the loss of the original, and what is saved is what was measured."""

import json
import shutil

import pytest
import torch
from saved_decoders import build, save
from scripts import script
from transformers import BertConfig, BertForMaskedLM

import spheret
from spheret import conversion, hub
from spheret.cli import main
from spheret.data import open_data, prepare

WORDS = ("--batch-size", "2", "--block", "16", "--eval-windows", "4", "--threads", "1")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(build("llama"), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def convert(llama, prepared):
    """Run the command."""

    def run(out, *words, model=llama):
        return main(["convert", str(model), "--data", str(prepared), "--out", str(out), *WORDS, *words])

    return run


@pytest.fixture(scope="module")
def converted(convert, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    assert convert(out, "--quiet") == 0
    return out


def losses_of(out):
    return json.loads((out / "convert.json").read_bytes())["losses"]


@torch.no_grad()
def loss_of(model, prepared):
    """The mean over the windows, by the model's own loss."""
    losses = [
        model(input_ids=row[None], labels=row[None]).loss
        for x, y, _ in open_data(prepared).validation(16, 2, 4)
        for row in torch.cat([x, y[:, -1:]], 1)
    ]
    return float(torch.stack(losses).mean())


def test_the_model_is_the_one_that_was_measured(converted, llama, prepared):
    model, losses = hub.load(converted), losses_of(converted)
    # the exact start costs nothing
    assert losses["converted"] == pytest.approx(losses["original"], abs=1e-5)
    assert losses["at t = 1"] != losses["original"]
    assert conversion.position(model) == 0
    assert loss_of(model, prepared) == pytest.approx(losses["converted"], abs=1e-5)
    conversion.anneal(model, 1.0)
    assert loss_of(model, prepared) == pytest.approx(losses["at t = 1"], abs=1e-5)
    for path in llama.glob("tokenizer*"):
        assert (converted / path.name).read_bytes() == path.read_bytes()


def test_the_calibrated_start_of_another_scheme(convert, tmp_path, capsys):
    words = ("--start", "calibrated", "--scheme", "p-spheretnorm", "--set", "p=0.5")
    assert convert(tmp_path / "out", *words) == 0
    losses, printed = losses_of(tmp_path / "out"), capsys.readouterr().out
    assert losses.keys() == {"original", "converted"}
    assert all(f"{loss:.4f}" in printed for loss in losses.values())
    assert conversion.position(hub.load(tmp_path / "out")) == 1


def test_a_run(convert, prepared, tmp_path):
    words = ["--layers", "1", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "2", "--steps", "2"]
    words += ["--set", "evaluation.eval_windows=2", "--threads", "1", "--quiet"]
    assert main(["train", *words, "--scheme", "pre-ln", "--data", str(prepared), "--out", str(tmp_path / "run")]) == 0
    assert convert(tmp_path / "out", "--quiet", model=tmp_path / "run") == 0
    losses = losses_of(tmp_path / "out")
    assert losses["converted"] == pytest.approx(losses["original"], abs=1e-5)
    assert loss_of(hub.load(tmp_path / "out"), prepared) == pytest.approx(losses["converted"], abs=1e-5)


def without_tokenizer(llama, folder):
    shutil.copytree(llama, folder)
    (folder / "tokenizer.json").unlink()


def damaged(llama, folder):
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").write_bytes(b"not a model")


def of_another_kind(llama, folder):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    save(BertForMaskedLM(BertConfig(vocab_size=257, **sizes)), folder)


def converted_already(llama, folder):
    spheret.convert(build("llama"))[0].save_pretrained(folder)


# how the model is made, and a noun of the sentence that refuses it
REFUSED = [
    (without_tokenizer, "tokenizer.json"),
    (damaged, "damaged"),
    (of_another_kind, "BertForMaskedLM"),
    (converted_already, "converted"),
]


@pytest.mark.parametrize(("made", "noun"), REFUSED)
def test_models_that_are_refused(convert, llama, made, noun, tmp_path, capsys):
    made(llama, tmp_path / "model")
    words = () if made is without_tokenizer else ("--tokenizer", "bytes")
    assert convert(tmp_path / "out", "--quiet", *words, model=tmp_path / "model") == 2
    assert noun in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_that_is_refused(convert, tmp_path, capsys):
    files = tmp_path / "short"
    files.mkdir()
    for number in range(8):
        (files / f"{number}.txt").write_text(f"{number}")
    for tokenizer, noun in (("bytes", "window"), ("bpe:260", "bpe:260")):
        data = prepare(str(files), tokenizer, tmp_path / tokenizer.replace(":", ""), val_fraction=0.5).path
        assert convert(tmp_path / "out", "--quiet", "--data", str(data)) == 2
        assert noun in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_fine_tunes_beside_a_control(tmp_path):
    """examples/finetune_converted.py on a small GPT-2 that repeats a sentence."""
    model = save(build("gpt2"), tmp_path / "gpt2")
    text = "some words about a sphere, and more of them. " * 100
    losses = script("examples/finetune_converted.py").finetune(model, text, tmp_path, steps=20, block=32)
    (control, learnt), (start, end) = losses["control"], losses["converted"]
    assert start == pytest.approx(control, abs=1e-5)
    assert learnt < control - 0.1
    assert end < start - 0.1
    assert conversion.position(hub.load(tmp_path / "converted")) == 1
