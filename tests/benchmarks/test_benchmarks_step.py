import json

import pytest
import torch
from scripts import script

from spheret.model.config import MODERN_KV_HEADS, PRESETS
from spheret.model.gpt import GPT

bench = script("benchmarks/step.py")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "T", (2, 2, 16))


@pytest.mark.parametrize("bf16", [True, False])
def test_command(bf16, tmp_path, monkeypatch):
    """On a CPU with bfloat16 arithmetic and on one without, whichever this one is."""
    monkeypatch.setattr(bench, "has_bfloat16", lambda: bf16)
    out = tmp_path / "step.json"
    schemes = "keel,geonorm:schedule=constant"
    words = ["--size", "T", "--tokens", "64", "--block", "32", "--schemes", schemes, "--repeats", "1"]
    bench.run(bench.main, [*words, "--device", "cpu", "--no-memory", "--json", str(out)])
    rows = json.loads(out.read_text())["table"]
    assert [row["name"] for row in rows] == ["pre-ln", *schemes.split(","), bench.PAPERS_CODE, bench.RIVAL]
    for precision in ("float32", "bf16") if bf16 else ("float32",):
        assert all(row[precision]["tokens/s"] > 0 for row in rows)
        assert all(row[precision]["GB"] is None for row in rows)
    assert all(("bf16" in row) == bf16 for row in rows)


def test_the_modern_backbone_against_llama_and_qwen3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "has_bfloat16", lambda: False)
    monkeypatch.setitem(PRESETS, "T", (1, 4, 16))
    monkeypatch.setitem(MODERN_KV_HEADS, "modern-T", 2)
    out = tmp_path / "step.json"
    words = "--size modern-T --tokens 32 --block 16 --schemes proj-spheretnorm --repeats 1 --device cpu --no-memory"
    bench.run(bench.main, [*words.split(), "--json", str(out)])
    result = json.loads(out.read_text())
    rows = result["table"]
    assert len(bench.comparisons(result)) == 4
    assert [row["name"] for row in rows][-3:] == [bench.WITHOUT_NORMS, "transformers Llama", "transformers Qwen3"]
    ours = [bench.build_model(name, "modern-T", 16, None) for name in (bench.WITHOUT_NORMS, "pre-ln")]
    counts = [sum(p.numel() for p in bench._rival(name, "modern-T", 16).parameters()) for name in bench.MODERN_RIVALS]
    assert counts == [model.parameter_count() for model in ours]
    assert counts[0] == counts[1] - 2 * 4
    assert "transformers Llama" in capsys.readouterr().out


# test_benchmarks_measuring has the schemes
@pytest.mark.parametrize("name", ["p-spheretnorm:p=3", bench.PAPERS_CODE])
def test_models_with_shared_branches_are_the_models(name):
    shared = bench.build_model("pre-ln", "T", 16, None)
    model = bench.build_model(name, "T", 16, shared)
    assert not any(p.is_meta for p in model.parameters())
    own = GPT(model.config)
    own.load_state_dict(model.state_dict())
    x, y = bench.random_batch(32, 16)
    torch.testing.assert_close(bench.compute_loss(name, model, x, y), own(x, y), rtol=1e-5, atol=1e-5)
    assert model.tokens.weight is shared.tokens.weight
