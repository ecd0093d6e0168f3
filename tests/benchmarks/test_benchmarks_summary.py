"""What all benchmarks share: their flags, their places for numbers, and the table of `make bench`."""

import inspect
import json
import subprocess

import pytest
from scripts import PROJECT, script

from spheret.support.parsing import parse

summary = script("benchmarks/summary.py")
BENCHMARKS = {module.__name__: module for module in summary.BENCHMARKS}
# more than 64 bits hold
HUGE = "9" * 23


def test_every_script_with_flags_is_in_the_table():
    files = (PROJECT / "benchmarks").glob("*.py")
    assert {path.stem for path in files if "    run(main)\n" in path.read_text()} == set(BENCHMARKS)


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
    with pytest.raises(SystemExit, match=f"python benchmarks/{name}.py: .* is a directory: give a file"):
        bench.run(bench.main, ["--json", str(tmp_path)])


# the committed numbers that a page of docs/ shows, and the ratios of that page
PUBLISHED = {
    "connection": ("connection-float32", [0.64, 0.09]),
    "streams": ("connection-streams", [21.92, 0.54]),
    "step": ("step", [1.00, 0.97, 1.03]),
    "scale": ("scale", [1.04, 0.89]),
    "generate": ("generate-1", [0.68]),
    "evaluation": ("eval", [0.32, 0.33, 0.77]),
    "train": ("train", [1.01]),
    "convert": ("convert", [1.04]),
    "watch": ("watch", [1.00, 1.06]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_rows_of_published_numbers(name):
    file, ratios = PUBLISHED[name]
    rows = BENCHMARKS[name].comparisons(json.loads((PROJECT / "benchmarks" / f"{file}.json").read_text()))
    assert [round(row.ours / row.rival, 2) for row in rows] == ratios


def test_one_table_and_what_failed(monkeypatch, capsys):
    def measure(benchmark):
        if benchmark.__name__ == "evaluation":
            raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nlm_eval is not installed.\n")
        return [summary.Comparison(benchmark.__name__, 0.002, None if benchmark.__name__ == "certify" else 0.004)]

    monkeypatch.setattr(summary, "measure", measure)
    with pytest.raises(SystemExit, match="evaluation failed: lm_eval is not installed"):
        summary.main()
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [row[0] for row in rows] == [name for name in BENCHMARKS if name != "evaluation"]
    assert rows[0][1:] == ["2 ms", "4 ms", "0.50"]
    assert next(row for row in rows if row[0] == "certify")[1:] == ["2 ms", "-", "-"]
