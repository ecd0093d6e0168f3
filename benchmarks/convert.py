"""Time a training step of a Llama before and after its conversion.

python benchmarks/convert.py --cpu-time
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    Comparison,
    begin,
    conditions,
    llama,
    medians,
    next_token_loss,
    print_table,
    run,
    share_parameters,
    training_step,
    write,
)
from torch import nn

from spheret.conversion import anneal, convert

ORIGINAL, CONVERTED = "original", "converted, t = 1"
# the three ways that a converted model computes by, each with its position t
POSITIONS = {"converted, t = 0": 0.0, "converted, t = 0.5": 0.5, CONVERTED: 1.0}
VOCABULARY, SCHEME = 8192, "proj-spheretnorm"
SHORT = ("--layers", "2", "--width", "256", "--repeats", "3")


def _llama(sizes: dict[str, int]) -> nn.Module:
    layers, heads, width, block = (sizes[name] for name in ("layers", "heads", "width", "block"))
    return llama(layers, heads, width, 8 * width // 3, block, VOCABULARY)


def contestants(sizes: dict[str, int], place: torch.device) -> dict[str, Callable[[], object]]:
    """A step of the original and of the converted model at three positions t. All of them share their weights."""
    original = _llama(sizes).to(place)
    models = {ORIGINAL: original}
    for name, t in POSITIONS.items():
        model = _llama(sizes).to(place)
        share_parameters(model, original)
        convert(model, SCHEME)
        anneal(model, t)
        models[name] = model
    generator = torch.Generator().manual_seed(0)
    shape = (sizes["batch_size"], sizes["block"] + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator).to(place)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(model: nn.Module) -> Callable[[], object]:
        # one for each: a step of AdamW also puts the step sizes that it holds back into their interval
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        return training_step(model, partial(next_token_loss, model), optimizer, [batch], "float32")

    return {name: step(model) for name, model in models.items()}


def main(
    layers: int = 4,
    heads: int = 8,
    width: int = 512,
    block: int = 256,
    batch_size: int = 4,
    repeats: int = 15,
    cpu_time: bool = False,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Time a training step of transformers' Llama before and after its conversion, interleaved in one process.

    Args:
        layers: decoder layers.
        heads: attention heads.
        width: the width of the stream.
        block: tokens per sequence.
        batch_size: sequences per step.
        repeats: rounds; the median is printed.
        cpu_time: measure the CPU time of this process instead of the wall clock. Use it with one thread if other
            work shares the machine.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the numbers to this file.
    """
    sizes = {"layers": layers, "heads": heads, "width": width, "block": block, "batch_size": batch_size}
    place = begin(json, device, repeats=repeats, **sizes)
    if width % (2 * heads):
        raise SystemExit(f"--width must be a multiple of twice --heads, got {width} and {heads}.")
    seconds = medians("convert", contestants(sizes, place), repeats, cpu_time)
    ratios = {name: took / seconds[ORIGINAL] for name, took in seconds.items()}
    print_table(
        f"Llama, {layers} x {width}, {batch_size} x {block} tokens, {conditions(place)}",
        ["", "ms", "x original"],
        [[name, f"{took * 1e3:.1f}", f"{ratios[name]:.3f}"] for name, took in seconds.items()],
    )
    print("Medians of interleaved steps: forward, backward, clip and AdamW.")
    settings: dict[str, Any] = {**sizes, "scheme": SCHEME, "repeats": repeats, "cpu_time": cpu_time}
    write(json, {**settings, "device": str(place), "seconds": seconds, "over_original": ratios})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The converted model at the end of its annealing against the original."""
    seconds, shape = result["seconds"], f"{result['layers']} layers of width {result['width']}"
    return [Comparison(f"a step of a converted Llama, {shape}, against it", seconds[CONVERTED], seconds[ORIGINAL])]


if __name__ == "__main__":
    run(main)
