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
from spheret.lab.executors.slurm import ATTEMPTS, MOST_TASKS, Slurm

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

    def queue(self, *lines: str) -> None:
        (self.path / "queue").write_text("".join(f"{line}\n" for line in lines))

    def names(self) -> list[str]:
        """The names of the jobs that were submitted."""
        return [call.split("--job-name=")[1].split()[0] for call in self.calls]

    def job(self, name: str = "run", *words: str) -> Job:
        return Job(name, self.study / name, words or ("train", "--out", str(self.study / name)))

    def reach(self, job: Job, step: int) -> None:
        """Metrics of a run that is at a step."""
        lines = [
            {"step": k + 1, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "spikes": 0}
            | {"tokens_per_second": 1.0, "seconds": 1.0}
            for k in range(step)
        ]
        job.directory.mkdir(exist_ok=True, parents=True)
        (job.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


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
        jobs = [place.job("a"), place.job("b")]
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
        job = place.job()
        Slurm(place.study, AGAIN).run(lambda: [job])
        (place.home / "settings.sh").write_text("#SBATCH --account=größe\nmodule load cuda\n")
        Slurm(place.study, AGAIN).run(lambda: [job])
        for name in ("stage-002.sbatch", "stage-002-next.sbatch"):
            text = (place.home / name).read_text()
            assert "\n#SBATCH --account=größe\nmodule load cuda\n" in text
            assert "--cpus-per-task" not in text
        assert "größe" not in (place.home / "stage-001.sbatch").read_text()

    def test_no_more_tasks_than_an_array_can_have(self, place, capsys):
        jobs = [place.job(f"run{k}") for k in range(MOST_TASKS + 5)]
        Slurm(place.study, AGAIN).run(lambda: jobs)
        assert "1000 trainings of 1005" in capsys.readouterr().err
        assert f"#SBATCH --array=1-{MOST_TASKS}\n" in (place.home / "stage-001.sbatch").read_text()
        assert len((place.home / "stage-001.jobs").read_text().splitlines()) == MOST_TASKS


class TestQueue:
    """A stage is never submitted twice."""

    def test_while_a_stage_is_there_nothing_is_submitted(self, place, capsys):
        executor, job = Slurm(place.study, AGAIN), place.job()
        executor.run(lambda: [job])
        for name in place.names():
            place.queue("77 another", f"5 {name}", f"5 {name}")
            assert executor.run(lambda: [job]) is False
            assert "5 is in the queue, so nothing is submitted" in capsys.readouterr().err
        assert len(place.calls) == 2

    def test_the_job_that_follows_does_not_wait_for_itself(self, place, monkeypatch):
        executor, job = Slurm(place.study, AGAIN), place.job()
        executor.run(lambda: [job])
        place.queue(f"2 {place.names()[1]}")
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        assert executor.run(lambda: [job]) is False
        assert len(place.calls) == 4
        assert (place.home / "stage-002.submitted").exists()

    def test_squeue_fails(self, place):
        (place.path / "down").touch()
        with pytest.raises(RuntimeError, match="no controller"):
            Slurm(place.study, AGAIN).run(lambda: [place.job()])
        assert place.calls == []


class TestRefused:
    def test_sbatch_fails(self, place):
        (place.path / "refuse").touch()
        with pytest.raises(RuntimeError, match="no account"):
            Slurm(place.study, AGAIN).run(lambda: [place.job()])
        assert not (place.home / "stage-001.submitted").exists()
        (place.path / "refuse").unlink()
        assert Slurm(place.study, AGAIN).run(lambda: [place.job()]) is False
        assert (place.home / "stage-001.submitted").exists()

    @pytest.mark.parametrize("program", ["squeue", "sbatch"])
    def test_no_slurm_here(self, place, program, monkeypatch):
        (place.path / "bin" / program).unlink()
        monkeypatch.setenv("PATH", f"{place.path / 'bin'}{os.pathsep}{place.path / 'none'}")
        (place.path / "bin" / "cat").symlink_to("/bin/cat")
        with pytest.raises(FileNotFoundError, match=program):
            Slurm(place.study, AGAIN).run(lambda: [place.job()])


class TestNoProgress:
    def test_a_training_that_gets_no_further_is_an_error(self, place):
        executor, stuck, good = Slurm(place.study, AGAIN), place.job("stuck"), place.job("good")
        place.reach(stuck, 2)
        for attempt in range(ATTEMPTS):
            place.reach(good, 5 * attempt)
            assert executor.run(lambda: [good, stuck]) is False
        log = place.home / "logs" / f"stage-{ATTEMPTS:03d}-2.log"
        log.write_text("first\nno space left.\nexit code 2.\n")
        place.reach(good, 100)
        before = len(place.calls)
        with pytest.raises(RuntimeError) as caught:
            executor.run(lambda: [good, stuck])
        assert f"stuck was submitted {ATTEMPTS} times and is still at step 2 (no space left. exit code 2.)" in str(
            caught.value
        )
        assert str(log) in str(caught.value)
        assert len(place.calls) == before
        # whoever runs it after that has mended something
        for _ in range(ATTEMPTS):
            assert executor.run(lambda: [stuck]) is False
        with pytest.raises(RuntimeError):
            executor.run(lambda: [stuck])


PLAN = """
title = "A trial"
[data]
path = {data}
[model]
layers = 1
heads = 2
width = 16
block = 16
[train]
steps = 4
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [1e-3, 2e-3]
"""


class TestStudy:
    def study(self, place, prepared, *words):
        (place.path / "plan.toml").write_text(PLAN.format(data=json.dumps(str(prepared))))
        flags = ["--out", str(place.study), "--on", "slurm", *words]
        return main(["study", str(place.path / "plan.toml"), *flags])

    def test_a_login_node_needs_no_gpu(self, place, prepared, capsys):
        assert self.study(place, prepared, "--device", "cuda", "--threads", "2", "--jobs", "3") == 0
        assert "submitted stage 1, 4 trainings" in capsys.readouterr().err
        assert "--array=1-4%3\n" in (place.home / "stage-001.sbatch").read_text()
        assert "--cpus-per-task=2\n" in (place.home / "stage-001.sbatch").read_text()
        assert "\n#SBATCH --gpus=1\n" in (place.home / "stage-001.sbatch").read_text()
        line = (place.home / "stage-001-next.sbatch").read_text().splitlines()[-1]
        assert shlex.split(line.split(" -m ")[1]) == [
            "spheret", "study", str(place.path / "plan.toml"), "--out", str(place.study), "--on", "slurm",
            "--threads", "2", "--device", "cuda", "--jobs", "3",
        ]  # fmt: skip


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
    @pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (1, 1), (2, 2), (137, 137), (143, 143)])
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

    @pytest.mark.parametrize("odd", [ODD, "two\nlines", "größe", " ", "-n"])
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

    def test_it_runs_this_copy_of_spheret(self, place):
        Slurm(place.study, ["--version"]).run(lambda: [place.job("run", "--version")])
        for name in ("stage-001.sbatch", "stage-001-next.sbatch"):
            environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "1"}
            done = subprocess.run(
                ["bash", place.home / name], cwd="/", env=environment, capture_output=True, text=True, check=True
            )
            assert done.stdout.startswith("spheret ")
