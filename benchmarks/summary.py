"""Run every benchmark in short form and print one table: what `make bench` does.

    python benchmarks/summary.py

Each one runs in a process of its own. The pages of docs/ say how their numbers were measured, which takes longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import connection
import convert
import data
import evaluation
import generate
import scale
import step
import streams
import train
import watch
from measuring import Comparison, print_table

BENCHMARKS: tuple[ModuleType, ...] = (
    connection,
    streams,
    step,
    scale,
    generate,
    evaluation,
    train,
    data,
    convert,
    watch,
)


def measure(benchmark: ModuleType) -> list[Comparison]:
    """The rows of a benchmark in short form. CalledProcessError has what it printed on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        command = [sys.executable, str(benchmark.__file__), *benchmark.SHORT, "--json", str(path)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return benchmark.comparisons(json.loads(path.read_text()))


def cells(row: Comparison) -> Sequence[str]:
    ours, rival = (f"{seconds * 1e3:,.3g} ms" if seconds else "-" for seconds in (row.ours, row.rival))
    return row.what, ours, rival, f"{row.ours / row.rival:.2f}" if row.rival else "-"


def main() -> None:
    rows: list[Comparison] = []
    failures = []
    for benchmark in BENCHMARKS:
        print(f"{benchmark.__name__} ...", file=sys.stderr, flush=True)
        try:
            rows += measure(benchmark)
        except subprocess.CalledProcessError as error:
            failures.append(f"{benchmark.__name__} failed: {error.stderr.strip().splitlines()[-1]}")
    print_table("short measurements on this machine", ["what", "ours", "rival", "ratio"], map(cells, rows))
    print("ratio: our time divided by the rival's; below 1 ours is faster.")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
