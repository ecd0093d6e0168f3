"""`spheret bench certify`: what a certificate costs, and how that grows with layers and with tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from spheret.analysis.certificate import certify
from spheret.analysis.threads import few_threads
from spheret.bench.timing import interleaved
from spheret.connections import SCHEMES
from spheret.model.gpt import GPT, GPTConfig
from spheret.support.errors import unknown
from spheret.support.machine import write_measurement

BLOCK, VOCAB = 64, 256


def _task(scheme: str, layers: int, width: int, tokens: int, sequence: int) -> Callable[[], object]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=layers, heads=4, width=width, block=BLOCK, vocab=VOCAB, scheme=scheme))
        ids = torch.randint(VOCAB, (-(-tokens // BLOCK), BLOCK))
    return lambda: certify(model, ids, tokens, sequence)


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log seconds over log size, by least squares: 1 is linear."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in x)


def bench_certify(
    scheme: str = "proj-spheretnorm",
    width: int = 64,
    layers: tuple[int, ...] = (3, 6, 12, 24),
    tokens: tuple[int, ...] = (32, 64, 128, 256),
    repeats: int = 3,
    json: Path | None = None,
) -> int:
    """Time certificates of untrained models; all take turns, medians are kept, and exponents fitted.

    Args:
        scheme: the scheme of the models.
        width: the width of the stream.
        layers: blocks, at 64 tokens and a whole sequence of 8.
        tokens: tokens, at 6 blocks and no whole sequence.
        repeats: rounds.
        json: also write the numbers here.
    """
    if scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    if len(layers) < 2 or len(tokens) < 2 or min(*layers, *tokens, repeats) < 1:
        raise ValueError(f"layers and tokens must each be two or more positive numbers, got {layers} and {tokens}.")
    tasks = {f"layers {n}": _task(scheme, n, width, BLOCK, 8) for n in layers}
    tasks |= {f"tokens {n}": _task(scheme, 6, width, n, 0) for n in tokens}
    with few_threads(width):
        seconds = interleaved(tasks, repeats)
    found = {
        "layers": {n: seconds[f"layers {n}"] for n in layers},
        "tokens": {n: seconds[f"tokens {n}"] for n in tokens},
    }
    exponents = {name: exponent(list(row), list(row.values())) for name, row in found.items()}
    for name, row in found.items():
        timings = ", ".join(f"{n}: {took:.2f} s" for n, took in row.items())
        print(f"{name}: {timings}; seconds grow as {name} to the power {exponents[name]:.2f}")
    result = {"scheme": scheme, "width": width, "repeats": repeats, "seconds": found, "exponents": exponents}
    write_measurement(json, result)
    return 0
