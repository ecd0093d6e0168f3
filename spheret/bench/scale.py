"""`spheret bench scale`: the time of a training step at several depths and widths, and the exponent of its growth."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spheret.connections.parse import SchemeChoice, parse_schemes
from spheret.data import cached
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import parameter_groups
from spheret.plan.fits import check_training
from spheret.runs.run import open_run
from spheret.support.allocator import keep_freed_memory
from spheret.support.cache import cache_directory
from spheret.support.child import python_environment, spheret_command
from spheret.support.files import check_output_file
from spheret.support.machine import cores, write_measurement
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts, counts
from spheret.support.timing import exponent, interleaved

# the head's cost does not depend on depth, so the vocabulary is small
VOCAB, HEAD = 257, 32


def training_step(choice: SchemeChoice, layers: int, width: int, block: int, batch: int) -> Callable[[], object]:
    """A function that runs one training step of a new model: forward, backward, clip and AdamW."""
    config = GPTConfig(
        layers=layers,
        heads=max(1, width // HEAD),
        width=width,
        block=block,
        vocab=VOCAB,
        scheme=choice.name,
        scheme_options=choice.options,
    )
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
    name: str,
    sizes: list[int],
    choices: list[SchemeChoice],
    build: Callable[[SchemeChoice, int], Callable[[], object]],
    repeats: int,
    tick: Callable[[], object],
) -> dict[str, Any]:
    """One row per scheme: seconds at every size, all of them interleaved, and the fitted exponent."""
    contestants = {f"{choice.label} {size}": build(choice, size) for choice in choices for size in sizes}
    medians = interleaved(contestants, repeats, tick)
    rows = []
    for choice in choices:
        seconds = [medians[f"{choice.label} {size}"] for size in sizes]
        rows.append({"scheme": choice.label, "seconds": seconds, "exponent": exponent(sizes, seconds)})
    return {name: sizes, "rows": rows}


def _trained(directory: Path, processes: int, threads: int, steps: int, layers: int, width: int) -> float:
    """Tokens per second of `spheret train` under torchrun: the median of the second half of its steps."""
    out = directory / f"{processes}x{threads}"
    words = [
        "--scheme", "proj-spheretnorm", "--layers", layers, "--width", width, "--heads", width // HEAD,
        "--block", 128, "--batch-size", 4, "--tokens-per-update", 1024, "--steps", steps, "--eval-every", 0,
        "--checkpoint-every", steps, "--data", "sotu", "--threads", threads, "--no-tensorboard", "--quiet",
        "--out", out,
    ]  # fmt: skip
    command = spheret_command(["train", *map(str, words)], processes)
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment())
    if done.returncode:
        raise RuntimeError(f"training on {processes} processes failed: {done.stderr.strip()[-500:]}")
    rates = [line["tokens_per_second"] for line in open_run(out).metrics()]
    return statistics.median(rates[len(rates) // 2 :])


def processes(steps: int, layers: int, width: int) -> list[dict[str, Any]]:
    """Tokens per second of the same updates by one process and by two: medians of three interleaved rounds."""
    cached("sotu", "bytes")
    cases: dict[tuple[int, int], list[float]] = {(1, 1): [], (1, 2): [], (2, 1): []}
    for _ in range(3):
        for case, rates in cases.items():
            with tempfile.TemporaryDirectory(prefix="scale-", dir=cache_directory()) as directory:
                rates.append(_trained(Path(directory), *case, steps, layers, width))
    return [
        {"processes": count, "threads": threads, "tokens/s": statistics.median(rates)}
        for (count, threads), rates in cases.items()
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
    """Time a full step (forward, backward, clip, AdamW) on the CPU at several depths and widths, interleaved.

    Args:
        layers: numbers of blocks, separated by commas.
        widths: widths, multiples of 32, separated by commas.
        schemes: "paper" for its nine, "all", or names separated by commas; scheme:option=value sets an option.
        depth_width: the width of the models that differ in depth.
        width_layers: the depth of the models that differ in width.
        block: tokens per sequence.
        batch_size: sequences per step.
        repeats: rounds; the median is printed.
        steps: updates of the comparison of one process with two; 0 leaves it out.
        json: also write the table here.
    """
    from rich.console import Console
    from rich.table import Table

    check_counts(depth_width=depth_width, width_layers=width_layers, block=block, batch_size=batch_size)
    check_counts(repeats=repeats)
    check_counts(0, steps=steps)
    check_output_file("--json", json)
    depths, wide = _numbers("layers", layers), _numbers("widths", widths)
    for width in (*wide, depth_width):
        if width % HEAD:
            raise ValueError(f"a width must be a multiple of {HEAD}, the width of a head, got {width}.")
    choices = parse_schemes(schemes)
    for depth, width in ((max(depths), depth_width), (width_layers, max(wide))):
        largest = GPTConfig(layers=depth, heads=1, width=width, block=block, vocab=VOCAB)
        check_training(largest, batch_size * block, "float32", torch.device("cpu"))
    keep_freed_memory()
    console = Console()
    total, done = len(choices) * (len(depths) + len(wide)) * (repeats + 2), 0

    def tick() -> None:
        nonlocal done
        done += 1
        meter.show(f"{done} of {total} steps", done / total)

    def deep(choice: SchemeChoice, size: int) -> Callable[[], object]:
        return training_step(choice, size, depth_width, block, batch_size)

    def broad(choice: SchemeChoice, size: int) -> Callable[[], object]:
        return training_step(choice, width_layers, size, block, batch_size)

    with Meter("bench scale") as meter:
        deeper = {"width": depth_width, **sweep("layers", depths, choices, deep, repeats, tick)}
        broader = {"depth": width_layers, **sweep("widths", wide, choices, broad, repeats, tick)}
    tokens = block * batch_size
    console.print(_table(Table(title=f"ms per step by layers, width {depth_width}, {tokens} tokens"), depths, deeper))
    console.print(_table(Table(title=f"ms per step by width, {width_layers} layers, {tokens} tokens"), wide, broader))
    console.print(
        "exponent: the slope of log time over log size. In depth, linear growth is 1. In width it lies between 1 "
        "(rows of the stream) and 2 (matrix products). Times are medians of interleaved steps."
    )
    shared = processes(steps, 4, depth_width) if steps else []
    if shared:
        table = Table(
            "processes", "threads per process", "tokens/s", title=f"spheret train, 4 layers, width {depth_width}"
        )
        for row in shared:
            table.add_row(str(row["processes"]), str(row["threads"]), f"{row['tokens/s']:,.0f}")
        console.print(table)
        console.print(
            f"These processes share the {cores()} cores of one machine. The table shows the cost of sending "
            "gradients through gloo; it does not show how training scales over machines."
        )
    result = {"depth": deeper, "width": broader, "processes": shared or "not run"}
    write_measurement(json, {"block": block, "batch_size": batch_size, "repeats": repeats, **result})
    return 0


def _numbers(name: str, text: str) -> list[int]:
    numbers = sorted(set(counts(f"--{name}", text)))
    if len(numbers) < 2:
        raise ValueError(f"--{name} must be at least two different positive numbers with commas, got {text!r}.")
    return numbers


def _table(table: Any, sizes: list[int], swept: dict[str, Any]) -> Any:
    table.add_column("", no_wrap=True)
    for column in (*map(str, sizes), "exponent"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in swept["rows"]:
        table.add_row(row["scheme"], *(f"{s * 1e3:.1f}" for s in row["seconds"]), f"{row['exponent']:.2f}")
    return table
