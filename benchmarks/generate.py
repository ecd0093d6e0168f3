"""Time generation with a cache, of `GPT` and of transformers' GPT-2 of the same size.

python benchmarks/generate.py --batches 1
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Comparison, begin, conditions, medians, print_table, run, write
from torch import Tensor

from spheret.model.gpt import GPT, GPTConfig
from spheret.support.ranges import check_count, counts

RIVAL = "transformers GPT-2"
CONTESTANTS = ("pre-ln", "proj-spheretnorm")
# the size of the models, and the tokens of the prompt
SIZE, PROMPT = "S", 64
SHORT = ("--new", "8", "--batches", "1", "--repeats", "1")


def _generate(model: GPT, prompt: Tensor, new: int) -> Callable[[], object]:
    return lambda: model.generate(prompt, new, temperature=0)


def _generate_rival(model: Any, prompt: Tensor, new: int) -> Callable[[], object]:
    # no token ends the text, so that all generate equally many
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def main(
    new: int = 128,
    batches: str = "1,8",
    repeats: int = 5,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Measure tokens per second of greedy generation with random weights, after a prompt of 64 tokens.

    Args:
        new: tokens to generate.
        batches: batch sizes, separated by commas.
        repeats: rounds; the median is printed.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the table to this file.
    """
    place = begin(json, device, repeats=repeats)
    check_count("--new", new, most=GPTConfig.preset(SIZE).block - PROMPT)
    sizes = counts("--batches", batches)
    # transformers looks for its cache when it is imported
    from spheret.hub import to_gpt2

    torch.manual_seed(0)
    models = {
        name: GPT(GPTConfig.preset(SIZE, scheme=name, activation="gelu_tanh")).eval().to(place)
        for name in CONTESTANTS
    }
    rival = to_gpt2(models["pre-ln"])
    rows: list[dict[str, Any]] = []
    for batch in sizes:
        tokens = torch.randint(50257, (batch, PROMPT)).to(place)
        runs = {name: _generate(model, tokens, new) for name, model in models.items()}
        runs[RIVAL] = _generate_rival(rival, tokens, new)
        seconds = medians(f"generate, batch {batch}", runs, repeats)
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
    print_table(
        f"{SIZE}: {PROMPT} tokens, then {new} more, {conditions(place)}",
        ["", "batch", "tokens/s", "x transformers", "x pre-ln"],
        [
            [
                row["name"],
                str(row["batch"]),
                f"{row['tokens/s']:.1f}",
                *(f"{row[key]:.3f}" for key in ("x transformers", "x pre-ln")),
            ]
            for row in rows
        ],
    )
    settings = {"size": SIZE, "prompt": PROMPT, "new": new, "repeats": repeats, "device": str(place)}
    write(json, {**settings, "table": rows})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """A token of proj-spheretnorm against one of transformers' GPT-2."""
    rates = {(row["name"], row["batch"]): row["tokens/s"] for row in result["table"]}
    return [
        Comparison(f"a generated token, batch {batch}, against {RIVAL}", 1 / rate, 1 / rates[RIVAL, batch])
        for (name, batch), rate in rates.items()
        if name == "proj-spheretnorm"
    ]


if __name__ == "__main__":
    run(main)
