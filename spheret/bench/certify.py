"""`spheret bench certify`: the time of a certificate, and how it grows with blocks and with tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from spheret.analysis.certificate import certify
from spheret.model.gpt import GPT, GPTConfig
from spheret.plan.fits import check_training
from spheret.support.files import check_output_file
from spheret.support.machine import write_measurement
from spheret.support.meter import Meter
from spheret.support.ranges import check_count, check_counts
from spheret.support.threads import few_threads
from spheret.support.timing import exponent, interleaved

BLOCK, VOCAB = 64, 256


def _certificate(scheme: str, layers: int, width: int, tokens: int, sequence: int) -> Callable[[], object]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=layers, heads=4, width=width, block=BLOCK, vocab=VOCAB, scheme=scheme))
        ids = torch.randint(VOCAB, (-(-tokens // BLOCK), BLOCK))
    return lambda: certify(model, ids, tokens, sequence)


def bench_certify(
    scheme: str = "proj-spheretnorm",
    width: int = 64,
    layers: tuple[int, ...] = (3, 6, 12, 24),
    tokens: tuple[int, ...] = (32, 64, 128, 256),
    repeats: int = 3,
    json: Path | None = None,
) -> int:
    """Time certificates of untrained models in CPU seconds, interleaved, and fit the exponents of their growth.

    Args:
        scheme: the scheme of the models.
        width: the width of the stream.
        layers: the numbers of blocks to time, with 64 tokens and a sequence of 8.
        tokens: the numbers of tokens to time, with 6 blocks and no sequence.
        repeats: rounds; the median is printed.
        json: also write the numbers here.
    """
    if len(set(layers)) < 2 or len(set(tokens)) < 2 or min(*layers, *tokens) < 1:
        raise ValueError(f"layers and tokens must each be two or more positive numbers, got {layers} and {tokens}.")
    check_counts(repeats=repeats)
    check_output_file("--json", json)
    largest = GPTConfig(layers=max(layers), heads=4, width=width, block=BLOCK, vocab=VOCAB, scheme=scheme)
    # a certificate holds the weights in float64 too
    check_training(largest, check_count("each number of --tokens", max(tokens)), "float32", torch.device("cpu"))
    contestants = {f"layers {n}": _certificate(scheme, n, width, BLOCK, 8) for n in layers}
    contestants |= {f"tokens {n}": _certificate(scheme, 6, width, n, 0) for n in tokens}
    total, done = len(contestants) * (repeats + 2), 0

    def tick() -> None:
        nonlocal done
        done += 1
        meter.show(f"{done} of {total} certificates", done / total)

    with few_threads(width), Meter("bench certify") as meter:
        # narrow models run on one thread, so CPU seconds are what an idle core takes, whatever else runs beside it
        medians = interleaved(contestants, repeats, tick, time.process_time)
    seconds = {
        "layers": {n: medians[f"layers {n}"] for n in layers},
        "tokens": {n: medians[f"tokens {n}"] for n in tokens},
    }
    exponents = {name: exponent(list(row), list(row.values())) for name, row in seconds.items()}
    for name, row in seconds.items():
        timings = ", ".join(f"{n}: {median:.2f} s" for n, median in row.items())
        print(f"{name}: {timings}; seconds grow as {name} to the power {exponents[name]:.2f}")
    result = {"scheme": scheme, "width": width, "repeats": repeats, "seconds": seconds, "exponents": exponents}
    write_measurement(json, result)
    return 0
