"""Time one update of the stream on every backend and its rivals, on the same rows.

python benchmarks/connection.py --retraction cayley
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Comparison, medians, print_table, run, write
from pseudocode import PSEUDOCODE
from torch import Tensor, nn

from spheret.kernels import BACKENDS, chosen, retract, use
from spheret.kernels.closed import EPS
from spheret.retractions import RETRACTIONS
from spheret.support.allocator import keep_freed_memory
from spheret.support.errors import unknown
from spheret.support.files import check_output_file
from spheret.support.ranges import check_counts

Update = Callable[[Tensor, Tensor, Tensor], Tensor]

BRANCHES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# the largest error of a float32 result against the float64 reference, relative to the norm of the row or gradient
TOLERANCE = 1e-4
CURVE = [64 * 2**k for k in range(8)]
SHORT = ("--no-compile", "--repeats", "9")


class BenchRows:
    """A stream, a branch, a step and an incoming gradient, and the bytes that an update of them must move.

    gain: of a normed branch, or None. It is a single row, and its gradient too.
    """

    def __init__(self, n: int, d: int, branch: torch.dtype, device: str, normed: bool = False):
        generator = torch.Generator().manual_seed(0)
        self.h, self.f, self.g = (torch.randn(n, d, generator=generator).to(device) for _ in range(3))
        self.f = self.f.to(branch)
        self.alpha = torch.tensor([0.5], device=device, requires_grad=True)
        self.gain = torch.full((d,), 0.3, device=device, requires_grad=True) if normed else None
        self.h.requires_grad_(), self.f.requires_grad_()
        stream, side = n * d * 4, n * d * self.f.element_size()
        self.add_bytes = 3 * stream
        self.bytes = {"forward": 2 * stream + side, "both": 5 * stream + 3 * side}

    def forward(self, update: Update) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                update(self.h, self.f, self.alpha)

        return run

    def both(self, update: Update) -> Callable[[], object]:
        def run() -> None:
            update(self.h, self.f, self.alpha).backward(self.g)
            for x in (self.h, self.f, self.alpha, self.gain):
                if x is not None:
                    x.grad = None

        return run

    def error(self, update: Update, truth: Update) -> float:
        """The largest relative error of result, dh and df against the float64 reference."""
        wide = [x.detach().double().requires_grad_() for x in (self.h, self.f, self.alpha)]
        exact = truth(*wide)
        exacts = (exact, *torch.autograd.grad(exact, wide[:2], self.g.double()))
        out = update(self.h, self.f, self.alpha)
        results = (out, *torch.autograd.grad(out, (self.h, self.f), self.g))
        # a bfloat16 gradient has bfloat16's rounding
        slack = (1.0, 1.0, 1.0 if self.f.dtype == torch.float32 else 2**-14)
        worst = 0.0
        for x, y, scale in zip(results, exacts, slack, strict=True):
            difference, size = (x.detach().double() - y.detach()).norm(), y.detach().norm()
            worst = max(worst, float(difference / size) * scale)
        return worst


def update_on(backend: str, retraction: str, gain: Tensor | None = None) -> Update:
    """The update on one backend, with the automatic cap of the retraction."""
    cap = RETRACTIONS[retraction].cap

    def update(h: Tensor, f: Tensor, alpha: Tensor) -> Tensor:
        with use(backend):
            return retract(h, f, alpha, retraction, cap, gain)

    return update


def without_code(retraction: str) -> list[str]:
    """The backends that have no code for this retraction."""
    return [name for name, backend in BACKENDS.items() if not backend.knows(RETRACTIONS[retraction])]


def contestants(rows: BenchRows, retraction: str, compiled: bool) -> tuple[dict[str, Update], dict[str, Update]]:
    """The updates that must compute this retraction, and those that compute something else."""
    cap, gain = RETRACTIONS[retraction].cap, rows.gain
    paper = PSEUDOCODE.get(retraction) if gain is None else None
    connections: dict[str, Update] = {
        name: update_on(name, retraction, gain) for name in (chosen(rows.h, rows.f, retraction), "closed")
    }
    if paper is not None:
        connections["paper, eager"] = paper
    if compiled:
        connections["closed, compiled"] = torch.compile(update_on("closed", retraction, gain))
    if compiled and paper is not None:
        connections["paper, compiled"] = torch.compile(paper)
    if gain is not None:
        # what one would write without the option: torch's RMSNorm, and the same kernel without a gain
        connections["F.rms_norm, then retract"] = lambda h, f, alpha: retract(
            h, F.rms_norm(f, gain.shape, gain.to(f.dtype), EPS), alpha, retraction, cap
        )
    norm = nn.LayerNorm(rows.h.shape[-1], device=rows.h.device)
    others: dict[str, Update] = {
        "LayerNorm(h + f)": lambda h, f, alpha: norm(h + f),
        "h + f": lambda h, f, alpha: h + f,
    }
    return connections, others


def measure(rows: BenchRows, retraction: str, repeats: int, compiled: bool) -> list[dict[str, Any]]:
    """One row per contestant. A contestant with a wrong result has an error and no time."""
    connections, others = contestants(rows, retraction, compiled)
    truth = update_on("reference", retraction, rows.gain)
    errors = {name: rows.error(update, truth) for name, update in connections.items()}
    right = {name: update for name, update in connections.items() if errors[name] <= TOLERANCE} | others
    runs: dict[str, Callable[[], object]] = {"torch.add": lambda: torch.add(rows.h.detach(), rows.g)}
    runs |= {f"forward {name}": rows.forward(update) for name, update in right.items()}
    runs |= {f"both {name}": rows.both(update) for name, update in right.items()}
    seconds = medians(f"{rows.h.shape[0]} x {rows.h.shape[1]}", runs, repeats)
    table = []
    for name in [*connections, *others]:
        row: dict[str, Any] = {"name": name, "error": errors.get(name)}
        for kind in ("forward", "both") if name in right else ():
            time, limit = seconds[f"{kind} {name}"], seconds["torch.add"] * rows.bytes[kind] / rows.add_bytes
            row[kind] = {"ms": time * 1e3, "to_limit": time / limit, "GB/s": rows.bytes[kind] / time / 1e9}
        table.append(row)
    return table


def main(
    rows: int = 8192,
    width: int = 768,
    retraction: str = "projection",
    branch: str = "float32",
    normed: bool = False,
    repeats: int = 31,
    compile: bool = True,
    curve: bool = False,
    json: Path | None = None,
) -> None:
    """Time one update of the stream on every backend, beside the paper's code and LayerNorm(h + f).

    Args:
        rows: number of rows (tokens).
        width: width of the rows.
        retraction: a retraction that `spheret schemes` lists; it runs with its automatic cap.
        branch: dtype of the branch output, float32 or bfloat16; the stream is float32.
        normed: with `branch_norm`, against torch's RMSNorm followed by the update.
        repeats: rounds of all contestants; the table shows the median.
        compile: also time the code of torch.compile, which takes a minute to compile.
        curve: time the widths 64 to 8192 at a constant number of elements, instead of one width.
        json: also write the table to this file.
    """
    if retraction not in RETRACTIONS:
        raise SystemExit(str(unknown("retraction", retraction, RETRACTIONS)))
    if branch not in BRANCHES:
        raise SystemExit(str(unknown("branch dtype", branch, BRANCHES)))
    check_counts(rows=rows, repeats=repeats)
    check_counts(2, width=width)
    check_output_file("--json", json)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = keep_freed_memory()
    results: list[dict[str, Any]] = []
    for d in CURVE if curve else [width]:
        n = max(1, rows * width // d)
        data = BenchRows(n, d, BRANCHES[branch], device, normed)
        results.append({"rows": n, "width": d, "table": measure(data, retraction, repeats, compile and not curve)})
    for result in results:
        kind = f"{branch} branch, normed" if normed else f"{branch} branch"
        title = f"{result['rows']} x {result['width']}, {retraction}, {kind}, {device}"
        columns = ("", "error", "fwd ms", "x limit", "GB/s", "f+b ms", "x limit", "GB/s")
        print_table(title, columns, map(_cells, result["table"]))
    print(
        "limit: the time of torch.add into a new tensor, scaled by the bytes that must move "
        "(forward 3 rows, backward 5); GB/s counts those bytes. Medians of interleaved runs."
    )
    absent = without_code(retraction)
    for name in absent:
        print(f"{name}: no code for {retraction}.")
    settings = {
        "retraction": retraction,
        "branch": branch,
        "normed": normed,
        "freed memory kept": kept,
        "no code for it": absent,
    }
    write(json, {**settings, "results": results})
    wrong = sorted({row["name"] for result in results for row in result["table"] if "both" not in row})
    if wrong:
        raise SystemExit(f"no speed for {', '.join(wrong)}: the result is wrong.")


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], "" if row["error"] is None else f"{row['error']:.0e}"]
    for kind in ("forward", "both"):
        time = row.get(kind)
        cells += [f"{time['ms']:.2f}", f"{time['to_limit']:.2f}", f"{time['GB/s']:.1f}"] if time else ["-"] * 3
    return cells


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """The fastest backend, forward and backward, against the paper's code and LayerNorm(h + f)."""
    (measured,) = result["results"]
    seconds = {row["name"]: row["both"]["ms"] / 1e3 for row in measured["table"]}
    ours = min(seconds[name] for name in BACKENDS if name in seconds)
    what = f"an update of {measured['rows']} x {measured['width']} rows, against"
    rivals = {"LayerNorm(h + f)": "LayerNorm(h + f)", "paper, eager": "the paper's code"}
    return [Comparison(f"{what} {text}", ours, seconds[name]) for name, text in rivals.items() if name in seconds]


if __name__ == "__main__":
    run(main)
