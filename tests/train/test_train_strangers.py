"""What a stranger tries: directories that are not runs, odd values, a second Ctrl-C, a race for one directory."""

import json
import os
import shutil
import signal
import time

import drill
import pytest
import torch
from damage import contents, full_disk
from train_helpers import TINY, metrics, train

from spheret.cli import main
from spheret.data import prepare
from spheret.runs.directory import claimed
from spheret.runs.run import create_run, open_run
from spheret.train.loop import Trainer


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(out, prepared, steps=4) == 0
    return out


def test_force_starts_again_and_touches_nothing_else(run, prepared, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "notes.txt").write_text("mine")
    assert train(out, prepared, "--force", scheme="pre-ln", steps=2) == 0
    assert len(metrics(out)) == 2
    assert open_run(out).model_config.scheme == "pre-ln"
    assert (out / "notes.txt").read_text() == "mine"


def test_a_disk_that_is_really_full(prepared, tmp_path, capsys):
    out = tmp_path / "run"
    # the weights do not fit
    with full_disk(30_000):
        assert train(out, prepared) == 2
    assert "model.safetensors: File too large" in capsys.readouterr().err
    assert not list(out.glob("checkpoints/.step-*"))
    # with room again it goes on
    assert train(out, prepared, "--resume") == 0
    assert len(metrics(out)) == 6


def test_a_run_from_elsewhere(run, prepared, tmp_path, capsys):
    opened = open_run(run)
    tokenizer = opened.config.data.tokenizer
    imported = create_run(tmp_path / "imported", opened.model(), tokenizer)
    assert torch.equal(imported.model().tokens.weight, opened.model().tokens.weight)
    assert main(["sample", str(imported.path), "--tokens", "3"]) == 0
    with pytest.raises(FileExistsError, match="imported"):
        create_run(tmp_path / "imported", opened.model(), tokenizer)
    with pytest.raises(FileNotFoundError, match="imported"):
        imported.data()
    assert main(["train", "--out", str(imported.path), "--resume"]) == 2
    assert "train.init_from" in capsys.readouterr().err
    assert train(tmp_path / "on", prepared, "--set", f"train.init_from={imported.path}", steps=2) == 0


@pytest.mark.parametrize(("name", "value"), [("width", 2_500_000), ("layers", 10**9), ("width", 32)])
def test_a_config_that_says_other_sizes_is_refused_before_anything_is_built(name, value, run, tmp_path, monkeypatch):
    imported = create_run(tmp_path / "run", open_run(run).model(), open_run(run).config.data.tokenizer).path
    config = json.loads((imported / "config.json").read_text())
    config["model"][name] = value
    (imported / "config.json").write_text(json.dumps(config))
    built = []
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: built.append(self.weight.device.type))
    with pytest.raises(ValueError, match=f"model of {imported}|every checkpoint in {imported}"):
        open_run(imported).model()
    assert set(built) <= {"meta"}


def test_data_that_is_gone(run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    config = json.loads((out / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "moved")
    (out / "config.json").write_text(json.dumps(config))
    assert main(["train", "--out", str(out), "--resume"]) == 2
    assert "give its place with --data" in capsys.readouterr().err


def test_data_without_validation(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("words and more of them " * 200)
    data = prepare(str(tmp_path / "text.txt"), "bytes", tmp_path / "data", val_fraction=0).path
    assert train(tmp_path / "run", data) == 2
    assert "--eval-every 0" in capsys.readouterr().err
    assert train(tmp_path / "run", data, "--eval-every", "0", steps=2) == 0


@pytest.mark.parametrize("flag", [(), ("--force",), ("--resume",)])
@pytest.mark.parametrize("names", [("thesis.tex",), ("tokenizer.json",), ("config.json", "model.safetensors")])
def test_a_strangers_directory_is_left_alone(names, flag, prepared, tmp_path, capsys):
    for name in names:
        (tmp_path / name).write_text('{"model_type": "gpt2"}')
    assert train(tmp_path, prepared, *flag) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        names, '{"model_type": "gpt2"}'
    )


def test_a_kill_before_the_config_leaves_a_directory_that_starts(prepared, tmp_path):
    (tmp_path / "run.lock").touch()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".config.json.0123456789abcdef.tmp").write_text("{")
    assert train(tmp_path, prepared, steps=2) == 0
    assert not list(tmp_path.glob("*.tmp"))


def _in_the_middle(monkeypatch, act):
    """Call `act` while a training makes its third update."""
    real = Trainer.update

    def update(self, batches):
        if self.step == 2:
            act()
        return real(self, batches)

    monkeypatch.setattr(Trainer, "update", update)


@pytest.mark.parametrize("act", [lambda out: out.rename(out.with_name("moved")), shutil.rmtree])
def test_a_directory_that_goes_away_stops_the_run(act, prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    _in_the_middle(monkeypatch, lambda: act(out))
    assert train(out, prepared, "--set", "train.checkpoint_every=2") == 2
    assert str(out / "checkpoints") in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoints", "run.lock"])
def test_no_link_is_written_through(name, run, prepared, tmp_path, capsys):
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(run, out)
    if (out / name).exists():
        (out / name).rename(elsewhere)
    elif name == "run.lock":
        elsewhere.write_text("a victim")
    else:
        elsewhere.mkdir()
    (out / name).symlink_to(elsewhere)
    before = contents(tmp_path)
    for flag in ("--resume", "--force"):
        assert train(out, prepared, flag, steps=4) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert contents(tmp_path) == before


# what somebody may put into a run: among what a training writes, and among what its removal removes
WRITTEN = ["sample.json", "run.lock", "checkpoints/step-2/notes.txt", "checkpoints/step-9/a.txt"]
REMOVED = [*WRITTEN, "eval.json", "inspect.json", "checkpoints/notes.txt"]


@pytest.mark.parametrize(
    ("flag", "name"), [*(("--resume", name) for name in WRITTEN), *(("--force", name) for name in REMOVED)]
)
def test_what_carries_no_format_of_ours_stays(flag, name, run, prepared, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "sample.json").unlink()
    (out / name).parent.mkdir(exist_ok=True, parents=True)
    (out / name).write_text('{"format": "mine"}')
    before = contents(out)
    assert train(out, prepared, flag, steps=4) == 2
    message = capsys.readouterr().err
    assert name in message
    assert message.count("\n") == 1
    assert contents(out) == before


def test_a_run_that_appeared_meanwhile_is_not_overwritten(run):
    before = (run / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="just now"), claimed(run, force=False, start=True):
        pass
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["with space", "ünï/cødé", "slash/"])
def test_odd_paths(name, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--scheme", "pre-ln", "--data", str(prepared), "--steps", "1", *TINY, "--out", name]) == 0
    assert main(["train", "--resume", "--out", name, "--quiet"]) == 0
    assert main(["sample", name, "--tokens", "1"]) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(prepared, tmp_path):
    words = ("--scheme", "pre-ln", "--steps", "100000", "--data", str(prepared), *TINY)
    words += ("--set", "train.checkpoint_every=5")
    out = tmp_path / "run"
    process = drill.start(out, words)
    assert drill.reached(process, out / "metrics.jsonl", 3000)
    process.send_signal(signal.SIGINT)
    time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in message
    assert open_run(out).checkpoint().step >= 5
    assert len(metrics(out)) >= open_run(out).checkpoint().step


def test_a_validation_loss_that_is_no_number_stops_the_run(prepared, tmp_path, capsys):
    out = tmp_path / "run"
    words = (
        "--lr", "1e30", "--warmup", "0", "--eval-every", "1", "--set", "train.checkpoint_every=1",
        "--set", "train.clip=inf",
    )  # fmt: skip
    assert train(out, prepared, *words, scheme="residual", steps=4) == 3
    assert "stopped before update 2: the " in capsys.readouterr().err
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["val_loss"] is None
    assert "not finite" in lines[1]["stopped"]
    # the weights are finite, but what they compute is not: this is not a checkpoint to continue from
    assert not os.path.exists(out / "checkpoints")
