"""A training and a watch send metrics and alarms to trackio and to Weights & Biases; what they hold is read back."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from train_helpers import TINY, metrics, train

from spheret.support.child import python_environment

# trackio lives apart, because it takes an older pillow; wandb is not installed by `make env`
APART = {
    name: Path(os.environ.get(f"SPHERET_TEST_{name.upper()}", f"{sys.prefix}/track")) for name in ("trackio", "wandb")
}
# a run that diverges
HOT = (
    "-m", "spheret", "train", "--scheme", "pre-ln", "--steps", "16", *TINY, "--lr", "6", "--set", "train.min_lr=6",
    "--set", "train.checkpoint_every=4", "--eval-every", "4",
)  # fmt: skip


def has(package):
    return find_spec(package) is not None or (APART[package] / package).is_dir()


def run(package, folder, *words):
    """Python with these words, in a process that finds the tracker, as on a machine that has it."""
    environment = python_environment() | {
        "TRACKIO_DIR": str(folder),
        "WANDB_DIR": str(folder),
        "WANDB_MODE": "offline",
    }
    environment["PYTHONPATH"] += os.pathsep + str(APART[package])
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(not has("trackio"), reason="trackio is not installed")
def test_trackio_holds_what_the_run_says(prepared, tmp_path):
    out, place = tmp_path / "mine", tmp_path / "trackio"
    words = (*HOT, "--data", str(prepared), "--out", str(out))
    assert run("trackio", place, *words, "--logger", "trackio").stdout == ""
    # as after a kill: the same command continues the same run
    shutil.rmtree(out / "checkpoints" / "step-16")
    run("trackio", place, *words, "--logger", "trackio")
    with sqlite3.connect(place / "spheret.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        alerts = database.execute("SELECT title, text, level, step FROM alerts").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert rows[0][0].startswith("mine-")
    kept = {step: json.loads(values) for _, step, values in rows}
    lines = metrics(out)
    assert sorted(kept) == [line["step"] for line in lines]
    for line in lines:
        assert kept[line["step"]]["train/loss"] == line["loss"]
        assert kept[line["step"]].get("train/val_loss") == line.get("val_loss")
        assert ("watch/norm/004" in kept[line["step"]]) == ("sublayers" in line)
    ((step, event),) = [(line["step"], line["events"][0]) for line in lines if "events" in line]
    assert [(title, level) for title, _, level, _ in alerts] == [(f"diverged at step {step}", "error")]
    assert event["sentence"] in alerts[0][1]


WATCHED = """
import sys
import torch, trackio
from spheret import watch
run = trackio.init("watched", embed=False)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
watched = watch(model, every=1, log=trackio if sys.argv[1:] else run)
for step in range(3):
    model.zero_grad()
    loss = model(torch.ones(2, 4)).mean() * (float("nan") if step == 2 else 1.0)
    loss.backward()
    watched.step(loss)
watched.close()
trackio.finish()
"""


@pytest.mark.slow
@pytest.mark.skipif(not has("trackio"), reason="trackio is not installed")
@pytest.mark.parametrize("words", [[], ["module"]])
def test_a_watch_sends_its_alarms_to_trackio(words, tmp_path):
    run("trackio", tmp_path, "-c", WATCHED, *words)
    with sqlite3.connect(tmp_path / "watched.db") as database:
        steps = [step for (step,) in database.execute("SELECT step FROM metrics ORDER BY id")]
        alerts = database.execute("SELECT title, level FROM alerts").fetchall()
    assert steps == [1, 2, 3]
    assert ("not finite at step 3", "error") in alerts


@pytest.mark.slow
@pytest.mark.skipif(not has("wandb"), reason="wandb is not installed")
def test_weights_and_biases_takes_the_same(prepared, tmp_path):
    place = tmp_path / "wandb"
    place.mkdir()
    run("wandb", place, *HOT, "--data", str(prepared), "--out", str(tmp_path / "mine"), "--logger", "wandb")
    (file,) = place.rglob("*.wandb")
    held = file.read_bytes()
    assert b"train/loss" in held
    assert b"watch/norm/004" in held
    assert b"diverged at step" in held


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_one_that_is_missing_or_unknown_is_refused_first(name, prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert train(tmp_path / "run", prepared, "--logger", name, steps=2) == 2
    said = capsys.readouterr().err
    assert ("Known: trackio, wandb" if name == "tensorboard" else f"pip install {name}") in said
    assert not (tmp_path / "run").exists()
