"""`spheret bench convert`: time a training step of a Llama before and after its conversion."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spheret.conversion import anneal, convert
from spheret.finetune.training import next_token_loss
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import need
from spheret.support.files import check_output_file
from spheret.support.machine import check_bytes, resolve_device, write_measurement
from spheret.support.ranges import check_counts
from spheret.support.timing import WARM_UP, interleaved, progress
from spheret.train.step_cost import share_parameters, training_step

ORIGINAL = "original"
# the three ways that a converted model computes by, each with its position t
POSITIONS = {"converted, t = 0": 0.0, "converted, t = 0.5": 0.5, "converted, t = 1": 1.0}
VOCABULARY = 8192


def _llama(sizes: dict[str, int]) -> nn.Module:
    transformers = need("transformers", "hub")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=sizes["width"], intermediate_size=8 * sizes["width"] // 3,
            num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["block"], use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).train()


def contestants(
    sizes: dict[str, int], scheme: str, place: torch.device, lr: float = 1e-4
) -> dict[str, Callable[[], object]]:
    """A step of the original and of the converted model at three positions t. All of them share their weights."""
    original = _llama(sizes).to(place)
    models = {ORIGINAL: original}
    for name, t in POSITIONS.items():
        model = _llama(sizes).to(place)
        share_parameters(model, original)
        convert(model, scheme)
        anneal(model, t)
        models[name] = model
    generator = torch.Generator().manual_seed(0)
    shape = (sizes["batch_size"], sizes["block"] + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator).to(place)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(model: nn.Module) -> Callable[[], object]:
        # one for each: a step of AdamW also puts the step sizes that it holds back into their interval
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return next_token_loss(model, x, y)

        return training_step(model, loss, optimizer, [batch], "float32")

    return {name: step(model) for name, model in models.items()}


def bench_convert(
    layers: int = 4,
    heads: int = 8,
    width: int = 512,
    block: int = 256,
    batch_size: int = 4,
    scheme: str = "proj-spheretnorm",
    repeats: int = 15,
    cpu_time: bool = False,
    device: str | None = None,
    json: Path | None = None,
) -> int:
    """Time a training step of transformers' Llama before and after its conversion, interleaved in one process.

    Args:
        layers: decoder layers.
        heads: attention heads.
        width: the width of the stream.
        block: tokens per sequence.
        batch_size: sequences per step.
        scheme: a spherical scheme.
        repeats: rounds; the median is printed.
        cpu_time: measure the CPU time of this process instead of the wall clock. Use it with one thread if other
            work shares the machine.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the numbers to this file.
    """
    from rich.console import Console
    from rich.table import Table

    check_counts(layers=layers, heads=heads, width=width, block=block, batch_size=batch_size, repeats=repeats)
    check_output_file("--json", json)
    if width % (2 * heads):
        raise ValueError(f"--width must be a multiple of twice --heads, got {width} and {heads}.")
    place = resolve_device(device)
    sizes = {"layers": layers, "heads": heads, "width": width, "block": block, "batch_size": batch_size}
    parameters = 2 * VOCABULARY * width + 12 * layers * width * width
    check_bytes(
        16 * parameters + 40 * batch_size * block * (VOCABULARY + layers * width), place, "this model",
        "take a smaller one",
    )  # fmt: skip
    keep_freed_memory()
    clock = time.process_time if cpu_time else time.perf_counter
    with progress("bench convert", (1 + len(POSITIONS)) * (repeats + WARM_UP)) as tick:
        seconds = interleaved(contestants(sizes, scheme, place), repeats, tick, clock)
    threads = torch.get_num_threads()
    table = Table(
        title=f"Llama, {layers} x {width}, {batch_size} x {block} tokens, {scheme}, {place}, {threads} threads"
    )
    for column in ("", "ms", "x original"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, took in seconds.items():
        table.add_row(name, f"{took * 1e3:.1f}", f"{took / seconds[ORIGINAL]:.3f}")
    console = Console()
    console.print(table)
    console.print("Medians of interleaved steps: forward, backward, clip and AdamW.")
    ratios = {name: took / seconds[ORIGINAL] for name, took in seconds.items()}
    settings: dict[str, Any] = {**sizes, "scheme": scheme, "repeats": repeats, "cpu_time": cpu_time}
    write_measurement(json, {**settings, "device": str(place), "seconds": seconds, "over_original": ratios})
    return 0
