"""The benchmark of watching runs on a small model, and writes what it prints."""

import json

import pytest
from scripts import script

watch = script("benchmarks/watch.py")


def test_watch(tmp_path, capsys):
    out = tmp_path / "watch.json"
    words = ["--layers", "1", "--width", "64", "--tokens", "64", "--block", "32", "--repeats", "1", "--device", "cpu"]
    watch.run(watch.main, [*words, "--json", str(out)])
    result = json.loads(out.read_text())
    seconds = result["seconds"]
    assert list(seconds) == [watch.PLAIN, watch.BETWEEN, watch.WATCHED]
    assert result["copied_bytes"] > 4 * watch.VOCAB * 64
    extra = (seconds[watch.BETWEEN] - seconds[watch.PLAIN]) / seconds[watch.PLAIN]
    later = (seconds[watch.WATCHED] - seconds[watch.PLAIN]) / seconds[watch.PLAIN] / watch.EVERY
    assert result["share"] == pytest.approx(extra + later)
    assert f"{result['share']:.2%}" in capsys.readouterr().out
