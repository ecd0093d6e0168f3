import json

import pytest
from scripts import script

bench = script("benchmarks/convert.py")
TINY = ["--layers", "1", "--heads", "1", "--width", "8", "--block", "8", "--batch-size", "1", "--repeats", "1"]


def test_command(tmp_path, capsys):
    out = tmp_path / "convert.json"
    bench.run(bench.main, [*TINY, "--json", str(out)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert set(result["seconds"]) == {bench.ORIGINAL, *bench.POSITIONS}
    assert all(name in printed for name in result["seconds"])
    assert result["over_original"][bench.ORIGINAL] == 1
    (row,) = bench.comparisons(result)
    assert row.ours / row.rival == result["over_original"][bench.CONVERTED]


def test_bad_input():
    with pytest.raises(SystemExit, match="--width"):
        bench.run(bench.main, [*TINY, "--width", "9"])
