import json

import pytest
import torch

from spheret.bench import step as bench
from spheret.cli import main
from spheret.model.gpt import GPT, PRESETS


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "T", (2, 2, 16))


def test_command(tmp_path, capsys):
    out = tmp_path / "step.json"
    words = ["--size", "T", "--tokens", "64", "--block", "32", "--schemes", "keel,geonorm", "--repeats", "1"]
    assert main(["bench", "step", *words, "--no-memory", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    table = json.loads(out.read_text())["table"]
    assert [row["name"] for row in table] == ["pre-ln", "keel", "geonorm", bench.PAPERS_CODE, bench.RIVAL]
    assert all(row["float32"]["tokens/s"] > 0 for row in table)
    assert "not run" in printed


@pytest.mark.parametrize("name", ["pre-ln", "p-spheretnorm", bench.PAPERS_CODE])
def test_models_with_shared_branches_are_the_models(name):
    shared = bench._ours("pre-ln", "T", 16, None)
    model = bench._ours(name, "T", 16, shared)
    assert not any(p.is_meta for p in model.parameters())
    own = GPT(model.config)
    own.load_state_dict(model.state_dict())
    x, y = bench._batch(32, 16)
    torch.testing.assert_close(bench._loss(name, model, x, y), own(x, y), rtol=1e-5, atol=1e-5)
    assert model.tokens.weight is shared.tokens.weight


def test_peak_memory_counts_the_weights_gradients_and_moments():
    assert bench.peak_bytes("pre-ln", "T", 32, 16, "float32") > 4 * 4 * 50304 * 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "XL"], "unknown size"),
        (["--tokens", "100"], "multiple of block"),
        (["--schemes", "preln"], "Did you mean 'pre-ln'"),
    ],
)
def test_bad_input(words, message, capsys):
    assert main(["bench", "step", *words]) == 2
    assert message in capsys.readouterr().err
