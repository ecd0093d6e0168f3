"""What all benchmarks share: their flags, their places for numbers, and the table of `make bench`."""

import inspect
import json
import subprocess

import pytest
import torch
from scripts import PROJECT, script

from spheret.cli import parse
from spheret.model.config import PRESETS

summary = script("benchmarks/summary.py")
BENCHMARKS = {module.__name__: module for module in summary.BENCHMARKS}
# more than 64 bits hold
HUGE = "9" * 23


def test_every_script_with_flags_is_in_the_table():
    files = (PROJECT / "benchmarks").glob("*.py")
    assert {path.stem for path in files if "    run(main)\n" in path.read_text()} == set(BENCHMARKS)
    assert set(BENCHMARKS) == set(SMALL)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_short_form_is_one_of_its_flags(name):
    # raises if a flag is unknown; what it returns would run the benchmark
    parse(BENCHMARKS[name].main, name, BENCHMARKS[name].SHORT)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_flags_that_cannot_be_meant(name, tmp_path):
    bench = BENCHMARKS[name]
    for flag, parameter in inspect.signature(bench.main).parameters.items():
        if parameter.annotation == "int":
            for value in ("-1", HUGE):
                with pytest.raises(SystemExit, match="--" + flag.replace("_", "-")):
                    bench.run(bench.main, ["--" + flag.replace("_", "-"), value])
    with pytest.raises(SystemExit, match="directory"):
        bench.run(bench.main, ["--json", str(tmp_path)])


MODEL = "--layers 1 --heads 1 --width 8 --block 8 --batch-size 1 --repeats 1 --device cpu"
# each on something small
SMALL = {
    "connection": "--rows 64 --width 32 --repeats 1 --no-compile",
    "streams": "--rows 16 --width 8 --repeats 1 --device cpu --cpu-time",
    "step": "--tokens 64 --block 32 --schemes proj-spheretnorm --repeats 1 --device cpu --no-memory",
    "scale": "--layers 1 2 --widths 32 64 --repeats 1 --steps 0",
    "generate": "--new 4 --batches 1,2 --repeats 1 --device cpu",
    "data": "--repeats 1 --batches 20 --gigabytes 0.01",
    "evaluation": "--count 2 --repeats 1 --device cpu",
    "train": MODEL,
    "convert": MODEL,
    "watch": "--layers 1 --width 64 --tokens 64 --block 32 --repeats 1 --device cpu",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_and_has_rows_for_the_table(name, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "S", (1, 2, 32))
    bench, out = BENCHMARKS[name], tmp_path / "folder" / "numbers.json"
    bench.run(bench.main, [*SMALL[name].split(), "--json", str(out)])
    result = json.loads(out.read_text())
    assert result["torch"] == torch.__version__
    rows = bench.comparisons(result)
    assert rows
    assert all(row.ours > 0 and row.rival > 0 for row in rows)


REFUSED = [
    ("connection", "--retraction cayly", "cayley"),
    ("connection", "--branch float8", "branch"),
    ("convert", "--width 9", "--width"),
    ("generate", "--device gpu", "--device"),
    ("generate", "--batches 1,two", "--batches"),
    ("generate", "--new 2000", "--new"),
    ("scale", "--layers 4", "--layers"),
    ("scale", "--widths 32 b", "--help"),
    ("step", "--size XL", "size"),
    ("step", "--tokens 100", "--block"),
    ("step", "--schemes preln", "pre-ln"),
    ("step", "--device gpu", "--device"),
    ("train", "--heads 3", "heads"),
]


@pytest.mark.parametrize(("name", "words", "noun"), REFUSED)
def test_what_is_refused(name, words, noun):
    with pytest.raises(SystemExit, match=noun):
        BENCHMARKS[name].run(BENCHMARKS[name].main, words.split())


def test_one_table_and_what_failed(monkeypatch, capsys):
    def measure(benchmark):
        if benchmark.__name__ == "evaluation":
            raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nlm_eval is not installed.\n")
        return [summary.Comparison(benchmark.__name__, 0.002, None if benchmark.__name__ == "watch" else 0.004)]

    monkeypatch.setattr(summary, "measure", measure)
    with pytest.raises(SystemExit, match="lm_eval"):
        summary.main()
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [row[0] for row in rows] == [name for name in BENCHMARKS if name != "evaluation"]
    assert rows[0][1:] == ["2 ms", "4 ms", "0.50"]
    assert next(row for row in rows if row[0] == "watch")[1:] == ["2 ms", "-", "-"]
