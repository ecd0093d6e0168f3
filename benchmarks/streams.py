"""Time one update of schemes with several streams or earlier states, beside h + f and one spherical stream.

python benchmarks/streams.py --rows 8192
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Comparison, begin, conditions, medians, print_table, run, write
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spheret.connections import Scheme, scheme
from spheret.support.ranges import check_counts

PLAIN, OURS = "h + f", "proj-spheretnorm"
SUBLAYERS = 24
# what depends on the depth is timed in the middle of the stack. x0 mixes before a block's attention, which is odd
MIDDLE = SUBLAYERS // 2
STREAMS = (2, 4, 8)
FORMATS = {"rows": "d", "ms": ".2f", "to_limit": ".2f", "to_plain": ".2f", "to_ours": ".2f"}
SHORT = ("--rows", "512", "--repeats", "5")


class Contestant(NamedTuple):
    """A scheme at one of SUBLAYERS sublayers, and the rows of `dim` entries that an update must move at least.

    The branch runs between `read` and `write`, so the state is read twice. The backward pass reads the gradients of
    what was written and the factors of products, and writes the gradients of the state and of f. A sum passes on
    the gradient that it is given.
    """

    scheme: Scheme
    sublayer: int
    forward: int
    backward: int


def contestants() -> dict[str, Contestant]:
    table = {
        PLAIN: Contestant(Scheme(), MIDDLE, 3, 3),
        "pre-ln": Contestant(scheme("pre-ln"), MIDDLE, 5, 4),
        OURS: Contestant(scheme(OURS), MIDDLE, 3, 8),
        "x0": Contestant(scheme("x0"), MIDDLE - 1, 7, 6),
    }
    blocks, attn_res = MIDDLE // 2, scheme("attn-res")
    table["denseformer"] = Contestant(scheme("denseformer"), MIDDLE, blocks + 6, 2 * blocks + 8)
    values = attn_res.connect(2, MIDDLE, SUBLAYERS).count
    table["attn-res"] = Contestant(attn_res, MIDDLE, values + 4, 2 * values + 2)
    for name, more in (("spherical-hyper", 4), ("hyper", 3), ("mhc", 3)):
        for n in STREAMS:
            # the retraction reads f again for the gradient of the streams
            built = scheme(name, streams=n)
            table[f"{name}, {n} streams"] = Contestant(built, MIDDLE, 3 * n + 2, 5 * n + more)
    return table


def updates(contestant: Contestant, x: Tensor, f: Tensor, g: Tensor) -> dict[str, Callable[[], object]]:
    """An update, forward alone and with its backward pass.

    Args:
        contestant: what to time.
        x: what enters the stream.
        f: what the branch returns.
        g: numbers for the gradients that enter. All contestants share them, to fit into memory that is set up.
    """
    built, dim = contestant.scheme, x.shape[-1]
    with torch.no_grad():
        state = built.enter(dim).to(x.device)(x)
        for sublayer in range(1, contestant.sublayer):
            state = built.connect(dim, sublayer, SUBLAYERS).to(x.device)(state, torch.tanh)
    state = tree_map(lambda part: part.detach().requires_grad_(), state)
    connection = built.connect(dim, contestant.sublayer, SUBLAYERS).to(x.device)
    old = tree_leaves(state)
    leaves = [*old, f, *connection.parameters()]

    def update() -> list[Tensor]:
        """What the branch reads, and what is new in the next state."""
        read: list[Tensor] = []

        def branch(h: Tensor) -> Tensor:
            read.append(h)
            return f

        parts = tree_leaves(connection(state, branch))
        return read + [part for part in parts if not any(part is earlier for earlier in old)]

    gradients = [g[: output.numel()].view_as(output) for output in update()]

    def forward() -> None:
        with torch.no_grad():
            update()

    def both() -> None:
        torch.autograd.backward(update(), gradients)
        for leaf in leaves:
            leaf.grad = None

    return {"forward": forward, "both": both}


def main(
    rows: int = 4096,
    width: int = 768,
    repeats: int = 31,
    cpu_time: bool = False,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Time one update, `read` and `write`, of schemes with several streams or earlier states.

    Args:
        rows: number of rows (tokens).
        width: width of the rows.
        repeats: rounds of all contestants; the table shows the median.
        cpu_time: measure the CPU time of this process instead of the wall clock. Use it with one thread if other
            work shares the machine.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the table to this file.
    """
    check_counts(2, width=width)
    place = begin(json, device, rows=rows, repeats=repeats)
    torch.manual_seed(0)
    x, f = torch.randn(rows, width, device=place), torch.randn(rows, width, device=place, requires_grad=True)
    g = torch.randn(max(STREAMS) * rows * width, device=place)
    chosen = contestants()
    runs: dict[str, Callable[[], object]] = {"torch.add": lambda: torch.add(x, f.detach())}
    for name, contestant in chosen.items():
        runs |= {f"{kind} {name}": update for kind, update in updates(contestant, x, f, g).items()}
    seconds = medians(f"{rows} x {width}", runs, repeats, cpu_time)
    table = [
        {
            "name": name,
            "sublayer": contestant.sublayer,
            "forward": _figures("forward", name, contestant.forward, seconds),
            "both": _figures("both", name, contestant.forward + contestant.backward, seconds),
        }
        for name, contestant in chosen.items()
    ]
    for kind, title in {"forward": "forward", "both": "forward + backward"}.items():
        print_table(
            f"{title}, {rows} x {width}, {conditions(place)}",
            ("", "rows", "ms", "x limit", f"x {PLAIN}", "x sphere"),
            [[row["name"], *(format(row[kind][key], form) for key, form in FORMATS.items())] for row in table],
        )
    print(
        f"Sublayer {MIDDLE} of {SUBLAYERS}, {MIDDLE - 1} for x0. rows: what an update must move at least. limit: the "
        f"time of torch.add into a new tensor, scaled by these rows. sphere: {OURS}. Medians of interleaved runs."
    )
    settings = {"rows": rows, "width": width, "repeats": repeats, "cpu_time": cpu_time, "device": str(place)}
    write(json, {**settings, "sublayers": SUBLAYERS, "table": table})


def _figures(kind: str, name: str, rows: int, seconds: dict[str, float]) -> dict[str, float]:
    took = seconds[f"{kind} {name}"]
    return {
        "rows": rows,
        "ms": took * 1e3,
        # torch.add moves three rows
        "to_limit": took / (seconds["torch.add"] * rows / 3),
        "to_plain": took / seconds[f"{kind} {PLAIN}"],
        "to_ours": took / seconds[f"{kind} {OURS}"],
    }


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """Four streams on one sphere, forward and backward, against one stream and against mHC."""
    seconds = {row["name"]: row["both"]["ms"] / 1e3 for row in result["table"]}
    what = f"an update of {result['rows']} x {result['width']} rows in 4 spherical streams, against"
    rivals = {OURS: "one", "mhc, 4 streams": "mhc"}
    return [
        Comparison(f"{what} {text}", seconds["spherical-hyper, 4 streams"], seconds[n]) for n, text in rivals.items()
    ]


if __name__ == "__main__":
    run(main)
