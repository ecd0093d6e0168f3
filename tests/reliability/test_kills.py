"""`make drill`: race, study and report are killed at 150 seeded moments, and go on to the same bytes."""

import random
import subprocess
import time

import pytest

from spheret.lab.rows import read_rows
from spheret.support.child import python_environment, spheret_command
from spheret.support.files import is_temporary

KILLS = 50
TINY = (
    "--layers", "1", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "2",
    "--set", "evaluation.eval_windows=4",
)  # fmt: skip
PLAN = """
title = "A trial"
[model]
layers = 1
heads = 2
width = 16
block = 32
[train]
steps = 12
batch_size = 2
checkpoint_every = 2
[evaluation]
eval_every = 4
eval_windows = 4
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [2e-2, 4e-2]
extend = 1
seeds = 2
"""


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """Two runs for the report."""
    folder = tmp_path_factory.mktemp("runs")
    for scheme in ("pre-ln", "proj-spheretnorm"):
        words = ["--scheme", scheme, "--steps", "6", "--quiet", "--threads", "1"]
        run_to_the_end(["train", *TINY, *words, "--data", str(prepared), "--out", str(folder / scheme)])
    return folder


def start(words):
    return subprocess.Popen(
        spheret_command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=python_environment()
    )


def run_to_the_end(words):
    process = start(words)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()


def results(out):
    """What every run gave; the seconds are those of the clock."""
    return {key: row.result for key, row in read_rows(out / "results.jsonl").items()}


def weights(out):
    """The last checkpoint of every run, to the bit."""
    return {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("checkpoints/*/model.safetensors"))
    }


def every_file(out):
    written = (path for path in sorted(out.rglob("*")) if path.is_file() and not is_temporary(path))
    return {str(path.relative_to(out)): path.read_bytes() for path in written}


def race(out, prepared, runs):
    words = ["--schemes", "pre-ln,proj-spheretnorm", "--lr", "1e-2,2e-2", "--steps", "12", "--eval-every", "4"]
    words += ["--set", "train.checkpoint_every=2", "--quiet"]
    return ["race", *TINY, *words, "--data", str(prepared), "--out", str(out)]


def study(out, prepared, runs):
    plan = out.parent / "plan.toml"
    plan.write_text(PLAN.replace("[model]", f'[data]\npath = "{prepared}"\n[model]'))
    return ["study", str(plan), "--out", str(out), "--quiet"]


def report(out, prepared, runs):
    return ["report", str(runs), "--out", str(out)]


# command: what must be the same
CASES = {race: [results, weights], study: [results, weights], report: [every_file]}


@pytest.mark.drill
@pytest.mark.parametrize("command", CASES, ids=lambda command: command.__name__)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(command, prepared, runs, tmp_path):
    choose = random.Random(7)
    begun = time.monotonic()
    unbroken = tmp_path / "unbroken"
    run_to_the_end(command(unbroken, prepared, runs))
    seconds, kills, turn = time.monotonic() - begun, 0, 0
    expected = [what(unbroken) for what in CASES[command]]
    while kills < KILLS:
        out, turn = tmp_path / f"killed-{turn}", turn + 1
        words = command(out, prepared, runs)
        while kills < KILLS:
            process = start(words)
            try:
                _, errors = process.communicate(timeout=choose.uniform(0, 1.2 * seconds))
                assert process.returncode == 0, errors.decode()
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        run_to_the_end(words)
        assert [what(out) for what in CASES[command]] == expected
    assert kills == KILLS
