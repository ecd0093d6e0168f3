"""Bad input: one clear sentence, exit code 2, nothing half-written."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from train_helpers import TINY, metrics, train

from spheret.cli import main
from spheret.data import prepare
from spheret.doctor import check_backend
from spheret.kernels import BACKENDS
from spheret.runs.directory import claimed
from spheret.runs.run import create_run, open_run


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(out, prepared, steps=4) == 0
    return out


BAD = [
    (("--lr", "-1"), "--lr must be above 0"),
    (("--warmup", "7"), "--warmup 7 lies beyond --steps 6"),
    (("--tokens-per-update", "100"), "128 or 256 would work"),
    (("--scheme", "prenorm"), "unknown scheme 'prenorm'. Did you mean"),
    (("--vocab", "200"), "--vocab 200 is smaller than the data's vocabulary of 257"),
    (("--data", "nowhere"), "--data nowhere is neither a file nor a directory nor a corpus"),
    # the run would be text the next time
    (("--data", "."), "--out"),
    (("--tokenizer", "gpt2"), "was prepared with the tokenizer 'bytes'"),
    (("--block", "100000"), "fewer than one window"),
    (("--init-from", "nowhere"), "no run directory at nowhere"),
    (("--device", "tpu"), "--device tpu is not available"),
    (("--threads", "0"), "--threads must lie between 1 and"),
    (("--threads", "5000"), "eight per core, got 5000"),
    (("--config", "nowhere.toml"), "no config file at nowhere.toml"),
    (("--set", "p=x"), "unknown option of proj"),
    (("--resume", "--force"), "give one of them"),
    (("--heads", "3"), "not divisible by heads 3"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words[0] + str(i) for i, (words, _) in enumerate(BAD)])
def test_bad_input_writes_nothing(words, message, prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words == ("--set", "p=x"):
        words = ("--scheme", "pre-ln", "--set", "p=x")
        message = "unknown option of pre-ln 'p'"
    assert train(tmp_path / "deep" / "run", prepared, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_flag_is_refused_with_a_suggestion(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), "--lerning-rate", "3", "--warmupp", "3"]) == 2
    assert "--warmup " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(run, prepared, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train(run, prepared) == 2
    assert "--resume" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_force_starts_again_and_touches_nothing_else(run, prepared, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "notes.txt").write_text("mine")
    assert train(out, prepared, "--force", scheme="pre-ln", steps=2) == 0
    assert len(metrics(out)) == 2
    assert open_run(out).model_config.scheme == "pre-ln"
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flag", [(), ("--force",), ("--resume",)])
def test_a_strangers_directory_is_refused(flag, prepared, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert train(tmp_path, prepared, *flag) == 2
    assert "holds 'thesis.tex'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_out_is_a_file_or_below_one(prepared, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert train(tmp_path / "file", prepared) == 2
    assert "is a file: give a directory" in capsys.readouterr().err
    assert train(tmp_path / "file" / "run", prepared) == 2
    assert "cannot write to --out" in capsys.readouterr().err


def test_a_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    # root may write anywhere: be nobody for a moment
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        with pytest.raises(OSError, match=rf"--out {re.escape(str(tmp_path))}"), claimed(tmp_path / "run", False):
            pytest.fail("it was claimed")
    finally:
        if was_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("--scheme", "pre-ln"), ["scheme"]),
        (("--lr", "0.5", "--width", "32"), ["lr", "width"]),
        (("--data", "sotu"), ["data"]),
        (("--steps", "9", "--seed", "3"), ["steps", "seed"]),
    ],
)
def test_another_run_is_not_resumed(words, keys, run, capsys, tmp_path):
    assert main(["train", "--out", str(run), "--resume", *words]) == 2
    error = capsys.readouterr().err
    assert "is another run; these differ" in error
    for key in keys:
        assert f"{key} (the run has" in error


def test_what_may_change_may_change(run, prepared, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / "step-4")
    words = ("--eval-every", "1", "--checkpoint-every", "1", "--keep", "5", "--resume")
    assert train(out, prepared, *words, steps=4) == 0


def test_init_from_another_scheme_lists_the_keys(run, prepared, tmp_path, capsys):
    assert train(tmp_path / "new", prepared, "--init-from", str(run), scheme="pre-ln") == 2
    error = capsys.readouterr().err
    assert "is of another model; these differ" in error
    assert "entry_norm.gamma (not in this model)" in error
    assert not (tmp_path / "new").exists()


def test_init_from_with_another_head(run, prepared, tmp_path, capsys):
    # a shifted head has the tensors of a tied one
    assert train(tmp_path / "shifted", prepared, "--init-from", str(run), "--head", "shifted", steps=1) == 0
    assert train(tmp_path / "untied", prepared, "--init-from", str(run), "--head", "untied") == 2
    assert "is of another model; these differ: head.weight (missing)" in capsys.readouterr().err
    words = ("--head", "untied", "--checkpoint-every", "1")
    assert train(tmp_path / "own", prepared, *words, steps=1) == 0
    assert train(tmp_path / "back", prepared, "--init-from", str(tmp_path / "own")) == 2
    assert "head.weight (not in this model)" in capsys.readouterr().err


def test_a_pickle_in_place_of_weights(run, prepared, tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    out = tmp_path / "run"
    shutil.copytree(run, out)
    for step in (3, 4):
        torch.save(Bomb(), out / "checkpoints" / f"step-{step}" / "model.safetensors")
    assert train(out, prepared, "--resume", steps=4) == 2
    assert "every checkpoint" in capsys.readouterr().err
    assert main(["sample", str(out)]) == 2
    assert "checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_a_disk_that_is_really_full(prepared, tmp_path):
    # the kernel refuses a file beyond a size: the optimiser's state does not fit, or a metrics line
    for limit, expected in ((30_000, "there was no checkpoint yet"), (700, "there was no checkpoint yet")):
        out = tmp_path / str(limit)
        words = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        words += "from spheret.cli import main; sys.exit(main(sys.argv[1:]))"
        arguments = ["train", "--scheme", "pre-ln", "--data", str(prepared), "--steps", "6", *TINY]
        done = subprocess.run(
            [sys.executable, "-c", words, *arguments, "--out", str(out)], capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr or "cannot be written" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(out.glob("checkpoints/.step-*"))
        # with room again it goes on
        assert main([*arguments, "--out", str(out), "--resume"]) == 0
        assert len(metrics(out)) == 6
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_too_little_room_is_known_before_the_start(prepared, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert train(tmp_path / "run", prepared) == 2
    assert "lower --keep" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    assert "--init-from" in capsys.readouterr().err
    assert train(tmp_path / "on", prepared, "--init-from", str(imported.path), steps=2) == 0


def test_reading_what_is_no_run(tmp_path, run):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        open_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json .*spheret train"):
        open_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"77.* 3, 4"):
        open_run(run).checkpoint(77)


@pytest.mark.parametrize("gone", ["data.path", "data.tokenizer", "train.steps", "train.betas", "train.lr"])
def test_a_config_that_lacks_a_key(gone, run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    config = json.loads((out / "config.json").read_text())
    part, key = gone.split(".")
    del config[part][key]
    (out / "config.json").write_text(json.dumps(config))
    assert main(["train", "--out", str(out), "--resume"]) == 2
    assert gone in capsys.readouterr().err


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


def test_a_damaged_line_is_named(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl"):
        open_run(out).metrics()


@pytest.mark.parametrize("name", BACKENDS)
def test_the_doctor_checks_every_backend(name):
    good, message = check_backend(name)
    assert good
    assert "agrees with float64" in message or "not available" in message


def test_the_doctor_sees_a_sick_backend(monkeypatch):
    sick = BACKENDS["closed"]._replace(run=lambda h, f, *_: h + 0 * f)
    monkeypatch.setitem(BACKENDS, "closed", sick)
    good, message = check_backend("closed")
    assert not good
    assert "DISAGREES" in message


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    message = capsys.readouterr().out
    assert f"torch {torch.__version__}".split()[0] in message
    assert "backend native" in message
    assert "cache" in message


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("spheret ")
