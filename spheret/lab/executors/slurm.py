"""Trainings on a SLURM cluster: one array job per stage, and a small job after it that submits the next stage.

Nothing stays alive on the login node. What is done is read from the run directories. DIR/slurm/ holds:

settings.sh          options of every job, for the user to edit
stage-001.jobs       one training per line: its run directory and its command
stage-001.sbatch     the array job that runs them
stage-001-next.sbatch  the job that runs the study's command again when all of them have ended
stage-001.submitted  the ids of the two jobs, and the step at which each training was
logs/                the output of every job
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spheret.lab.executors import Job
from spheret.runs.layout import METRICS
from spheret.runs.metrics import whole_metrics
from spheret.support import files
from spheret.support.child import python_environment, spheret_command
from spheret.support.documents import Count, Document, Positive, Record, Text
from spheret.support.errors import FINISHED, SIGNALS, STOPPED_BY_GUARD
from spheret.support.files import output_path

SLURM, SETTINGS, LOGS = "slurm", "settings.sh", "logs"
# a training that gets no further in so many stages in turn will not do so in the next one
ATTEMPTS = 3
# the largest array that SLURM takes where its MaxArraySize is not set
MOST_TASKS = 1000


class SubmittedJob(Record):
    """A training of a stage, and the step at which it was."""

    name: Text
    step: Count


class StageRecord(Record):
    """stage-N.submitted.

    array, next: ids of jobs; next is null if that job could not be submitted.
    jobs: in the order of the array's tasks.
    given_up: whether the study then ended with an error. What comes after was asked for by a person.
    """

    stage: Positive
    array: Text
    next: Text | None
    jobs: list[SubmittedJob]
    given_up: bool
    format: str = "spheret-slurm-stage"
    version: int = 1

    @property
    def stem(self) -> str:
        return f"stage-{self.stage:03d}"


STAGES = Document(StageRecord, "study", "delete the file if nothing of it is in the queue")


def quoted(words: Iterable[str]) -> str:
    """Words for bash, on one line whatever they hold."""
    return " ".join(shlex.quote(word).replace("\n", "'$'\\n''") for word in words)


@dataclass(frozen=True)
class Slurm:
    """Submits a stage and returns. It never submits one while another is in the queue.

    directory: of the study.
    again: the words of the study's command without `spheret`, which run when the stage has ended.
    threads: CPU cores per training.
    gpus: whether each training needs a GPU.
    at_a_time: so many trainings at most; None for as many as the cluster allows.
    """

    directory: Path
    again: Sequence[str]
    threads: int = 1
    gpus: bool = False
    at_a_time: int | None = None

    def run(self, wanted: Callable[[], Sequence[Job]]) -> bool:
        """Submit what is wanted now. Returns True if nothing is; otherwise other calls will find more to do."""
        jobs = wanted()
        if not jobs:
            return True
        if re.search(r"[%\\]", str(self._home)):
            raise ValueError(
                f"SLURM gives % and \\ in names a meaning of its own, got {self._home}: give another --out."
            )
        if queued := self._queued():
            _say(f"{', '.join(queued)} is in the queue, so nothing is submitted. {self._look(queued)}")
            return False
        stages = self._stages()
        first = [SubmittedJob(job.name, _step(job)) for job in jobs[:MOST_TASKS]]
        self._check_progress(first, stages)
        stage = self._submit(jobs[:MOST_TASKS], first, stages[-1].stage + 1 if stages else 1)
        ids = [stage.array, *([stage.next] if stage.next else [])]
        count = f"{len(first)} trainings" + (f" of {len(jobs)}" if len(jobs) > len(first) else "")
        _say(
            f"submitted stage {stage.stage}, {count}, as job {stage.array}; job {stage.next} follows it and submits "
            f"what comes next. The script is {self._home / f'{stage.stem}.sbatch'}, its options are in "
            f"{self._home / SETTINGS}. {self._look(ids)}"
        )
        return False

    @property
    def _home(self) -> Path:
        return self.directory.absolute() / SLURM

    @property
    def _name(self) -> str:
        """The beginning of the names of this study's jobs, by which they are found in the queue."""
        directory = self.directory.resolve()
        label = re.sub(r"[^A-Za-z0-9._-]", "_", directory.name)[:40]
        return f"spheret-{label}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:6]}-"

    def _look(self, ids: Sequence[str]) -> str:
        return (
            f"`squeue --user $USER` shows the jobs and `scancel {' '.join(ids)}` ends them. The report can be made "
            f"at any moment with --minutes 0."
        )

    def _queued(self) -> list[str]:
        """The ids of this study's jobs that wait or run, without the one that we are part of."""
        # a task that is completing runs no more
        words = ["--noheader", "--format=%F %j", f"--user={os.getuid()}", "--states=PENDING,RUNNING,SUSPENDED"]
        try:
            lines = _call("squeue", words).splitlines()
        except RuntimeError as error:
            raise RuntimeError(
                f"squeue failed ({error}), and only it knows what is in the queue: nothing was submitted. Run the "
                f"same command again when it answers."
            ) from None
        rows = [line.split(maxsplit=1) for line in lines if " " in line]
        ids = [id for id, name in rows if name.startswith(self._name) and id != os.environ.get("SLURM_JOB_ID")]
        return list(dict.fromkeys(ids))

    def _stages(self) -> list[StageRecord]:
        stages = [STAGES.read(path) for path in self._home.glob("stage-*.submitted")]
        return sorted(stages, key=lambda stage: stage.stage)

    def _check_progress(self, jobs: Sequence[SubmittedJob], stages: Sequence[StageRecord]) -> None:
        """Raise if a training got no further in the last stages that had it. After that it may be tried again."""
        tasks = [(stage, {job.name: (job.step, task) for task, job in enumerate(stage.jobs, 1)}) for stage in stages]
        for job in jobs:
            logs = []
            for stage, known in reversed(tasks):
                step, task = known.get(job.name, (job.step, 0))
                if stage.given_up or step < job.step:
                    break
                if task:
                    logs.append(self._home / LOGS / f"{stage.stem}-{task}.log")
            if len(logs) < ATTEMPTS:
                continue
            STAGES.write(self._record(stages[-1]), msgspec.structs.replace(stages[-1], given_up=True))
            raise RuntimeError(
                f"{job.name} was submitted {len(logs)} times and is still at step {job.step} "
                f"({_last_lines(logs[0])}). What is done is kept: fix this and run the same command again. Its "
                f"output is in {logs[0]}."
            )

    def _record(self, stage: StageRecord) -> Path:
        return self._home / f"{stage.stem}.submitted"

    def _submit(self, jobs: Sequence[Job], steps: list[SubmittedJob], number: int) -> StageRecord:
        """Write the scripts of a stage and submit them."""
        output_path(self.directory.absolute(), SLURM, LOGS).mkdir(exist_ok=True)
        settings = self._home / SETTINGS
        if not settings.exists():
            files.write_atomically(settings, _fill("settings.sh", threads=self.threads, gpus=self.gpus).encode())
        stage = StageRecord(number, "unknown", None, steps, given_up=False)
        name, lines = f"{self._name}{number:03d}", self._home / f"{stage.stem}.jobs"
        commands = [quoted([str(job.directory), "spheret", *job.words]) + "\n" for job in jobs]
        files.write_atomically(lines, os.fsencode("".join(commands)))
        shared = {
            "stage": number,
            "stem": stage.stem,
            "settings": os.fsdecode(settings.read_bytes()).strip(),
            "here": quoted([os.getcwd()]),
            "path": quoted([python_environment()["PYTHONPATH"]]),
            "command": quoted(spheret_command([])),
        }
        array = _fill(
            "stage.sbatch",
            **shared,
            name=name,
            count=len(jobs),
            throttle=f"%{self.at_a_time}" if self.at_a_time else "",
            jobs=quoted([str(lines)]),
            finished=FINISHED,
            stopped_by_guard=STOPPED_BY_GUARD,
            terminated=SIGNALS[SIGTERM],
        )
        following = _fill("next.sbatch", **shared, name=f"{name}-next", again=quoted(self.again))
        stage.array = self._sbatch(f"{stage.stem}.sbatch", array, name)
        # before anything else can fail
        STAGES.write(self._record(stage), stage)
        try:
            after = f"--dependency=afterany:{stage.array}"
            stage.next = self._sbatch(f"{stage.stem}-next.sbatch", following, f"{name}-next", after)
        except RuntimeError as error:
            raise RuntimeError(
                f"job {stage.array} trains stage {number}, but nothing follows it: {error} When it has ended, run "
                f"the same command again."
            ) from None
        STAGES.write(self._record(stage), stage)
        return stage

    def _sbatch(self, file: str, text: str, name: str, *words: str) -> str:
        """Write a script and submit it. Returns the job's id."""
        files.write_atomically(self._home / file, os.fsencode(text))
        # the name once more: here it wins over settings and over the environment
        try:
            answer = _call("sbatch", ["--parsable", f"--job-name={name}", *words, file], self._home)
        except RuntimeError as error:
            raise RuntimeError(
                f"sbatch refused {self._home / file} ({error}): fix it in {self._home / SETTINGS}, and run the "
                f"same command again."
            ) from None
        # with several clusters it is ID;CLUSTER
        return answer.strip().split(";")[0]


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def _step(job: Job) -> int:
    """The last step in a run's metrics."""
    # a damaged file is named by the training itself
    with contextlib.suppress(ValueError):
        return len(whole_metrics(job.directory / METRICS))
    return 0


def _last_lines(log: Path) -> str:
    """What a training said last, and what its script said of that."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return " ".join(lines[-2:]) or "it printed nothing"


def _call(program: str, words: Sequence[str], directory: Path | None = None) -> str:
    """What one of SLURM's commands prints. If it fails, the error is what it says of that."""
    try:
        done = subprocess.run(
            [program, *words], cwd=directory, capture_output=True, encoding="utf-8", errors="replace"
        )
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{program} is not here: --on slurm needs SLURM's commands. Run it on a login node of the cluster, or "
            f"leave it out to train on this machine."
        ) from None
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split()) or f"exit code {done.returncode}")
    return done.stdout


def _fill(template: str, **values: object) -> str:
    # plain text for a shell: what comes from outside is quoted for it
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(f"{template}.jinja").render(values)
