"""`spheret bench scale`: what a training step costs against depth and width, and the power it grows with."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spheret.bench.timing import interleaved
from spheret.connections import SCHEMES
from spheret.data import cached
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import parameter_groups
from spheret.runs.run import open_run
from spheret.support.allocator import keep_freed_memory
from spheret.support.cache import cache_directory
from spheret.support.errors import unknown
from spheret.support.machine import cores, write_measurement

# a small vocabulary: the head's cost has nothing to do with depth
VOCAB, HEAD = 257, 32


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log seconds over log size, by least squares."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def _step(scheme: str, layers: int, width: int, block: int, batch: int) -> Callable[[], object]:
    """Forward, backward, clip and AdamW of a model of its own."""
    heads = max(1, width // HEAD)
    config = GPTConfig(layers=layers, heads=heads, width=width, block=block, vocab=VOCAB, scheme=scheme)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(config)
        x, y = torch.randint(VOCAB, (2, batch, block))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def run() -> None:
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def sweep(
    name: str, sizes: list[int], schemes: list[str], make: Callable[[str, int], Callable[[], object]], repeats: int,
    tick: Callable[[], object],
) -> dict[str, Any]:  # fmt: skip
    """A row a scheme: seconds at every size, all interleaved, and the fitted exponent."""
    runs = {f"{scheme} {size}": make(scheme, size) for scheme in schemes for size in sizes}
    seconds = interleaved(runs, repeats, tick)
    rows = []
    for scheme in schemes:
        took = [seconds[f"{scheme} {size}"] for size in sizes]
        rows.append({"scheme": scheme, "seconds": took, "exponent": exponent(sizes, took)})
    return {name: sizes, "rows": rows}


def _trained(directory: Path, processes: int, threads: int, steps: int, layers: int, width: int) -> float:
    """Tokens a second of `spheret train` under torchrun: the median of the second half of its steps."""
    out = directory / f"{processes}x{threads}"
    words = [
        "--scheme", "proj-spheretnorm", "--layers", layers, "--width", width, "--heads", width // HEAD,
        "--block", 128, "--batch-size", 4, "--tokens-per-update", 1024, "--steps", steps, "--eval-every", 0,
        "--checkpoint-every", steps, "--data", "sotu", "--threads", threads, "--no-tensorboard", "--quiet",
        "--out", out,
    ]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*launch, "-m", "spheret", "train", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"training on {processes} processes failed: {done.stderr.strip()[-500:]}")
    rates = [line["tokens_per_second"] for line in open_run(out).metrics()]
    return statistics.median(rates[len(rates) // 2 :])


def processes(steps: int, layers: int, width: int) -> list[dict[str, Any]]:
    """Tokens a second of the same updates by one process and by two, in turn, three times; medians."""
    cached("sotu", "bytes")
    found: dict[tuple[int, int], list[float]] = {(1, 1): [], (1, 2): [], (2, 1): []}
    for _ in range(3):
        for case, rates in found.items():
            with tempfile.TemporaryDirectory(prefix="scale-", dir=cache_directory()) as directory:
                rates.append(_trained(Path(directory), *case, steps, layers, width))
    return [
        {"processes": count, "threads": threads, "tokens/s": statistics.median(rates)}
        for (count, threads), rates in found.items()
    ]


def bench_scale(
    layers: str = "4,8,16,32,64",
    widths: str = "64,128,256,512",
    schemes: str = "pre-ln,proj-spheretnorm",
    depth_width: int = 128,
    width_layers: int = 4,
    block: int = 64,
    batch_size: int = 4,
    repeats: int = 5,
    steps: int = 40,
    json: Path | None = None,
) -> int:
    """Time a full step (forward, backward, clip, AdamW) on the CPU over depths and widths, interleaved.

    Args:
        layers: depths, separated by commas.
        widths: widths, multiples of 32, separated by commas.
        schemes: names separated by commas.
        depth_width: the width of the models that differ in depth.
        width_layers: the depth of the models that differ in width.
        block: tokens a sequence.
        batch_size: sequences a step.
        repeats: rounds; the median is printed.
        steps: updates of the runs on one process and on two; 0 leaves them out.
        json: also write the table here.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    depths, wide = _numbers("layers", layers), _numbers("widths", widths)
    for width in (*wide, depth_width):
        if width % HEAD:
            raise ValueError(f"a width must be a multiple of {HEAD}, the width of a head, got {width}.")
    names = schemes.split(",")
    for name in names:
        if name not in SCHEMES:
            raise unknown("scheme", name, SCHEMES)
    if min(width_layers, block, batch_size, repeats) < 1:
        raise ValueError("width_layers, block, batch_size and repeats must be at least 1.")
    keep_freed_memory()
    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("steps", total=len(names) * (len(depths) + len(wide)) * (repeats + 2))

        def tick() -> None:
            bar.advance(task)

        def deep(scheme: str, size: int) -> Callable[[], object]:
            return _step(scheme, size, depth_width, block, batch_size)

        def broad(scheme: str, size: int) -> Callable[[], object]:
            return _step(scheme, width_layers, size, block, batch_size)

        depth = {"width": depth_width, **sweep("layers", depths, names, deep, repeats, tick)}
        breadth = {"depth": width_layers, **sweep("widths", wide, names, broad, repeats, tick)}
    tokens = block * batch_size
    console.print(_table(Table(title=f"ms a step by layers, width {depth_width}, {tokens} tokens"), depths, depth))
    console.print(_table(Table(title=f"ms a step by width, {width_layers} layers, {tokens} tokens"), wide, breadth))
    console.print(
        "exponent: the slope of log time over log size. Linear in depth is 1; in width it lies between 1 (rows of "
        "the stream) and 2 (matrix products). Medians of interleaved steps."
    )
    shared = processes(steps, 4, depth_width) if steps else []
    if shared:
        table = Table("processes", "threads each", "tokens/s", title=f"spheret train, 4 layers, width {depth_width}")
        for row in shared:
            table.add_row(str(row["processes"]), str(row["threads"]), f"{row['tokens/s']:,.0f}")
        console.print(table)
        console.print(
            f"These processes share the {cores()} cores of one machine: this shows the price of gradients sent "
            "through gloo, not how training grows over machines."
        )
    result = {"depth": depth, "width": breadth, "processes": shared or "not run"}
    write_measurement(json, {"block": block, "batch_size": batch_size, "repeats": repeats, **result})
    return 0


def _numbers(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words) or len(set(map(int, words))) < 2:
        raise ValueError(f"{name} must be at least two different positive numbers separated by commas, got {text!r}.")
    return sorted({int(word) for word in words})


def _table(table: Any, sizes: list[int], found: dict[str, Any]) -> Any:
    table.add_column("", no_wrap=True)
    for column in (*map(str, sizes), "exponent"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(row["scheme"], *(f"{s * 1e3:.1f}" for s in row["seconds"]), f"{row['exponent']:.2f}")
    return table
