import json

import pytest
from scripts import script

bench = script("benchmarks/certify.py")


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "WIDTH", 8)
    out = tmp_path / "certify.json"
    bench.run(bench.main, ["--layers", "1", "2", "--tokens", "4", "8", "--repeats", "1", "--json", str(out)])
    assert "to the power" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert set(result["exponents"]) == {"layers", "tokens"}
    assert set(result["seconds"]["layers"]) == {"1", "2"}
    (row,) = bench.comparisons(result)
    assert (row.ours, row.rival) == (result["seconds"]["layers"]["2"], None)


@pytest.mark.parametrize("words", [["--layers", "3"], ["--tokens", "0", "4"]])
def test_bad_input(words):
    with pytest.raises(SystemExit, match="two or more"):
        bench.run(bench.main, words)
