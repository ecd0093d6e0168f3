"""What a stranger tries: directories that are not runs, odd values, a second Ctrl-C, a race for one directory."""

import json
import os
import re
import shutil
import signal
import time

import pytest
import torch
from train_helpers import TINY, losses, metrics, train

from spheret.cli import main
from spheret.data import open_data
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.runs.directory import claimed
from spheret.runs.layout import RUN_FILES
from spheret.runs.run import open_run
from spheret.train import drill
from spheret.train.distributed import World
from spheret.train.loop import Trainer


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(out, prepared, steps=4) == 0
    return out


@pytest.mark.parametrize("flag", [(), ("--force",), ("--resume",)])
@pytest.mark.parametrize("files", [("config.json", "tokenizer.json", "model.safetensors"), ("tokenizer.json",)])
def test_a_models_directory_is_not_a_run(files, flag, prepared, tmp_path, capsys):
    for name in files:
        (tmp_path / name).write_text('{"model_type": "gpt2"}')
    assert train(tmp_path, prepared, *flag) == 2
    assert "is not empty and not a run" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        files, '{"model_type": "gpt2"}'
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
    assert train(out, prepared, "--checkpoint-every", "2") == 2
    assert re.fullmatch(f"spheret train: {out} was moved or deleted .*\n", capsys.readouterr().err)
    assert not out.exists()


def test_another_directory_in_its_place_is_left_alone(prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"

    def replace():
        out.rename(tmp_path / "moved")
        out.mkdir()
        (out / "run.lock").write_text("another's")

    _in_the_middle(monkeypatch, replace)
    assert train(out, prepared, "--checkpoint-every", "2") == 2
    assert "was moved or deleted" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("run.lock", "another's")]


def test_without_the_lock_file_no_second_trainer_enters(prepared, tmp_path, monkeypatch, capsys):
    out, codes = tmp_path / "run", []

    def intrude():
        (out / "run.lock").unlink()
        assert open_run(out).is_locked()
        monkeypatch.undo()
        codes.append(train(out, prepared))

    _in_the_middle(monkeypatch, intrude)
    assert train(out, prepared) == 0
    assert codes == [2]
    assert f"another process is training in {out}" in capsys.readouterr().err
    assert len(losses(out)) == 6


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoints", "run.lock", "tensorboard"])
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
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["train", "--out", str(out), "--resume", "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_kill_at_any_moment_of_force_can_be_forced_again(run, prepared, tmp_path):
    for left in range(len(RUN_FILES)):
        out = tmp_path / str(left)
        shutil.copytree(run, out)
        for name in RUN_FILES[:left]:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert train(out, prepared, "--force", scheme="pre-ln", steps=1) == 0


def test_force_unlinks_a_link_and_keeps_what_it_leads_to(run, prepared, tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "big disk"
    shutil.copytree(run, out)
    shutil.move(out / "checkpoints", elsewhere)
    (out / "checkpoints").symlink_to(elsewhere)
    assert train(out, prepared, "--force", steps=1) == 0
    assert (elsewhere / "step-4").is_dir()
    assert open_run(out).checkpoint().step == 1


def test_a_run_that_appeared_meanwhile_is_not_overwritten(run):
    before = (run / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="just now"), claimed(run, force=False, start=True):
        pass
    assert (run / "config.json").read_bytes() == before


def test_many_checkpoints_may_be_kept_where_few_are_made(prepared, tmp_path):
    assert train(tmp_path / "run", prepared, "--keep", str(10**12), steps=2) == 0


VALUES = [
    (("--set", "p=[1,2]"), "--set takes a number, a word"),
    (("--set", 'p={"a":1}'), "--set takes a number, a word"),
    (("--set", "schedule=[]"), "--set takes a number, a word"),
    (("--set", "p=true"), "p of p-spheretnorm must be a number or none, got True"),
    (("--set", "exact_clamp=no"), "exact_clamp of p-spheretnorm must be true or false, got 'no'"),
    (("--set", "learnable_p=1"), "learnable_p of p-spheretnorm must be true or false, got 1"),
    (("--weight-decay", "inf"), "--weight-decay must be at least 0 and finite"),
    (("--init-from", "checkpoints/step-9"), "checkpoints/step-9 is no whole checkpoint, manifest.json is missing"),
]


@pytest.mark.parametrize(("words", "message"), VALUES, ids=[" ".join(words) for words, _ in VALUES])
def test_odd_values(words, message, prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", prepared, *words, scheme="p-spheretnorm") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_date_in_toml(prepared, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[model]\nscheme_options = {p = 2020-01-01}\n")
    assert train(tmp_path / "run", prepared, "--config", str(tmp_path / "run.toml"), scheme="p-spheretnorm") == 2
    assert "option p in" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--tokens", "-1"), ("--seed", "1" + "0" * 20)])
def test_odd_samples(words, run, capsys):
    assert main(["sample", str(run), *words]) == 2
    assert f"{words[0]} must" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--prompt", "a" * 500), ("--prompt", "ü𝔘"), ("--prompt", ""), ("--tokens", "0")])
def test_odd_prompts(words, run, capsys):
    assert main(["sample", str(run), "--tokens", "3", *words]) == 0
    expected = words[1] if words[0] == "--prompt" else ""
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize("name", ["with space", "ünï/cødé", "slash/"])
def test_odd_paths(name, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--scheme", "pre-ln", "--data", str(prepared), "--steps", "1", *TINY, "--out", name]) == 0
    assert main(["train", "--resume", "--out", name, "--quiet"]) == 0
    assert main(["sample", name, "--tokens", "1"]) == 0


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(prepared, tmp_path):
    words = ("--scheme", "pre-ln", "--steps", "100000", "--checkpoint-every", "5", "--data", str(prepared), *TINY)
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


def test_a_second_sigterm_lets_it_save(prepared, tmp_path):
    words = ("--scheme", "pre-ln", "--steps", "100000", "--data", str(prepared), *TINY)
    out = tmp_path / "run"
    process = drill.start(out, words)
    assert drill.reached(process, out / "metrics.jsonl", 3000)
    # as from a scheduler and from the shell between
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 143, message
    assert open_run(out).checkpoint().step == len(metrics(out))


def test_a_validation_loss_that_is_no_number_stops_the_run(prepared, tmp_path, capsys):
    out = tmp_path / "run"
    words = ("--lr", "1e30", "--warmup", "0", "--eval-every", "1", "--checkpoint-every", "1", "--clip", "inf")
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


def test_a_signal_counts_once_every_process_knows_of_it(prepared, tmp_path):
    config = TrainConfig(
        steps=9, batch_size=2, tokens_per_update=32, lr=1e-3, min_lr=1e-4, warmup=0, checkpoint_every=9,
    )  # fmt: skip
    model = GPT(GPTConfig(layers=1, heads=2, width=16, block=16, vocab=320))

    trainer = Trainer(
        tmp_path, model, config, EvaluationConfig(0, 1), open_data(prepared), World(torch.device("cpu")), quiet=True
    )
    update = trainer.update

    def updated(batches):
        line = update(batches)
        # after update 2 has told the others how things stand: they go on, and so must this one
        if trainer.step == 2:
            trainer.request_stop(signal.SIGTERM)
        return line

    trainer.update = updated
    assert trainer.fit() == 143
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
