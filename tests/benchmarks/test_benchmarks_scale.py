import json

import pytest
import torch
from scripts import script
from torch.utils._python_dispatch import TorchDispatchMode

from spheret import SCHEMES

bench = script("benchmarks/scale.py")


def test_command(tmp_path, capsys):
    out = tmp_path / "scale.json"
    words = ["--layers", "1", "2", "--widths", "32", "64", "--repeats", "1", "--steps", "0", "--json", str(out)]
    bench.run(bench.main, words)
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert result["depth"]["layers"] == [1, 2]
    assert result["width"]["widths"] == [32, 64]
    for part in ("depth", "width"):
        assert [row["scheme"] for row in result[part]["rows"]] == ["pre-ln", "proj-spheretnorm"]
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in result[part]["rows"])
    assert "proj-spheretnorm" in printed
    assert result["torch"] == torch.__version__
    assert [row.rival for row in bench.comparisons(result)] == [
        result[part]["rows"][0]["seconds"][-1] for part in ("depth", "width")
    ]


@pytest.mark.slow
def test_one_process_and_two():
    rows = bench.processes(4, 1, 32)
    assert [(row["processes"], row["threads"]) for row in rows] == [(1, 1), (1, 2), (2, 1)]
    assert all(row["tokens/s"] > 0 for row in rows)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law(power):
    sizes = [4, 8, 16, 32, 64]
    assert bench.exponent(sizes, [0.003 * size**power for size in sizes]) == pytest.approx(power)


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_block_adds_the_same_number_of_operations_to_a_step(scheme, monkeypatch):
    monkeypatch.setattr(bench, "BLOCK", 8)
    monkeypatch.setattr(bench, "BATCH", 2)
    # counts, not times: a time also measures what else the machine does
    counts = []
    for layers in (4, 8, 12):
        run = bench.new_step(scheme, layers, 32)
        # the optimiser creates its state in the first step
        run()
        with Operations() as operations:
            run()
        counts.append(operations.count)
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    # a state may hold more tensors after every block
    assert second == first > 0 if SCHEMES[scheme]().one_stream else second >= first > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "4"], "--layers must be two or more different"),
        (["--widths", "32", "b"], "--help"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(SystemExit, match=message):
        bench.run(bench.main, words)
