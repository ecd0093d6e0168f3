"""`spheret bench generate` and `spheret bench eval` run on small models, and write what they print."""

import json

import pytest

from spheret.bench.eval import SHAPES, questions
from spheret.cli import main
from spheret.model import gpt


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setitem(gpt.PRESETS, "S", (1, 2, 32))


@pytest.mark.usefixtures("_small")
def test_generate(tmp_path, capsys):
    out = tmp_path / "generate.json"
    words = ["--new", "4", "--prompt", "8", "--batches", "1,2", "--repeats", "1", "--device", "cpu"]
    assert main(["bench", "generate", *words, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["table"]
    assert [(row["name"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("pre-ln", "proj-spheretnorm", "transformers GPT-2")
    ]
    assert all(row["tokens/s"] > 0 for row in rows)
    assert "tokens/s" in capsys.readouterr().out
    assert main(["bench", "generate", "--size", "XS"]) == 2
    assert main(["bench", "generate", "--device", "gpu"]) == 2
    assert "--device gpu is not available" in capsys.readouterr().err


@pytest.mark.usefixtures("_small")
def test_eval(tmp_path):
    out = tmp_path / "eval.json"
    assert main(["bench", "eval", "--count", "2", "--repeats", "1", "--device", "cpu", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["table"]
    assert [row["shape"] for row in rows] == list(SHAPES)
    assert [row["requests"] for row in rows] == [8, 8, 4]


def test_questions_share_their_context():
    pairs = questions((20, 5, 4), 6)
    assert len(pairs) == 24
    for start in range(0, 24, 4):
        assert len({context for context, _ in pairs[start : start + 4]}) == 1
    assert len({context for context, _ in pairs}) == 6
    assert pairs == questions((20, 5, 4), 6)
