"""Time a training step at several depths and widths, and fit the exponent of its growth.

python benchmarks/scale.py --steps 20
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Comparison, adamw, begin, check_sizes, exponent, medians, print_table, run, training_step, write

from spheret.data import cached
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs.run import open_run
from spheret.support.cache import cache_directory
from spheret.support.child import python_environment, spheret_command
from spheret.support.machine import cores
from spheret.support.ranges import check_counts

SCHEMES = ("pre-ln", "proj-spheretnorm")
# the head's cost does not depend on depth, so the vocabulary is small
VOCAB, HEAD = 257, 32
BLOCK, BATCH = 64, 4
# the width of the models that differ in depth, and the depth of those that differ in width
WIDTH, DEPTH = 128, 4
SHORT = ("--layers", "4", "16", "--widths", "64", "256", "--repeats", "3", "--steps", "0")


def new_step(scheme: str, layers: int, width: int) -> Callable[[], object]:
    """A function that runs one training step of a new model: forward, backward, clip and AdamW."""
    heads = max(1, width // HEAD)
    sizes = {"layers": layers, "heads": heads, "width": width, "block": BLOCK, "vocab": VOCAB}
    config = GPTConfig(**sizes, scheme=scheme, head="tied", head_bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(config)
        x, y = torch.randint(VOCAB, (2, BATCH, BLOCK))
    return training_step(model, model, adamw(model), [(x, y)])


def sweep(
    name: str, sizes: list[int], build: Callable[[str, int], Callable[[], object]], repeats: int
) -> dict[str, Any]:
    """One row per scheme: seconds at every size, all of them interleaved, and the fitted exponent."""
    steps = {f"{scheme} {size}": build(scheme, size) for scheme in SCHEMES for size in sizes}
    times = medians(f"scale, {name}", steps, repeats)
    rows = []
    for scheme in SCHEMES:
        seconds = [times[f"{scheme} {size}"] for size in sizes]
        rows.append({"scheme": scheme, "seconds": seconds, "exponent": exponent(sizes, seconds)})
    return {name: sizes, "rows": rows}


def _trained(directory: Path, processes: int, threads: int, steps: int, layers: int, width: int) -> float:
    """Tokens per second of `spheret train` under torchrun: the median of the second half of its steps."""
    out = directory / f"{processes}x{threads}"
    words = [
        "--scheme", "proj-spheretnorm", "--layers", layers, "--width", width, "--heads", width // HEAD,
        "--block", 128, "--batch-size", 4, "--set", "train.tokens_per_update=1024", "--steps", steps,
        "--set", f"train.checkpoint_every={steps}", "--eval-every", 0, "--data", "sotu", "--threads", threads,
        "--quiet", "--out", out,
    ]  # fmt: skip
    command = spheret_command(["train", *map(str, words)], processes)
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment())
    if done.returncode:
        raise RuntimeError(f"training on {processes} processes failed: {done.stderr.strip()[-500:]}")
    rates = [line.tokens_per_second or 0.0 for line in open_run(out).metrics()]
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


def main(
    layers: tuple[int, ...] = (4, 8, 16, 32, 64),
    widths: tuple[int, ...] = (64, 128, 256, 512),
    repeats: int = 5,
    steps: int = 40,
    json: Path | None = None,
) -> None:
    """Time a full step (forward, backward, clip, AdamW) on the CPU at several depths and widths, interleaved.

    Args:
        layers: numbers of blocks, of models of width 128.
        widths: widths, of models of 4 blocks.
        repeats: rounds; the median is printed.
        steps: updates of the comparison of one process with two; 0 leaves it out.
        json: also write the table here.
    """
    begin(json, "cpu", repeats=repeats)
    check_counts(0, steps=steps)
    check_sizes(layers=layers, widths=widths)
    depths, broad = sorted(set(layers)), sorted(set(widths))
    deeper = {"width": WIDTH, **sweep("layers", depths, lambda scheme, size: new_step(scheme, size, WIDTH), repeats)}
    broader = {"depth": DEPTH, **sweep("widths", broad, lambda scheme, size: new_step(scheme, DEPTH, size), repeats)}
    _print(f"ms per step by layers, width {WIDTH}, {BLOCK * BATCH} tokens", depths, deeper)
    _print(f"ms per step by width, {DEPTH} layers, {BLOCK * BATCH} tokens", broad, broader)
    print(
        "exponent: the slope of log time over log size. In depth, linear growth is 1. In width it lies between 1 "
        "(rows of the stream) and 2 (matrix products). Times are medians of interleaved steps."
    )
    shared = processes(steps, DEPTH, WIDTH) if steps else []
    if shared:
        print_table(
            f"spheret train, {DEPTH} layers, width {WIDTH}",
            ["processes", "threads per process", "tokens/s"],
            [[str(row["processes"]), str(row["threads"]), f"{row['tokens/s']:,.0f}"] for row in shared],
        )
        print(
            f"These processes share the {cores()} cores of one machine. The table shows the cost of sending "
            "gradients through gloo; it does not show how training scales over machines."
        )
    result = {"depth": deeper, "width": broader, "processes": shared or "not run"}
    write(json, {"block": BLOCK, "batch_size": BATCH, "repeats": repeats, **result})


def _print(title: str, sizes: list[int], swept: dict[str, Any]) -> None:
    rows = [
        [row["scheme"], *(f"{seconds * 1e3:.1f}" for seconds in row["seconds"]), f"{row['exponent']:.2f}"]
        for row in swept["rows"]
    ]
    print_table(title, ["", *map(str, sizes), "exponent"], rows)


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The deepest and the widest proj-spheretnorm, against pre-ln of the same size."""
    found = []
    for part, sizes, unit in (("depth", "layers", "layers"), ("width", "widths", "wide")):
        rival, ours = (row["seconds"][-1] for row in result[part]["rows"])
        found.append(Comparison(f"a step of a model {result[part][sizes][-1]} {unit}, against pre-ln", ours, rival))
    return found


if __name__ == "__main__":
    run(main)
