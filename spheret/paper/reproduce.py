"""`spheret reproduce`: the paper's recipe for one run of its tables or all 48, here or as commands for elsewhere."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spheret.data.shards import MANIFEST
from spheret.flags import words
from spheret.paper.assumptions import DATASETS, READINGS, TABLE_SCHEMES
from spheret.paper.numbers import SIZES
from spheret.paper.runs import TOKENIZER, PaperRun, paper_runs
from spheret.runs.config import differences
from spheret.runs.cost import shape, split
from spheret.runs.layout import CONFIG
from spheret.runs.run import open_run
from spheret.support import files
from spheret.support.child import python_environment, spheret_command
from spheret.support.errors import FINISHED, SIGNALS, STOPPED_BY_GUARD, unknown
from spheret.support.machine import resolve_device

# of the printed commands, unless --nproc says how many
GPUS_PER_NODE = 8
NOT_THE_PAPER = "SMOKE: a tiny model on another corpus, for a minute. This is NOT the paper's recipe."


def batch(run: PaperRun, processes: int) -> tuple[int, int]:
    """The batch size of each process and its micro-batches: an update is the same for any number of processes."""
    config = run.config(None)
    sequences = config.train.tokens_per_update // config.model.block
    return split(sequences, processes, config.train.batch_size)


@dataclass(frozen=True)
class Place:
    """Where runs are trained: directories of the runs and the data, processes, device and memory."""

    out: Path
    data: Path | None
    processes: int
    device: str | None = None
    ignore_memory: bool = False


def train_words(run: PaperRun, place: Place) -> list[str]:
    """`train` and its flags, for this number of processes. The same words start a run and continue it."""
    settings = run.settings(place.data, batch(run, place.processes)[0])
    command = ["train", "--out", str(place.out / run.name), *words(settings)]
    command += ["--device", place.device] if place.device is not None else []
    command += ["--ignore-memory"] if place.ignore_memory else []
    return [*command, "--parallel", "ddp"] if place.processes > 1 else command


def _command_here(run: PaperRun, place: Place) -> list[str]:
    return spheret_command(train_words(run, place), place.processes if place.processes > 1 else None)


def two_nodes(arguments: list[str], processes: int, name: str, nodes: str = "2", head: str = "HEAD") -> str:
    """The command for each of several nodes, which meet at a port of the first."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint={head}:29500 --rdzv-id={name} --max-restarts=3"
    return f"torchrun --nnodes={nodes} --nproc-per-node={processes} {meet} -m spheret {shlex.join(arguments)}"


def slurm(arguments: list[str], processes: int, name: str) -> str:
    """A batch script. A job that is requeued continues its run."""
    inside = two_nodes(arguments, processes, '"$SLURM_JOB_ID"', '"$SLURM_NNODES"', '"$head"')
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={processes}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {inside}"""


def describe(run: PaperRun, place: Place) -> str:
    """The config, every number that follows from it, the assumptions, and the commands."""
    size, accumulation = batch(run, place.processes)
    config = run.config(place.data, size)
    model, train = config.model, config.train
    node = place.processes if place.processes > 1 else GPUS_PER_NODE
    total = train.steps * train.tokens_per_update
    sequences = train.tokens_per_update // model.block
    missing = "" if prepared(run, place.data) else f", not prepared yet: {prepare(run, place.data)}"
    lines = [
        f"{run.name}: "
        + ("a smoke test" if run.smoke else "the paper's recipe")
        + (f", in the reading {run.reading}" if run.reading else ""),
        files.dump(config.as_dict()).decode().rstrip(),
        f"parameters: {shape(model).parameters:,}",
        f"updates: {train.steps:,}, the first {train.warmup:,} of them warm-up, lr {train.lr:g} down to "
        f"{train.min_lr:g}",
        f"tokens: {train.tokens_per_update:,} per update, {total:,} in all",
        f"sequences: {sequences} per update = {place.processes} x {size} x accumulation {accumulation}",
        f"data: {run.data(place.data)}{missing}",
        "",
        "assumptions, where the paper does not say (docs/methods.md has the reasons):",
        *(f"- {line}" for line in run.assumptions),
    ]
    here = _command_here(run, place)
    words_of_node = shlex.join(train_words(run, replace(place, processes=node)))
    one_node = f"torchrun --standalone --nproc-per-node={node} --max-restarts=3 -m spheret {words_of_node}"
    blocks = [("here", [shlex.join(here)]), (f"one node of {node} GPUs", [one_node])]
    if sequences % (2 * node) == 0:
        arguments = train_words(run, replace(place, processes=2 * node))
        blocks += [
            (f"two nodes of {node} GPUs: run this on each; HEAD is the first node's name",
             [two_nodes(arguments, node, run.name)]),
            ("Slurm: save as FILE, then sbatch FILE", slurm(arguments, node, run.name).splitlines()),
        ]  # fmt: skip
    for title, body in blocks:
        lines += ["", f"# {title}", *body]
    return "\n".join(lines)


def prepared(run: PaperRun, data: Path | None) -> bool:
    return run.smoke or (Path(run.data(data)) / MANIFEST).exists()


def prepare(run: PaperRun, data: Path | None) -> str:
    out = f" --out {shlex.join([run.data(data)])}" if data is not None else ""
    return f"spheret prepare {run.dataset} --tokenizer {TOKENIZER}{out}"


def state(run: PaperRun, out: Path, data: Path | None) -> str:
    """done (also if it diverged), not run, running, stopped, or the step it reached; another run is an error."""
    path = out / run.name
    if not (path / CONFIG).exists():
        return "not run"
    opened = open_run(path)
    changes = differences(opened.settings, run.config(data))
    if changes:
        raise ValueError(
            f"{path} is not a run of this recipe; these differ: {', '.join(changes)}. Give another --out."
        )
    if opened.is_locked():
        return "running"
    records = opened.metrics()
    step = records[-1].step if records else 0
    if records and records[-1].stopped is not None:
        return f"stopped at {step:,}"
    if step < opened.steps:
        return f"at {step:,} of {opened.steps:,}"
    diverged = next((record.step for record in records if record.diverged), None)
    return "done" if diverged is None else f"done, diverged at {diverged:,}"


def run_one(run: PaperRun, place: Place) -> int:
    """Train it in processes of its own. Ctrl-C reaches them first, and they save."""
    if not prepared(run, place.data):
        raise FileNotFoundError(f"{run.dataset} is not prepared: run `{prepare(run, place.data)}` first.")
    print(f"{run.name}, assumptions:", *(f"- {line}" for line in run.assumptions), sep="\n", file=sys.stderr)
    child = subprocess.Popen(_command_here(run, place), env=python_environment())
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait()
        return SIGNALS[signal.SIGINT]


def run_all(chosen: list[PaperRun], place: Place, dry_run: bool) -> int:
    """Show which runs are done, and train the others one by one. A run that diverges does not stop the rest."""
    states = {run: state(run, place.out, place.data) for run in chosen}
    width = max(len(run.name) for run in chosen)
    for run, current in states.items():
        print(f"{run.name:<{width}}  {current}")
    done = sum(current.startswith("done") for current in states.values())
    print(f"{done} of {len(chosen)} done, in {place.out}", flush=True)
    diverged = 0
    for run, current in states.items():
        if current.startswith(("done", "running", "stopped")):
            continue
        if dry_run:
            print(shlex.join(_command_here(run, place)))
            continue
        print(f"{run.name}: from {current}", flush=True)
        code = run_one(run, place)
        if code == STOPPED_BY_GUARD:
            diverged += 1
        elif code != FINISHED:
            print(f"{run.name} ended with code {code}: run the same command again to go on.", file=sys.stderr)
            return code
    return STOPPED_BY_GUARD if diverged else FINISHED


def reproduce(
    dataset: str | None = None,
    size: str | None = None,
    scheme: str | None = None,
    all: bool = False,
    dry_run: bool = False,
    smoke: bool = False,
    out: Path = Path("runs/paper"),
    data: Path | None = None,
    nproc: int | None = None,
    device: str | None = None,
    reading: str | None = None,
    ignore_memory: bool = False,
) -> int:
    """Train one run of the paper's tables with its hyperparameters, or all of them. Run it again to continue.

    Args:
        dataset: fineweb-edu or openwebtext.
        size: S, M or L.
        scheme: pre-ln, pre-dyt, peri-ln, keel, geonorm, proj-spheretnorm, cay-spheretnorm or p-spheretnorm.
        all: Every run that is not done, among those that the other flags name. Prints the state of each.
        dry_run: Run nothing. Print the config, what follows from it, and commands for nodes and Slurm.
        smoke: NOT the paper's recipe: a tiny run with the same flags, for a minute, to see that it runs.
        out: The directory of the runs.
        data: The directory that holds fineweb-edu/ and openwebtext/ as spheret prepare wrote them; else the cache.
        nproc: Processes on this machine, under torchrun if more than one; by default one per GPU.
        device: cuda, mps or cpu; by default the first of these that this machine has.
        reading: Another answer to a question that the paper leaves open (docs/methods.md lists them): inner-norm,
            no-final-norm, block-index, sqrt-schedule, no-entry-norm, layernorm or shifted-head. The run gets a name
            of its own.
        ignore_memory: Start although the model and its batch need more memory than there is.
    """
    for kind, choice, allowed in (
        ("dataset", dataset, DATASETS), ("size", size, SIZES), ("scheme", scheme, TABLE_SCHEMES),
    ):  # fmt: skip
        if choice is not None and choice not in allowed:
            raise unknown(kind, choice, allowed)
        if choice is None and not all:
            raise ValueError(f"--{kind} is needed, one of {', '.join(allowed)}; or --all.")
    if reading is not None and reading not in READINGS:
        raise unknown("reading", reading, READINGS)
    files.check_output_directory("--out", out.expanduser())
    if not dry_run:
        resolve_device(device)
    processes = nproc if nproc is not None else max(1, torch.cuda.device_count())
    place = Place(out.expanduser(), None if data is None else data.expanduser(), processes, device, ignore_memory)
    chosen = [replace(run, smoke=smoke) for run in paper_runs(dataset, size, scheme, reading)]
    # a number of processes that does not divide an update is found before anything runs
    batch(chosen[0], processes)
    if smoke:
        print(NOT_THE_PAPER, file=sys.stderr)
    if all:
        return run_all(chosen, place, dry_run)
    (run,) = chosen
    if dry_run:
        print(describe(run, place))
        return FINISHED
    if (current := state(run, place.out, place.data)).startswith("done"):
        print(f"{place.out / run.name} is {current}.")
        return FINISHED
    return run_one(run, place)
