import json

import pytest
import torch
from scripts import script

from spheret import RETRACTIONS, Retraction
from spheret.kernels import chosen, use

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


@pytest.mark.parametrize("branch", bench.BRANCHES)
def test_command(tmp_path, capsys, branch):
    bench.run(bench.main, [*QUICK, "--branch", branch, "--json", str(tmp_path / "a" / "b.json")])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "a" / "b.json").read_text())
    table = written["results"][0]["table"]
    assert {"native", "closed", "paper, eager", "LayerNorm(h + f)", "h + f"} == {row["name"] for row in table}
    assert all(row["name"] in printed for row in table)
    assert all(row["both"]["ms"] > 0 for row in table)
    assert written["torch"] == torch.__version__
    times = {row["name"]: row["both"]["ms"] / 1e3 for row in table}
    rivals = [row.rival for row in bench.comparisons(written)]
    assert rivals == [times["LayerNorm(h + f)"], times["paper, eager"]]


def test_curve(tmp_path):
    bench.run(bench.main, [*QUICK, "--curve", "--json", str(tmp_path / "c.json")])
    widths = [result["width"] for result in json.loads((tmp_path / "c.json").read_text())["results"]]
    assert widths == [64, 128, 256, 512, 1024, 2048, 4096, 8192]


def test_no_speed_for_a_wrong_result(monkeypatch, capsys):
    paper = PSEUDOCODE["projection"]
    monkeypatch.setitem(PSEUDOCODE, "projection", lambda h, f, alpha: 1.01 * paper(h, f, alpha))
    with pytest.raises(SystemExit, match="no speed for paper, eager: the result is wrong"):
        bench.run(bench.main, QUICK)
    printed = capsys.readouterr().out
    (row,) = (line for line in printed.splitlines() if "paper, eager" in line and "│" in line)
    assert [cell.strip() for cell in row.split("│")][3:9] == ["-"] * 6


def test_a_retraction_that_some_backends_have_no_code_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(RETRACTIONS, "tanh", Retraction.from_angle(torch.tanh, "tanh"))
    bench.run(bench.main, [*QUICK, "--retraction", "tanh", "--json", str(tmp_path / "t.json")])
    printed = capsys.readouterr().out
    assert "native: no code for tanh." in printed
    assert "triton: no code for tanh." in printed
    written = json.loads((tmp_path / "t.json").read_text())
    assert {"closed", "LayerNorm(h + f)", "h + f"} == {row["name"] for row in written["results"][0]["table"]}
    assert written["no code for it"] == ["triton", "native"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retraction", "cayly"], "Did you mean 'cayley'"),
        (["--branch", "float8"], "unknown branch dtype"),
        (["--rows", "0"], "at least 1"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(SystemExit, match=message):
        bench.run(bench.main, arguments)


def test_backends_are_restored():
    with use("closed"):
        rows = bench.BenchRows(4, 8, torch.float32, "cpu")
        bench.update_on("native", "projection")(rows.h, rows.f, rows.alpha)
        assert chosen(rows.h, rows.f) == "closed"
