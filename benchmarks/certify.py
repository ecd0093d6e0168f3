"""Time a certificate, and fit how its time grows with blocks and with tokens.

python benchmarks/certify.py --repeats 1
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Comparison, check_sizes, exponent, medians, run, write

from spheret.certificates.certificate import certify
from spheret.model.gpt import GPT, GPTConfig
from spheret.support.files import check_output_file
from spheret.support.ranges import check_counts
from spheret.support.threads import few_threads

SCHEME, WIDTH, BLOCK, VOCAB = "proj-spheretnorm", 64, 64, 256
SHORT = ("--layers", "1", "2", "--tokens", "8", "16", "--repeats", "1")


def _certificate(layers: int, tokens: int, sequence: int) -> Callable[[], object]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=layers, heads=4, width=WIDTH, block=BLOCK, vocab=VOCAB, scheme=SCHEME))
        ids = torch.randint(VOCAB, (-(-tokens // BLOCK), BLOCK))
    return lambda: certify(model, ids, tokens, sequence)


def main(
    layers: tuple[int, ...] = (3, 6, 12, 24),
    tokens: tuple[int, ...] = (32, 64, 128, 256),
    repeats: int = 3,
    json: Path | None = None,
) -> None:
    """Time certificates of untrained models in CPU seconds, interleaved, and fit the exponents of their growth.

    Args:
        layers: the numbers of blocks to time, with 64 tokens and a sequence of 8.
        tokens: the numbers of tokens to time, with 6 blocks and no sequence.
        repeats: rounds; the median is printed.
        json: also write the numbers here.
    """
    check_sizes(layers=layers, tokens=tokens)
    check_counts(repeats=repeats)
    check_output_file("--json", json)
    certificates = {f"layers {n}": _certificate(n, BLOCK, 8) for n in layers}
    certificates |= {f"tokens {n}": _certificate(6, n, 0) for n in tokens}
    with few_threads(WIDTH):
        # narrow models run on one thread, so CPU seconds are what an idle core takes, whatever else runs beside it
        times = medians("certify", certificates, repeats, cpu_time=True)
    seconds = {
        "layers": {n: times[f"layers {n}"] for n in layers},
        "tokens": {n: times[f"tokens {n}"] for n in tokens},
    }
    exponents = {name: exponent(list(row), list(row.values())) for name, row in seconds.items()}
    for name, row in seconds.items():
        timings = ", ".join(f"{n}: {median:.2f} s" for n, median in row.items())
        print(f"{name}: {timings}; seconds grow as {name} to the power {exponents[name]:.2f}")
    settings = {"scheme": SCHEME, "width": WIDTH, "repeats": repeats}
    write(json, {**settings, "seconds": seconds, "exponents": exponents})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The certificate of the deepest model. It has no rival."""
    layers, seconds = max((int(layers), seconds) for layers, seconds in result["seconds"]["layers"].items())
    return [Comparison(f"a certificate of {layers} layers of width {result['width']}, 64 tokens", seconds)]


if __name__ == "__main__":
    run(main)
