import json

import pytest
import torch
from scripts import script

from spheret import RETRACTIONS, Retraction

bench = script("benchmarks/connection.py")
PSEUDOCODE = bench.PSEUDOCODE
QUICK = ["--rows", "64", "--width", "32", "--repeats", "1", "--no-compile"]


@pytest.mark.parametrize("retraction", PSEUDOCODE)
def test_the_papers_code_computes_what_the_backends_do(retraction):
    rows = bench.BenchRows(64, 48, torch.float32, "cpu")
    truth = bench.update_on("reference", retraction)
    assert rows.error(PSEUDOCODE[retraction], truth) < 1e-6
    for backend in ("closed", "native"):
        assert rows.error(bench.update_on(backend, retraction), truth) < 1e-6


@pytest.mark.parametrize(
    ("words", "rivals"),
    [
        ("--branch bfloat16", {"paper, eager"}),
        ("--normed", {"F.rms_norm, then retract"}),
    ],
)
def test_command(tmp_path, capsys, words, rivals):
    bench.run(bench.main, [*QUICK, *words.split(), "--json", str(tmp_path / "numbers.json")])
    printed = capsys.readouterr().out
    table = json.loads((tmp_path / "numbers.json").read_text())["results"][0]["table"]
    assert {row["name"] for row in table} == {"native", "closed", "LayerNorm(h + f)", "h + f", *rivals}
    assert all(row["name"] in printed for row in table)
    assert all(row["both"]["ms"] > 0 for row in table)


def test_no_speed_for_a_wrong_result(monkeypatch, capsys):
    paper = PSEUDOCODE["projection"]
    monkeypatch.setitem(PSEUDOCODE, "projection", lambda h, f, alpha: 1.01 * paper(h, f, alpha))
    with pytest.raises(SystemExit, match="paper, eager"):
        bench.run(bench.main, QUICK)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "paper, eager" in line and "│" in line)
    assert [cell.strip() for cell in row.split("│")][3:9] == ["-"] * 6


def test_a_retraction_that_some_backends_have_no_code_for(monkeypatch, tmp_path):
    monkeypatch.setitem(RETRACTIONS, "tanh", Retraction.from_angle(torch.tanh, "tanh"))
    bench.run(bench.main, [*QUICK, "--retraction", "tanh", "--json", str(tmp_path / "t.json")])
    written = json.loads((tmp_path / "t.json").read_text())
    assert {"closed", "LayerNorm(h + f)", "h + f"} == {row["name"] for row in written["results"][0]["table"]}
    assert written["no code for it"] == ["triton", "native"]
