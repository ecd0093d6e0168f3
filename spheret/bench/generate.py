"""`spheret bench generate`: time generation with a cache, of `GPT` and of transformers' GPT-2 of the same size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.model.gpt import GPT, PRESETS, GPTConfig
from spheret.plan.fits import check_generating
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import unknown
from spheret.support.files import check_output_file
from spheret.support.machine import resolve_device, write_measurement
from spheret.support.ranges import check_counts, counts
from spheret.support.timing import WARM_UP, interleaved, progress

RIVAL = "transformers GPT-2"
CONTESTANTS = ("pre-ln", "proj-spheretnorm")


def _generate(model: GPT, prompt: Tensor, new: int) -> Callable[[], object]:
    return lambda: model.generate(prompt, new, temperature=0)


def _generate_rival(model: Any, prompt: Tensor, new: int) -> Callable[[], object]:
    # no token ends the text, so that all generate equally many
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def bench_generate(
    size: str = "S",
    prompt: int = 64,
    new: int = 128,
    batches: str = "1,8",
    repeats: int = 5,
    device: str | None = None,
    json: Path | None = None,
) -> int:
    """Measure tokens per second of greedy generation with random weights.

    Args:
        size: S, M or L.
        prompt: tokens in the prompt.
        new: tokens to generate.
        batches: batch sizes, separated by commas.
        repeats: rounds; the median is printed.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the table to this file.
    """
    from rich.console import Console
    from rich.table import Table

    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    check_counts(prompt=prompt, new=new, repeats=repeats)
    check_output_file("--json", json)
    sizes = counts("--batches", batches)
    place = resolve_device(device)
    check_generating(config := GPTConfig.preset(size), max(sizes), prompt + new, place)
    if prompt + new > config.block:
        raise ValueError(
            f"--prompt and --new are {prompt + new:,} tokens, and a model has {config.block:,}: take fewer."
        )
    from spheret.hub import to_gpt2

    keep_freed_memory()
    torch.manual_seed(0)
    models = {
        name: GPT(GPTConfig.preset(size, scheme=name, activation="gelu_tanh")).eval().to(place)
        for name in CONTESTANTS
    }
    rival = to_gpt2(models["pre-ln"])
    rows: list[dict[str, Any]] = []
    with progress("bench generate", len(sizes) * (len(CONTESTANTS) + 1) * (repeats + WARM_UP)) as tick:
        for batch in sizes:
            tokens = torch.randint(50257, (batch, prompt)).to(place)
            runs = {name: _generate(model, tokens, new) for name, model in models.items()}
            runs[RIVAL] = _generate_rival(rival, tokens, new)
            seconds = interleaved(runs, repeats, tick)
            rows += [
                {
                    "name": name,
                    "batch": batch,
                    "tokens/s": batch * new / took,
                    "x transformers": seconds[RIVAL] / took,
                    "x pre-ln": seconds["pre-ln"] / took,
                }
                for name, took in seconds.items()
            ]
    table = Table(title=f"{size}: {prompt} tokens, then {new} more, {place}, {torch.get_num_threads()} threads")
    table.add_column("")
    for column in ("batch", "tokens/s", "x transformers", "x pre-ln"):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = (f"{row[key]:.3f}" for key in ("x transformers", "x pre-ln"))
        table.add_row(row["name"], str(row["batch"]), f"{row['tokens/s']:.1f}", *ratios)
    Console().print(table)
    settings = {"size": size, "prompt": prompt, "new": new, "repeats": repeats, "device": str(place)}
    write_measurement(json, {**settings, "table": rows})
    return 0
