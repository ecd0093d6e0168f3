"""What is written for SLURM and when it is submitted. The real SLURM is in test_slurm.py.

Here `sbatch`, `squeue` and `scontrol` are small programs that note how they are called. The scripts run in bash.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from spheret.cli import main
from spheret.lab.executors import Job, slurm
from spheret.lab.executors.slurm import Slurm

AGAIN = ("study", "my plan.toml", "--on", "slurm")
ODD = 'it\'s "odd" $(touch pwned) `touch pwned`; touch pwned & *'
PROGRAMS = {
    "sbatch": 'echo "$PWD: $*" >> "$PLACE/calls"; [ ! -e "$PLACE/refuse" ] || { echo no account >&2; exit 1; }\n'
    'wc -l < "$PLACE/calls"',
    "squeue": '[ ! -e "$PLACE/down" ] || { echo no controller >&2; exit 1; }; cat "$PLACE/queue"',
    "scontrol": 'echo "$*" >> "$PLACE/scontrol"; [ ! -e "$PLACE/refuse" ]',
}


class RunLinks:
    """A directory with the programs, and a study beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study"
        self.home = self.study / "slurm"

    @property
    def calls(self) -> list[str]:
        path = self.path / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def job(self) -> Job:
        return Job("run", self.study / "run", ("train", "--out", str(self.study / "run")))

    def queue(self, *lines: str) -> None:
        (self.path / "queue").write_text("".join(f"{line}\n" for line in lines))

    def names(self) -> list[str]:
        """The names of the jobs that were submitted."""
        return [call.split("--job-name=")[1].split()[0] for call in self.calls]


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    here = RunLinks(tmp_path)
    here.queue()
    here.study.mkdir()
    return here


class TestSubmitted:
    def test_a_stage_and_what_follows_it(self, place, capsys):
        jobs = [Job(name, place.study / name, ("train",)) for name in "ab"]
        asked = []
        executor = Slurm(place.study, AGAIN, threads=3, at_a_time=7)
        assert executor.run(lambda: asked.append(1) or jobs) is False
        assert len(asked) == 1
        first, second = place.calls
        name = place.names()[0]
        assert first == f"{place.home}: --parsable --job-name={name} stage-001.sbatch"
        assert second == (
            f"{place.home}: --parsable --job-name={name}-next --dependency=afterany:1 stage-001-next.sbatch"
        )
        assert name.startswith("spheret-study-")
        output = capsys.readouterr().err
        assert str(place.home / "stage-001.sbatch") in output
        assert "`scancel 1 2`" in output
        assert output.count("\n") == 1
        text = (place.home / "stage-001.sbatch").read_text()
        for option in (
            f"--job-name={name}", "--array=1-2%7", "--requeue", "--signal=B:USR1@120", "--open-mode=append",
            "--output=logs/stage-001-%a.log", "--cpus-per-task=3",
        ):  # fmt: skip
            assert f"\n#SBATCH {option}\n" in text
        assert "\n##SBATCH --gpus=1\n" in text
        record = json.loads((place.home / "stage-001.submitted").read_bytes())
        assert (record["array"], record["next"]) == ("1", "2")
        assert record["jobs"] == [{"name": "a", "step": 0}, {"name": "b", "step": 0}]
        assert len((place.home / "stage-001.jobs").read_text().splitlines()) == 2
        for script in place.home.glob("*.sbatch"):
            subprocess.run(["bash", "-n", script], check=True)
            # sbatch reads options up to the first command
            lines = script.read_text().splitlines()
            commands = [k for k, line in enumerate(lines) if line and not line.startswith("#")]
            assert all(k < commands[0] for k, line in enumerate(lines) if line.startswith("#SBATCH"))

    def test_what_the_user_edits_holds_in_every_later_stage(self, place):
        Slurm(place.study, AGAIN).run(lambda: [place.job])
        (place.home / "settings.sh").write_text("#SBATCH --account=größe\nmodule load cuda\n")
        Slurm(place.study, AGAIN).run(lambda: [place.job])
        for name in ("stage-002.sbatch", "stage-002-next.sbatch"):
            text = (place.home / name).read_text()
            assert "\n#SBATCH --account=größe\nmodule load cuda\n" in text
            assert "--cpus-per-task" not in text
        assert "größe" not in (place.home / "stage-001.sbatch").read_text()


class TestQueue:
    """A stage is never submitted twice."""

    def test_while_a_stage_is_there_nothing_is_submitted(self, place, capsys):
        executor = Slurm(place.study, AGAIN)
        executor.run(lambda: [place.job])
        for name in place.names():
            place.queue("77 another", f"5 {name}", f"5 {name}")
            assert executor.run(lambda: [place.job]) is False
            assert "5 is in the queue, so nothing is submitted" in capsys.readouterr().err
        assert len(place.calls) == 2

    def test_the_job_that_follows_does_not_wait_for_itself(self, place, monkeypatch):
        executor = Slurm(place.study, AGAIN)
        executor.run(lambda: [place.job])
        place.queue(f"2 {place.names()[1]}")
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        assert executor.run(lambda: [place.job]) is False
        assert len(place.calls) == 4
        assert (place.home / "stage-002.submitted").exists()

    @pytest.mark.parametrize(("fault", "message"), [("down", "no controller"), ("refuse", "no account")])
    def test_after_a_failure_the_stage_is_submitted(self, place, fault, message):
        executor, submitted = Slurm(place.study, AGAIN), place.home / "stage-001.submitted"
        (place.path / fault).touch()
        with pytest.raises(RuntimeError, match=message):
            executor.run(lambda: [place.job])
        assert not submitted.exists()
        (place.path / fault).unlink()
        assert executor.run(lambda: [place.job]) is False
        assert submitted.exists()


PLAN = """
title = "A trial"
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [1e-3, 2e-3]
"""


def test_a_login_node_needs_no_gpu(place, prepared, capsys):
    plan = place.path / "plan.toml"
    plan.write_text(PLAN + f"[data]\npath = {json.dumps(str(prepared))}\n")
    words = ["study", str(plan), "--out", str(place.study), "--on", "slurm", "--threads", "2", "--device", "cuda"]
    assert main([*words, "--jobs", "3"]) == 0
    assert "submitted stage 1, 4 trainings" in capsys.readouterr().err
    script = (place.home / "stage-001.sbatch").read_text()
    assert all(f"{option}\n" in script for option in ("--array=1-4%3", "--cpus-per-task=2", "\n#SBATCH --gpus=1"))
    line = (place.home / "stage-001-next.sbatch").read_text().splitlines()[-1]
    assert shlex.split(line.split(" -m ")[1]) == ["spheret", *words, "--jobs", "3"]


def write_stage(place, monkeypatch, body, *words, directory="run"):
    """Submit one training, for which a program with this body stands. Returns its script."""
    program = place.path / "training"
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(slurm, "spheret_command", lambda arguments: [str(program), *arguments])
    job = Job("run", place.study / directory, words or ("train",))
    job.directory.mkdir(parents=True)
    Slurm(place.study, AGAIN).run(lambda: [job])
    return place.home / "stage-001.sbatch"


def start(script, place):
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "40"}
    return subprocess.Popen(
        ["bash", script], cwd=place.home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class TestScript:
    @pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (2, 2), (137, 137)])
    def test_exit_codes(self, place, monkeypatch, code, expected):
        process = start(write_stage(place, monkeypatch, f"exit {code}"), place)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == expected
        assert (f"ended with exit code {code}" in output) == (expected != 0)
        assert not (place.path / "scontrol").exists()

    # a training that saves when it is asked to, if it is told how many steps it did
    TRAINING = (
        "trap 'stop=1' TERM; touch started; while [ -z \"$stop\" ]; do sleep 0.05; done; sleep 0.2;"
        ' yes \'{}\' | head -n "$STEPS" >> "$RUN/metrics.jsonl"; exit 143'
    )

    # near the time limit it goes back into the queue, if it did a step. SLURM itself puts a preempted one back
    @pytest.mark.parametrize(
        ("number", "steps", "code", "called", "said"),
        [
            (signal.SIGUSR1, 3, 0, "requeue 40_1\n", "goes back into the queue"),
            (signal.SIGUSR1, 0, 143, "", "set a longer --time"),
            (signal.SIGTERM, 3, 143, "", ""),
        ],
    )
    def test_signals(self, place, monkeypatch, number, steps, code, called, said):
        monkeypatch.setenv("STEPS", str(steps))
        monkeypatch.setenv("RUN", str(place.study / "run"))
        monkeypatch.chdir(place.path)
        process = start(write_stage(place, monkeypatch, self.TRAINING), place)
        deadline = time.monotonic() + 60
        while not (place.path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        path = place.path / "scontrol"
        assert (process.returncode, path.read_text() if path.exists() else "") == (code, called)
        assert said in output

    @pytest.mark.parametrize("odd", [ODD, "two\nlines", "-n"])
    def test_every_word_arrives_as_it_is(self, place, monkeypatch, odd):
        here = place.path / odd / "here"
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        place.study = here / odd
        place.home = place.study / "slurm"
        body = 'printf \'%s\\0\' "$PWD" "$@" > "$PLACE/words"'
        words = ("train", "--out", odd, "", "$HOME", "a\tb", "\n")
        process = start(write_stage(place, monkeypatch, body, *words, directory=odd), place)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "")
        assert (place.path / "words").read_text().split("\0")[:-1] == [str(here), *words]
        assert list(place.path.rglob("pwned")) == []
        # no comment and no option holds a name from outside
        script = (place.home / "stage-001.sbatch").read_text()
        assert not any("$(" in line for line in script.splitlines() if line.startswith("#"))

    def test_what_follows_runs_the_command_again(self, place, monkeypatch):
        monkeypatch.chdir(place.path)
        write_stage(place, monkeypatch, 'printf \'%s\\0\' "$PWD" "$@" > "$PLACE/words"')
        subprocess.run(["bash", place.home / "stage-001-next.sbatch"], cwd="/", check=True)
        assert (place.path / "words").read_text().split("\0")[:-1] == [str(place.path), *AGAIN]
