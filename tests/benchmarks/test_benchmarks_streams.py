import json

import pytest
import torch
from scripts import script
from torch.utils._pytree import tree_leaves

bench = script("benchmarks/streams.py")
QUICK = ["--rows", "16", "--width", "8", "--repeats", "1", "--device", "cpu"]


def test_command(tmp_path, capsys):
    bench.run(bench.main, [*QUICK, "--cpu-time", "--json", str(tmp_path / "s.json")])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "s.json").read_text())
    assert [row["name"] for row in written["table"]] == list(bench.contestants())
    for row in written["table"]:
        assert printed.count(row["name"]) >= 2
        assert row["both"]["rows"] > row["forward"]["rows"]
    seconds = {row["name"]: row["both"]["ms"] / 1e3 for row in written["table"]}
    assert [row.rival for row in bench.comparisons(written)] == [seconds[bench.OURS], seconds["mhc, 4 streams"]]


@pytest.mark.parametrize("name", bench.contestants())
def test_the_rows_of_a_forward_pass(name):
    """`read` and `write` each read the state once, or a part of it, and write what is new once; f is read once."""
    contestant, x = bench.contestants()[name], torch.randn(2, 8)
    state = contestant.scheme.enter(8)(x)
    for sublayer in range(1, contestant.sublayer):
        state = contestant.scheme.connect(8, sublayer, bench.SUBLAYERS)(state, torch.tanh)
    before, read = tree_leaves(state), []
    connection = contestant.scheme.connect(8, contestant.sublayer, bench.SUBLAYERS)
    after = tree_leaves(connection(state, lambda h: read.append(h) or torch.tanh(h)))
    new = sum(y.numel() for y in [*read, *after] if not any(y is part for part in before)) // x.numel()
    held = sum(y.numel() for y in before) // x.numel()
    if "streams" in name or name == "x0":
        assert contestant.forward == 2 * held + 1 + new
    else:
        # h + f and the sphere read h without a copy, the others read a part of the state a second time
        assert held + 1 + new <= contestant.forward <= 2 * held + 1 + new
