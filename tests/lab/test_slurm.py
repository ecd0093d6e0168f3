"""A study on a real SLURM, preempted and cut off by time limits, equals the same study on this machine to the bit."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from drill import differences
from slurm_cluster import check_installed, cluster

from spheret.cli import main
from spheret.lab.executors.slurm import ATTEMPTS
from spheret.runs.run import open_run
from spheret.support.child import python_environment, spheret_command

pytestmark = pytest.mark.slurm

PLAN = """
title = "A study of two, on two machines"

[data]
path = {data}

[model]
layers = 2
heads = 2
width = 32
block = 64

[train]
steps = {steps}
batch_size = 4
checkpoint_every = {checkpoint_every}

[evaluation]
eval_every = {checkpoint_every}
eval_windows = 8

[[parts]]
name = "two"
contestants = {contestants}
rates = [1e-3, 4e-3]
extend = {extend}
seeds = 0
"""
PATIENCE = 900.0


@pytest.fixture(scope="module")
def slurm():
    try:
        check_installed()
    except RuntimeError as error:
        pytest.exit(str(error), returncode=1)
    with cluster() as running:
        yield running


class Study:
    """The same study twice: here, and on SLURM, in a directory whose name no shell likes."""

    def __init__(self, slurm, folder: Path, prepared: Path, **plan) -> None:
        self.slurm = slurm
        self.local, self.out = folder / "local", folder / "o'n $SLURM"
        self.home = self.out / "slurm"
        self.plan = folder / "the plan.toml"
        self.plan.write_text(PLAN.format(data=json.dumps(str(prepared)), **plan))

    def run_local(self) -> None:
        assert main(["study", str(self.plan), "--out", str(self.local), "--quiet"]) == 0

    def submit(self) -> str:
        """Run the command as on a login node. Returns what it says."""
        done = subprocess.run(
            spheret_command(["study", str(self.plan), "--out", str(self.out), "--on", "slurm"]),
            env={**self.slurm.environment, "PYTHONPATH": python_environment()["PYTHONPATH"]},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    def submit_with(self, old: str, new: str) -> None:
        """Do what a user does who wants other options: cancel the first stage, edit, and run the command again."""
        self.submit()
        first = json.loads((self.home / "stage-001.submitted").read_bytes())
        self.slurm.call("scancel", first["array"], first["next"])
        self.slurm.wait_until_empty(PATIENCE)
        self.edit(old, new)
        assert "submitted stage 2" in self.submit()
        self.slurm.wait_until_empty(PATIENCE)

    def edit(self, old: str, new: str) -> None:
        settings = self.home / "settings.sh"
        text = settings.read_text()
        assert old in text
        settings.write_text(text.replace(old, new))

    def training_between(self, least: int, most: int, but: Sequence[int]) -> int:
        """Wait until a task of the first stage, other than some, is at a step between these. Returns its number."""
        lines = (self.home / "stage-001.jobs").read_text().splitlines()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for task, line in enumerate(lines, start=1):
                steps = [_step(path) for path in self.runs() if path.name in line]
                if task not in but and steps and least <= steps[0] <= most:
                    return task
            time.sleep(0.05)
        raise TimeoutError(f"no training reached step {least}:\n{self.logs()}")

    def runs(self) -> list[Path]:
        return sorted(self.out.glob("runs/*"))

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.home.glob("logs/*")))

    def check_equal(self) -> None:
        """Every run has the same bits, and every row of the results the same losses."""
        names = [path.name for path in sorted(self.local.glob("runs/*"))]
        assert [path.name for path in self.runs()] == names, self.logs()
        assert names
        for name in names:
            assert differences(self.local / "runs" / name, self.out / "runs" / name) == [], name
            assert open_run(self.out / "runs" / name).checkpoint().step == open_run(self.out / "runs" / name).steps
        rows = [
            [
                {**json.loads(line), **dict.fromkeys(("seconds", "step_seconds", "commit"))}
                for line in path.read_text().splitlines()
            ]
            for path in (self.local / "results.jsonl", self.out / "results.jsonl")
        ]
        assert rows[0] == rows[1]


def _step(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_preempted_and_submitted_again_and_again(slurm, prepared, tmp_path):
    study = Study(
        slurm, tmp_path, prepared, steps=1000, checkpoint_every=250, extend=1,
        contestants='["pre-ln", "proj-spheretnorm:schedule=constant"]',
    )  # fmt: skip
    assert "submitted stage 1, 4 trainings, as job" in study.submit()
    array = json.loads((study.home / "stage-001.submitted").read_bytes())["array"]
    preempted: list[int] = []
    for _ in range(2):
        preempted.append(study.training_between(20, 400, preempted))
        slurm.call("scontrol", "requeue", f"{array}_{preempted[-1]}")
    assert "is in the queue, so nothing is submitted" in study.submit()
    slurm.wait_until_empty(PATIENCE)
    logs = study.logs()
    assert logs.count("DUE TO JOB REQUEUE") == 2, logs
    assert logs.count("stopped and saved at step") == 2, logs
    # the best of two rates lies at an edge, so the grid grew: the job after the first stage submitted a second
    stages = sorted(path.name for path in study.home.glob("*.submitted"))
    assert stages == ["stage-001.submitted", "stage-002.submitted"], logs
    study.run_local()
    study.check_equal()


def test_a_time_limit_shorter_than_the_training(slurm, prepared, tmp_path):
    # a trial tells how many steps take longer than SLURM waits before it looks at the limit: 20 to 50 seconds here
    words = ["--scheme", "pre-ln", "--layers", "2", "--heads", "2", "--width", "32", "--block", "64"]
    words += ["--batch-size", "4", "--steps", "100", "--set", "evaluation.eval_windows=8", "--data", str(prepared)]
    words += ["--threads", "1", "--quiet", "--out", str(tmp_path / "trial")]
    assert main(["train", *words]) == 0
    seconds = open_run(tmp_path / "trial").metrics()[-1].seconds / 100
    steps = math.ceil(80 / seconds)
    study = Study(
        slurm, tmp_path, prepared, steps=steps, checkpoint_every=steps, extend=0, contestants='["proj-spheretnorm"]'
    )
    study.submit_with("##SBATCH --time=04:00:00", "#SBATCH --time=1\n#SBATCH --signal=B:USR1@10")
    logs = study.logs()
    assert "the time limit is near. The training has saved and goes back into the queue." in logs
    assert "stopped and saved at step" in logs
    study.run_local()
    study.check_equal()


def test_a_training_that_always_fails_ends_the_chain(slurm, prepared, tmp_path):
    study = Study(slurm, tmp_path, prepared, steps=20, checkpoint_every=20, extend=0, contestants='["pre-ln"]')
    fault = '[ -z "$SLURM_ARRAY_TASK_ID" ] || export SPHERET_BACKEND=abacus'
    study.submit_with("# Commands may follow", f"{fault}\n# Commands may follow")
    assert len(list(study.home.glob("*.submitted"))) == ATTEMPTS, study.logs()
    output = (study.home / "logs" / f"stage-{ATTEMPTS:03d}-next.log").read_text()
    assert f"was submitted {ATTEMPTS} times and is still at step 0 (spheret train: unknown backend" in output
    log = study.home / "logs" / f"stage-{ATTEMPTS:03d}-1.log"
    assert str(log) in output
    assert "abacus" in log.read_text()
    study.edit(fault, "")
    assert f"submitted stage {ATTEMPTS + 1}, 2 trainings" in study.submit()
    slurm.wait_until_empty(PATIENCE)
    assert len(list(study.home.glob("*.submitted"))) == ATTEMPTS + 1
    assert [_step(path) for path in study.runs()] == [20, 20]
    assert "nothing is submitted" not in study.submit()
