"""A newcomer's retraction: the row of CONTRIBUTING.md passes the table-driven tests and goes through every command.

The tests and the training run in processes of their own, so that no other test sees the row.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from new_retraction import NAME, register
from scripts import script

from spheret import RETRACTIONS
from spheret.cli import main
from spheret.doctor import check_backend

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
SIZE = ("--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4",
    "--set", "evaluation.eval_windows=4",
        "--threads", "1", "--quiet")  # fmt: skip


def run(*words, code=0, **options):
    """Run Python with these arguments and the tests' own modules on its path; it must end with `code`."""
    path = os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, **options)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def registered():
    """The row is in the table of this process within the block."""
    before = dict(RETRACTIONS)
    register()
    try:
        yield
    finally:
        RETRACTIONS.clear()
        RETRACTIONS.update(before)


def spheret(*words, code=0):
    return run(HELPERS / "new_retraction.py", *words, code=code)


@pytest.mark.slow
def test_the_table_driven_tests_pass():
    # the command of CONTRIBUTING.md, with the row added at run time
    (command,) = re.findall(r"^    python (-m pytest .*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    words = command.split()
    assert words[-2:] == ["-k", NAME]
    printed = run(*words, "-p", "new_retraction", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA")
    passed = {line.split("::", 1)[1] for line in printed.splitlines() if line.startswith("PASSED")}
    assert len(passed) >= 50


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A run of ten steps, through the command line."""
    out = tmp_path_factory.mktemp("orthographic") / "run"
    words = ("--scheme", "proj-spheretnorm", "--set", f"retraction={NAME}", "--data", prepared, "--steps", "10")
    spheret("train", *words, "--set", "train.checkpoint_every=5", "--set", "train.keep=9", "--out", out, *SIZE)
    return out


@pytest.mark.slow
def test_training_learns_and_its_config_names_the_row(trained):
    assert json.loads((trained / "config.json").read_text())["model"]["scheme_options"] == {"retraction": NAME}
    losses = [json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_inspect_jacobians(trained):
    spheret("inspect", trained, "--windows", "1", "--jacobians")


def test_what_lists_backends(capsys):
    with registered():
        assert main(["schemes"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(NAME))
        assert row.split() == [NAME, "arcsin(beta)", "-", "0.1667", "1.571", "0.7854", "closed,", "reference"]
        known = "agrees with float64 to .* relative: projection, cayley, angular, exponential"
        assert re.match(f"{known}; no code for .*{NAME}", check_backend("native")[1])
        assert re.match(f"{known}.*, {NAME}", check_backend("closed")[1])
        words = ("--rows", "64", "--width", "32", "--repeats", "1", "--no-compile")
        bench = script("benchmarks/connection.py")
        bench.run(bench.main, ["--retraction", NAME, *words])
        printed = capsys.readouterr().out
        assert f"native: no code for {NAME}." in printed
        assert "closed" in printed
