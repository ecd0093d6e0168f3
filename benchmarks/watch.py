"""Time a training step that is watched by `spheret.watch`, one between two watched ones, and one of nobody's concern.

python benchmarks/watch.py --json benchmarks/watch.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Comparison, adamw, begin, llama, medians, print_table, run, write

import spheret
from spheret.observe import Watch

VOCAB, EVERY = 8192, 50
PLAIN, BETWEEN, WATCHED = "not watched", "between two watched steps", "watched"
SHORT = ("--layers", "2", "--width", "128", "--tokens", "256", "--repeats", "3")


def _step(model: Any, x: torch.Tensor, watch: Watch | None) -> Callable[[], None]:
    optimizer = adamw(model)

    def step() -> None:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        if watch is not None:
            watch.step(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(
    layers: int = 8,
    width: int = 512,
    tokens: int = 2048,
    block: int = 256,
    repeats: int = 15,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Measure the processor time of whole training steps of a Llama-shaped model, in interleaved rounds.

    Args:
        layers: layers of the model.
        width: its width.
        tokens: tokens of a step.
        block: the length of a sequence.
        repeats: rounds; the median is printed.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the table to this file.
    """
    place = begin(json, device, layers=layers, width=width, tokens=tokens, block=block, repeats=repeats)
    x = torch.randint(VOCAB, (max(1, tokens // block), block), generator=torch.Generator().manual_seed(0)).to(place)
    steps = {}
    for name, every in ((PLAIN, None), (BETWEEN, 1_000_000), (WATCHED, 1)):
        model = llama(layers, width // 64, width, 8 * width // 3 // 32 * 32, block, VOCAB).to(place)
        watch = None if every is None else spheret.watch(model, every, quiet=True)
        steps[name] = _step(model, x, watch)
    seconds = medians("watch", steps, repeats, cpu_time=place.type == "cpu")
    weights = sum(p.nbytes for p in model.parameters())
    plain = seconds[PLAIN]
    share = (seconds[BETWEEN] - plain) / plain + (seconds[WATCHED] - plain) / plain / EVERY
    print_table(
        f"Llama, {layers} layers of width {width}, {tokens} tokens",
        ["step", "ms", "against not watched"],
        [(name, f"{1e3 * each:,.1f}", f"{each / plain:.4f}") for name, each in seconds.items()],
    )
    print(
        f"At every={EVERY} watching takes {share:.2%} of the time. A watched step keeps {weights / 1e6:,.0f} MB more,"
    )
    print("a copy of the weights, until the next forward pass.")
    sizes = {"layers": layers, "width": width, "tokens": tokens, "block": block, "every": EVERY}
    write(json, {**sizes, "seconds": seconds, "share": share, "copied_bytes": weights})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The rows of `make bench`."""
    seconds = result["seconds"]
    return [Comparison(f"a step {name}", seconds[name], seconds[PLAIN]) for name in (BETWEEN, WATCHED)]


if __name__ == "__main__":
    run(main)
