"""`spheret reproduce`: the paper's recipe for one cell of its tables or all 48, here or as commands for elsewhere."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from spheret.data.shards import MANIFEST
from spheret.plan.cost import GPUS_PER_NODE, split
from spheret.plan.memory import shape
from spheret.race.recipe import DATASETS, SCHEMES, SIZES, TOKENIZER, Cell, cells, flags
from spheret.runs.config import FREE
from spheret.runs.layout import CONFIG
from spheret.runs.run import open_run
from spheret.support import files
from spheret.support.errors import unknown
from spheret.train.loop import FINISHED, SIGNALS, STOPPED_BY_GUARD

NOT_THE_PAPER = "SMOKE: a toy model on another corpus for a minute. This is NOT the paper's recipe and shows nothing."


def batch(cell: Cell, processes: int) -> tuple[int, int]:
    """Sequences a process takes at a time, and how often: an update is the same for any number of processes."""
    _, training = cell.resolved(None)
    return split(training.tokens_per_update // training.block, processes, training.batch_size)


def train_words(cell: Cell, out: Path, data: Path | None, processes: int) -> list[str]:
    """`train` and its flags for one of so many processes; --resume starts where there is nothing to go on with."""
    options = cell.options(data, batch(cell, processes)[0])
    words = ["train", "--out", str(out / cell.name), *flags(options), "--resume"]
    return [*words, "--parallel", "ddp"] if processes > 1 else words


def launch(words: list[str], processes: int) -> list[str]:
    """The command that runs these words here."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=3", "-m"]
    return [*start, "spheret", *words]


def two_nodes(words: list[str], processes: int, name: str, nodes: str = "2", head: str = "HEAD") -> str:
    """The command for each node; they meet at a port of the first."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint={head}:29500 --rdzv-id={name} --max-restarts=3"
    return f"torchrun --nnodes={nodes} --nproc-per-node={processes} {meet} -m spheret {shlex.join(words)}"


def slurm(words: list[str], processes: int, name: str) -> str:
    """A batch script; a job that is requeued goes on with its run."""
    inside = two_nodes(words, processes, '"$SLURM_JOB_ID"', '"$SLURM_NNODES"', '"$head"')
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


def describe(cell: Cell, out: Path, data: Path | None, processes: int) -> str:
    """The resolved config, every number that follows from it, what is assumed, and the commands."""
    size, accumulation = batch(cell, processes)
    model, training = cell.resolved(data, size)
    node = processes if processes > 1 else GPUS_PER_NODE
    total = training.steps * training.tokens_per_update
    sequences = training.tokens_per_update // training.block
    lines = [
        f"{cell.name}: " + ("a smoke test" if cell.smoke else "the paper's recipe"),
        files.dump({"model": model.as_dict(), "train": training.as_dict()}).decode().rstrip(),
        f"parameters: {shape(model).parameters:,}",
        f"updates: {training.steps:,}, the first {training.warmup:,} of them warm-up, lr {training.lr:g} down to "
        f"{training.min_lr:g}",
        f"tokens: {training.tokens_per_update:,} an update, {total:,} in all",
        f"sequences: {sequences} an update = {processes} x {size} x accumulation {accumulation}",
        f"data: {cell.data(data)}" + ("" if prepared(cell, data) else f", not there yet: {prepare(cell, data)}"),
        "",
        "assumed, for the paper does not say:",
        *(f"- {line}" for line in cell.assumed),
    ]
    blocks = [
        ("here", [shlex.join(launch(train_words(cell, out, data, processes), processes))]),
        (f"one node of {node} GPUs", [one_node(cell, out, data, node)]),
    ]
    if sequences % (2 * node) == 0:
        words = train_words(cell, out, data, 2 * node)
        blocks += [
            (f"two nodes of {node} GPUs: on each, HEAD is the first one's name", [two_nodes(words, node, cell.name)]),
            ("Slurm: save as FILE, then sbatch FILE", slurm(words, node, cell.name).splitlines()),
        ]
    for title, body in blocks:
        lines += ["", f"# {title}", *body]
    return "\n".join(lines)


def one_node(cell: Cell, out: Path, data: Path | None, processes: int) -> str:
    words = shlex.join(train_words(cell, out, data, processes))
    return f"torchrun --standalone --nproc-per-node={processes} --max-restarts=3 -m spheret {words}"


def prepared(cell: Cell, data: Path | None) -> bool:
    return cell.smoke or (Path(cell.data(data)) / MANIFEST).exists()


def prepare(cell: Cell, data: Path | None) -> str:
    out = f" --out {shlex.quote(cell.data(data))}" if data is not None else ""
    return f"spheret prepare {cell.dataset} --tokenizer {TOKENIZER}{out}"


def state(cell: Cell, out: Path, data: Path | None) -> str:
    """done, not run, running, stopped, or how far it is; a directory that holds some other run is an error."""
    path = out / cell.name
    if not (path / CONFIG).exists():
        return "not run"
    run = open_run(path)
    model, training = cell.resolved(data)
    # the batch of a process depends on how many there are
    wanted = {**training.as_dict(), "scheme": model.scheme, "scheme_options": model.scheme_options}
    found = {**run.config["train"], **run.config["model"]}
    free = (*FREE, "batch_size")
    other = [key for key, value in wanted.items() if key not in free and found.get(key) != value]
    if other:
        raise ValueError(
            f"{path} is not this recipe's run, {other[0]} is {found.get(other[0])!r} there and {wanted[other[0]]!r} "
            "here: give another --out."
        )
    if run.is_locked():
        return "running"
    records = run.metrics()
    step = records[-1]["step"] if records else 0
    if records and "stopped" in records[-1]:
        return f"stopped at {step:,}"
    return "done" if step >= run.steps else f"at {step:,} of {run.steps:,}"


def run_cell(cell: Cell, out: Path, data: Path | None, processes: int) -> int:
    """Train it in processes of its own; Ctrl-C is theirs first, and they save."""
    if not prepared(cell, data):
        raise FileNotFoundError(f"{cell.dataset} is not prepared: run {prepare(cell, data)}")
    print(f"{cell.name}, assumed:", *(f"- {line}" for line in cell.assumed), sep="\n", file=sys.stderr)
    child = subprocess.Popen(launch(train_words(cell, out, data, processes), processes))
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait()
        return SIGNALS[signal.SIGINT]


def run_all(chosen: list[Cell], out: Path, data: Path | None, processes: int, dry_run: bool) -> int:
    """Show which cells are done, and run the others one after the other; one that diverges holds up none."""
    states = {cell: state(cell, out, data) for cell in chosen}
    width = max(len(cell.name) for cell in chosen)
    for cell, found in states.items():
        print(f"{cell.name:<{width}}  {found}")
    done = sum(found == "done" for found in states.values())
    print(f"{done} of {len(chosen)} done, in {out}", flush=True)
    diverged = 0
    for cell, found in states.items():
        if found in ("done", "running") or found.startswith("stopped"):
            continue
        if dry_run:
            print(shlex.join(launch(train_words(cell, out, data, processes), processes)))
            continue
        print(f"{cell.name}: from {found}", flush=True)
        code = run_cell(cell, out, data, processes)
        if code == STOPPED_BY_GUARD:
            diverged += 1
        elif code != FINISHED:
            print(f"{cell.name} ended with code {code}: run the same command again to go on.", file=sys.stderr)
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
) -> int:
    """Train one cell of the paper's tables with its hyperparameters, or all of them; run it again to go on.

    Args:
        dataset: fineweb-edu or openwebtext.
        size: S, M or L.
        scheme: pre-ln, pre-dyt, peri-ln, keel, geonorm, proj-spheretnorm, cay-spheretnorm or p-spheretnorm.
        all: every cell that is not done, or of those named by the other flags; shows which are.
        dry_run: run nothing; print the resolved config, what follows from it, and commands for nodes and Slurm.
        smoke: NOT the paper's recipe: a toy of the same flags for a minute, to see that it runs.
        out: the directory of the runs.
        data: the directory that holds fineweb-edu/ and openwebtext/ as spheret prepare wrote them; else the cache.
        nproc: processes on this machine, under torchrun if more than one; by default one a GPU.
    """
    for kind, given, allowed in (("dataset", dataset, DATASETS), ("size", size, SIZES), ("scheme", scheme, SCHEMES)):
        if given is not None and given not in allowed:
            raise unknown(kind, given, allowed)
        if given is None and not all:
            raise ValueError(f"--{kind} is needed, one of {', '.join(allowed)}; or --all.")
    out, data = out.expanduser(), None if data is None else data.expanduser()
    processes = nproc if nproc is not None else max(1, torch.cuda.device_count())
    chosen = [replace(cell, smoke=smoke) for cell in cells(dataset, size, scheme)]
    # a number of processes that does not divide an update is found before anything runs
    batch(chosen[0], processes)
    if smoke:
        print(NOT_THE_PAPER, file=sys.stderr)
    if all:
        return run_all(chosen, out, data, processes, dry_run)
    (cell,) = chosen
    if dry_run:
        print(describe(cell, out, data, processes))
        return FINISHED
    found = state(cell, out, data)
    if found == "done":
        print(f"{out / cell.name} is done.")
        return FINISHED
    return run_cell(cell, out, data, processes)
