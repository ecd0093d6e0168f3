"""`spheret convert`: same loss at the start, same batches for both models, and a kill changes no bit."""

import json
import shutil

import pytest
import torch
from scripts import script
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from spheret import conversion, hub
from spheret.cli import main
from spheret.conversion.command import convert as command
from spheret.conversion.command.convert_json import CONVERSIONS
from spheret.conversion.command.subject import open_subject
from spheret.conversion.command.training import FineTuning, rate, validation_loss
from spheret.data import open_data, prepare
from spheret.hub.tokenizer_files import write_tokenizer
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import tensors
from spheret.runs.run import create_run
from spheret.runs.tensors import lazy_tensor
from spheret.support.meter import Meter

STEPS = 6
WORDS = (
    "--steps", str(STEPS), "--anneal", "3", "--eval-every", "2", "--lr", "3e-3", "--batch-size", "2", "--block", "16",
    "--eval-windows", "4", "--threads", "1",
)  # fmt: skip


def save(model, directory, data):
    model.save_pretrained(directory)
    write_tokenizer(directory, data.manifest.tokenizer, None, 32)
    return directory


@pytest.fixture(scope="module")
def data(prepared):
    return open_data(prepared)


@pytest.fixture(scope="module")
def llama(data, tmp_path_factory):
    """A Llama with dropout, so that the masks count too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=32, attention_dropout=0.1, **sizes)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("models") / "llama", data)


@pytest.fixture(scope="module")
def convert(llama, prepared):
    """Run the command."""

    def run(out, *words, model=llama):
        return main(["convert", str(model), "--data", str(prepared), "--out", str(out), *WORDS, *words])

    return run


@pytest.fixture(scope="module")
def converted(convert, tmp_path_factory):
    """A finished conversion."""
    out = tmp_path_factory.mktemp("converted") / "out"
    assert convert(out, "--quiet") == 0
    return out


def record_of(out):
    return CONVERSIONS.read(out / "convert.json")


class TestTheLosses:
    def test_the_exact_start_costs_nothing(self, converted):
        record = record_of(converted)
        assert record.starts.exact == pytest.approx(record.starts.original, abs=1e-5)
        assert record.converted.evaluations[0].loss == record.starts.exact
        assert record.control.evaluations[0].loss == record.starts.original
        assert {record.starts.calibrated, record.starts.plain}.isdisjoint({record.starts.original})

    def test_both_see_the_same_batches(self, converted):
        record = record_of(converted)
        # at t = 0 both compute the same, dropout included
        assert record.converted.losses[0] == pytest.approx(record.control.losses[0], abs=1e-5)
        assert len(set(record.control.losses)) == STEPS

    def test_t_moves_and_stays(self, converted):
        record = record_of(converted)
        assert [each.t for each in record.converted.evaluations] == [0.0, pytest.approx(2 / 3), 1.0, 1.0]
        assert [each.step for each in record.control.evaluations] == [0, 2, 4, 6]
        assert {each.t for each in record.control.evaluations} == {None}

    def test_both_learn(self, converted):
        record = record_of(converted)
        assert record.control.last < record.starts.original - 0.05
        assert record.converted.last < record.starts.original - 0.05

    def test_step_sizes_learn(self, converted):
        assert all(row.alpha_after != row.alpha for row in record_of(converted).sublayers)


class TestWhatIsWritten:
    def test_the_model_is_the_one_that_was_measured(self, converted, data):
        model = hub.load(converted)
        record = record_of(converted)
        assert conversion.position(model) == 1
        loss = validation_loss(model, data, record.settings, torch.device("cpu"))
        assert loss == pytest.approx(record.converted.last, abs=1e-6)

    def test_its_tokenizer_goes_along(self, converted, llama):
        assert (converted / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()

    def test_the_page(self, converted):
        page = (converted / "report" / "report.html").read_text()
        record = record_of(converted)
        for loss in (record.starts.original, record.starts.plain, record.control.last, record.converted.last):
            assert f"{loss:.4f}" in page
        assert page.count("<svg") == 2
        assert "http://" not in page.replace("http://www.w3.org", "")

    def test_no_checkpoint_is_left(self, converted):
        assert not (converted / "checkpoints").exists()

    def test_finished_is_finished(self, convert, converted, capsys, monkeypatch):
        monkeypatch.setattr(FineTuning, "_update", lambda self: pytest.fail("it trained again"))
        assert convert(converted) == 0
        assert f"converted   {record_of(converted).converted.last:.4f}" in capsys.readouterr().out


def test_a_kill_changes_no_bit(convert, converted, tmp_path, monkeypatch):
    shown = Meter.show

    def stopping(stop):
        count = iter(range(100))

        def show(self, *words, **more):
            if next(count) == stop:
                raise KeyboardInterrupt
            shown(self, *words, **more)

        return show

    out = tmp_path / "out"
    # before the starts, in the control, in the converted model twice, and before the model is saved
    for stop in (0, 3, 4, 3, 1):
        with monkeypatch.context() as patch:
            patch.setattr(Meter, "show", stopping(stop))
            assert convert(out, "--quiet") == 130
    assert convert(out, "--quiet") == 0
    for name in ("convert.json", "model.safetensors", "report/report.html"):
        assert (out / name).read_bytes() == (converted / name).read_bytes(), name


def test_damaged_checkpoints_are_trained_again(convert, converted, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(command, "_save_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert convert(out, "--quiet") == 130
    saved = out / "checkpoints" / "converted"
    for step in (4, 6):
        with (saved / f"step-{step}" / "model.safetensors").open("r+b") as file:
            file.truncate(100)
    assert convert(out, "--quiet") == 0
    assert "this fine-tuning starts again" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_the_calibrated_start(convert, tmp_path):
    assert convert(tmp_path / "out", "--start", "calibrated", "--anneal", "0", "--quiet") == 0
    record = record_of(tmp_path / "out")
    assert record.converted.evaluations[0].loss == record.starts.calibrated
    assert {each.t for each in record.converted.evaluations} == {1.0}


def test_a_run(convert, prepared, tmp_path):
    words = ["--layers", "1", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "2", "--steps", "2"]
    words += ["--eval-windows", "2", "--threads", "1", "--no-tensorboard", "--quiet", "--scheme", "pre-ln"]
    assert main(["train", *words, "--data", str(prepared), "--out", str(tmp_path / "run")]) == 0
    assert convert(tmp_path / "out", "--quiet", model=tmp_path / "run") == 0
    record = record_of(tmp_path / "out")
    assert record.architecture == "SpheretForCausalLM"
    assert record.starts.exact == pytest.approx(record.starts.original, abs=1e-5)
    loaded = hub.load(tmp_path / "out")
    loss = validation_loss(loaded, open_data(prepared), record.settings, torch.device("cpu"))
    assert loss == pytest.approx(record.converted.last, abs=1e-6)


def test_the_rate(converted):
    settings = record_of(converted).settings
    settings.steps, settings.anneal = 100, 60
    rates = [rate(step, settings) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[4:61]) == {1.0}
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert 0.1 < rates[-1] < 0.13


def test_the_page_has_what_was_measured():
    """The table of the docs is the one that its script makes of benchmarks/convert/."""
    results = script("benchmarks/convert_results.py")
    records = results.read(results.FOLDER)
    assert records
    assert all(record.finished for group in records.values() for record in group)
    assert results.page(results.PAGE.read_text(), records) == results.PAGE.read_text()


class TestBadInput:
    @pytest.fixture
    def refused(self, convert, tmp_path, capsys):
        def run(*words, model=None, out=None):
            chosen = {} if model is None else {"model": model}
            before = sorted(tmp_path.rglob("*"))
            capsys.readouterr()
            assert convert(out or tmp_path / "refused", *words, "--quiet", **chosen) == 2
            assert sorted(tmp_path.rglob("*")) == before
            (line,) = capsys.readouterr().err.strip().splitlines()
            return line

        return run

    def test_no_such_model(self, refused, tmp_path):
        assert "there is nothing at" in refused(model=tmp_path / "missing" / "model")
        (tmp_path / "empty").mkdir()
        assert "has no config.json" in refused(model=tmp_path / "empty")

    def test_no_tokenizer(self, refused, llama, tmp_path):
        copy = shutil.copytree(llama, tmp_path / "copy")
        (copy / "tokenizer.json").unlink()
        assert "has no tokenizer.json" in refused(model=copy)

    def test_another_tokenizer(self, refused):
        assert "has 50257 tokens" in refused("--tokenizer", "gpt2")

    def test_pickles_and_adapters(self, refused, llama, tmp_path):
        copy = shutil.copytree(llama, tmp_path / "copy")
        (copy / "adapter_config.json").write_text("{}")
        assert "adapter of PEFT" in refused(model=copy)
        (copy / "adapter_config.json").unlink()
        (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
        assert "pickles are never read" in refused(model=copy)

    def test_half_a_model(self, refused, llama, tmp_path):
        copy = shutil.copytree(llama, tmp_path / "copy")
        # they are mapped from the file, which is about to change
        weights = {name: tensor.clone() for name, tensor in tensors.each(copy / "model.safetensors")}
        name = next(name for name in weights if "down_proj" in name)
        whole = [lazy_tensor(each, tensor) for each, tensor in weights.items()]
        tensors.write(copy / "model.safetensors", [each for each in whole if each.name != name])
        assert f"lacks {name}" in refused(model=copy)
        weights[name].fill_(torch.nan)
        tensors.write(copy / "model.safetensors", whole)
        assert "is not finite" in refused(model=copy)
        (copy / "model.safetensors").write_bytes(b"not a model")
        assert "is not a safetensors file" in refused(model=copy)

    def test_a_model_of_another_kind(self, refused, data, tmp_path):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        path = save(BertForMaskedLM(BertConfig(vocab_size=257, **sizes)), tmp_path / "bert", data)
        assert "is a BertForMaskedLM" in refused(model=path)

    def test_converted_already(self, refused, converted):
        assert "is converted already" in refused(model=converted)

    def test_a_scheme_without_a_sphere(self, refused):
        assert "which pre-ln does not" in refused("--scheme", "pre-ln")

    def test_numbers(self, refused):
        assert "at most 32" in refused("--block", "64")
        assert "--anneal must lie between 1 and the 6 steps" in refused("--anneal", "7")
        assert "is there already" in refused("--start", "plain")
        assert "unknown start" in refused("--start", "warm")

    def test_too_little_text(self, refused, tmp_path):
        (tmp_path / "short").mkdir()
        for number in range(8):
            (tmp_path / "short" / f"{number}.txt").write_text(f"{number}")
        short = prepare(str(tmp_path / "short"), "bytes", tmp_path / "prepared", val_fraction=0.5).path
        assert "fewer than one window" in refused("--data", str(short))

    def test_other_files(self, refused, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").touch()
        assert "holds 'notes.txt'" in refused(out=tmp_path / "full")

    def test_another_conversion(self, refused, converted):
        before = (converted / "convert.json").read_bytes()
        assert "these differ: seed (0 there, 1 asked)" in refused("--seed", "1", out=converted)
        assert (converted / "convert.json").read_bytes() == before


def test_text_gets_the_models_own_ids(llama, data, tmp_path):
    """A tokenizer.json of bytes is our `bytes`; any other file is taken as it is."""
    assert open_subject(str(llama), None).spec == "bytes"
    copy = shutil.copytree(llama, tmp_path / "copy")
    definition = json.loads((copy / "tokenizer.json").read_text())
    definition["normalizer"] = {"type": "Lowercase"}
    (copy / "tokenizer.json").write_text(json.dumps(definition))
    subject = open_subject(str(copy), None)
    assert subject.spec == str(copy / "tokenizer.json")
    assert subject.tokenizer.encode("A").tolist() == [ord("a")]


def test_a_model_that_changes_meanwhile_is_noticed(llama, tmp_path):
    """Each fine-tuning opens the files again."""
    copy = shutil.copytree(llama, tmp_path / "copy")
    subject = open_subject(str(copy), None)
    assert subject.load() is not None
    with (copy / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="has changed since this conversion began"):
        subject.load()


@pytest.fixture
def out(converted, tmp_path):
    """A finished conversion that may be changed."""
    return shutil.copytree(converted, tmp_path / "out")


def test_two_at_once_do_not_mix(convert, converted, tmp_path, capsys, monkeypatch):
    """The other one ends its conversion after this one has looked, and before this one has the lock."""
    out, keep = tmp_path / "out", command.keep_freed_memory

    def meanwhile():
        shutil.copytree(converted, out)
        keep()

    monkeypatch.setattr(command, "keep_freed_memory", meanwhile)
    assert convert(out, "--seed", "7", "--quiet") == 2
    assert "these differ: seed (0 there, 7 asked)" in capsys.readouterr().err
    for name in ("convert.json", "model.safetensors", "report/report.html"):
        assert (out / name).read_bytes() == (converted / name).read_bytes()


def test_a_run_that_changes_meanwhile_is_noticed(prepared, tmp_path):
    tokenizer = open_data(prepared).manifest.tokenizer
    config = GPTConfig(layers=1, heads=1, width=8, block=16, vocab=257, scheme="pre-ln")
    create_run(tmp_path / "run", GPT(config), tokenizer)
    subject = open_subject(str(tmp_path / "run"), None)
    assert subject.load() is not None
    torch.manual_seed(1)
    create_run(tmp_path / "other", GPT(config), tokenizer)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="has changed since this conversion began"):
        subject.load()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_is_lost_is_not_said_to_be_there(convert, out, capsys, name):
    (out / name).unlink()
    assert convert(out, "--quiet") == 2
    assert f"lost its model ({out} has no {name}" in capsys.readouterr().err


def test_what_a_kill_left_is_removed_and_nothing_else(convert, converted, out):
    remains = out / "checkpoints"
    for name in ("control/step-1", "converted/step-1", ".model"):
        (remains / name).mkdir(parents=True)
        (remains / name / "model.safetensors").touch()
    (out / ".convert.json.0123456789abcdef.tmp").touch()
    (out / "report" / ".report.html.0123456789abcdef.tmp").touch()
    (remains / "notes.txt").touch()
    assert convert(out, "--quiet") == 0
    found, expected = ({path.relative_to(top) for path in top.rglob("*")} for top in (out, converted))
    assert {str(path) for path in found ^ expected} == {"checkpoints", "checkpoints/notes.txt"}
    (remains / "notes.txt").unlink()
    command._remove_checkpoints(out)
    assert not remains.exists()


def test_a_lost_sublayer_is_noticed_before_the_training(convert, out, capsys, monkeypatch):
    record = json.loads((out / "convert.json").read_bytes())
    record |= {"finished": False, "sublayers": record["sublayers"][:-1]}
    for arm in ("control", "converted"):
        record[arm] = {"losses": [], "evaluations": []}
    (out / "convert.json").write_text(json.dumps(record))
    assert len(CONVERSIONS.read(out / "convert.json").sublayers) == 3
    monkeypatch.setattr(FineTuning, "_update", lambda self: pytest.fail("it trained"))
    assert convert(out, "--quiet") == 2
    assert "its 3 sublayers are not the 4 of" in capsys.readouterr().err
