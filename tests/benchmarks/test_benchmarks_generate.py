"""The benchmarks of generation and of evaluation run on small models, and write what they print."""

import json

import pytest
from scripts import script

from spheret.model import gpt

generate, evaluation = script("benchmarks/generate.py"), script("benchmarks/evaluation.py")


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setitem(gpt.PRESETS, "S", (1, 2, 32))


@pytest.mark.usefixtures("_small")
def test_generate(tmp_path, capsys):
    out = tmp_path / "generate.json"
    words = ["--new", "4", "--batches", "1,2", "--repeats", "1", "--device", "cpu"]
    generate.run(generate.main, [*words, "--json", str(out)])
    result = json.loads(out.read_text())
    rows = result["table"]
    assert [(row["name"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("pre-ln", "proj-spheretnorm", "transformers GPT-2")
    ]
    assert all(row["tokens/s"] > 0 for row in rows)
    assert "tokens/s" in capsys.readouterr().out
    ratios = [row.ours / row.rival for row in generate.comparisons(result)]
    assert ratios == pytest.approx([1 / rows[1]["x transformers"], 1 / rows[4]["x transformers"]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "gpu"], "--device gpu is not available"),
        (["--batches", "1,two"], "--batches"),
        (["--new", "2000"], "--new must be at most 960"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(SystemExit, match=message):
        generate.run(generate.main, words)


@pytest.mark.usefixtures("_small")
def test_evaluation(tmp_path):
    out = tmp_path / "eval.json"
    words = ["--count", "2", "--repeats", "1", "--device", "cpu", "--json", str(out)]
    evaluation.run(evaluation.main, words)
    result = json.loads(out.read_text())
    rows = result["table"]
    assert [row["shape"] for row in rows] == list(evaluation.SHAPES)
    ratios = [row.rival / row.ours for row in evaluation.comparisons(result)]
    assert ratios == pytest.approx([row["ratio"] for row in rows])
    assert [row["requests"] for row in rows] == [8, 8, 4]


def test_questions_share_their_context():
    pairs = evaluation.questions((20, 5, 4), 6)
    assert len(pairs) == 24
    for start in range(0, 24, 4):
        assert len({context for context, _ in pairs[start : start + 4]}) == 1
    assert len({context for context, _ in pairs}) == 6
    assert pairs == evaluation.questions((20, 5, 4), 6)
