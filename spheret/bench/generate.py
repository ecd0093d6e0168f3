"""`spheret bench generate`: cached generation against transformers' GPT-2 of the same size, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.bench.timing import interleaved
from spheret.model.gpt import GPT, PRESETS, GPTConfig
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import unknown
from spheret.support.machine import write_measurement

RIVAL = "transformers GPT-2"
SCHEMES = ("pre-ln", "proj-spheretnorm")


def _ours(model: GPT, prompt: Tensor, new: int) -> Callable[[], object]:
    return lambda: model.generate(prompt, new, temperature=0)


def _theirs(model: Any, prompt: Tensor, new: int) -> Callable[[], object]:
    # no token ends a text here, so all give as many
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def bench_generate(
    size: str = "S",
    prompt: int = 64,
    new: int = 128,
    batches: str = "1,8",
    repeats: int = 5,
    json: Path | None = None,
) -> int:
    """Tokens per second of greedy generation with random weights on the CPU, interleaved, medians.

    Args:
        size: S, M or L.
        prompt: tokens of the prompt.
        new: tokens to generate.
        batches: batch sizes, separated by commas.
        repeats: rounds; the median is printed.
        json: also write the table here.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from spheret.hub import to_gpt2

    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    keep_freed_memory()
    torch.manual_seed(0)
    models = {name: GPT(GPTConfig.preset(size, scheme=name, activation="gelu_tanh")).eval() for name in SCHEMES}
    rival = to_gpt2(models["pre-ln"])
    table: list[dict[str, Any]] = []
    console = Console()
    sizes = [int(batch) for batch in batches.split(",")]
    with Progress(console=console, transient=True) as bar:
        rounds = bar.add_task("generating", total=len(sizes) * (len(SCHEMES) + 1) * (repeats + 2))
        for batch in sizes:
            tokens = torch.randint(50257, (batch, prompt))
            runs = {name: _ours(model, tokens, new) for name, model in models.items()}
            runs[RIVAL] = _theirs(rival, tokens, new)
            took = interleaved(runs, repeats, lambda: bar.advance(rounds))
            table += [
                {
                    "name": name,
                    "batch": batch,
                    "tokens/s": batch * new / seconds,
                    "x transformers": took[RIVAL] / seconds,
                    "x pre-ln": took["pre-ln"] / seconds,
                }
                for name, seconds in took.items()
            ]
    shown = Table(title=f"{size}: {prompt} tokens, then {new} more, {torch.get_num_threads()} threads")
    shown.add_column("")
    for column in ("batch", "tokens/s", "x transformers", "x pre-ln"):
        shown.add_column(column, justify="right")
    for row in table:
        ratios = (f"{row[key]:.3f}" for key in ("x transformers", "x pre-ln"))
        shown.add_row(row["name"], str(row["batch"]), f"{row['tokens/s']:.1f}", *ratios)
    console.print(shown)
    write_measurement(json, {"size": size, "prompt": prompt, "new": new, "repeats": repeats, "table": table})
    return 0
