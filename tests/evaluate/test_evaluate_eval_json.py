"""Standard errors and paired tests against their definitions and against simulation."""

import json
import math

import pytest
import torch

from spheret.evaluate.eval_json import _sign_test, average, compare, read, samples, summary
from spheret.runs.layout import EVAL, EVAL_SAMPLES


def write(path, values):
    """A run's sidecar with values[task][metric] = what each document gave."""
    path.mkdir()
    lines = []
    for task, metrics in values.items():
        for number in range(len(next(iter(metrics.values())))):
            row = {metric: each[number] for metric, each in metrics.items()}
            lines.append(json.dumps({"task": task, "document": number, "hash": f"h{number}", "metrics": row}))
    (path / EVAL_SAMPLES).write_text("\n".join(lines) + "\n")
    return path


def test_word_perplexity_error_by_simulation():
    """Documents drawn again and again scatter as the standard error of one drawing says."""
    generator = torch.Generator().manual_seed(0)

    def drawing():
        words = torch.randint(50, 400, (60,), generator=generator)
        likelihoods = -words * (3.4 + 0.3 * torch.randn(60, generator=generator))
        return list(zip(likelihoods.tolist(), words.tolist(), strict=True))

    found = [summary("word_perplexity", drawing()) for _ in range(400)]
    spread = torch.tensor([f["value"] for f in found]).std().item()
    assert sum(f["stderr"] for f in found) / 400 == pytest.approx(spread, rel=0.1)


def test_paired_accuracy(tmp_path):
    ours, theirs = [1, 1, 0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 1, 1, 0, 1]
    a = write(tmp_path / "a", {"piqa": {"acc": ours, "acc_norm": ours}})
    b = write(tmp_path / "b", {"piqa": {"acc": theirs, "acc_norm": theirs}})
    (row,) = compare(a, b)
    assert (row["documents"], row["wins"], row["losses"]) == (8, 3, 1)
    assert row["difference"] == pytest.approx(25.0)
    change = torch.tensor([100.0 * (x - y) for x, y in zip(ours, theirs, strict=True)])
    assert row["stderr"] == pytest.approx(change.std().item() / math.sqrt(8))
    # of four that differ, one or fewer on either side: 2 (1 + 4)/16
    assert row["p"] == pytest.approx(10 / 16)
    (back,) = compare(b, a)
    assert (back["difference"], back["wins"]) == (-row["difference"], 1)


def test_the_sign_test_is_the_binomials():
    assert _sign_test(0, 0) == 1.0
    assert _sign_test(3, 3) == 1.0
    assert _sign_test(10, 0) == pytest.approx(2 / 1024)
    assert _sign_test(1, 9) == _sign_test(9, 1) == pytest.approx(2 * 11 / 1024)


def test_paired_perplexity_sees_what_is_common(tmp_path):
    """Two models that differ by little on documents that differ by much."""
    generator = torch.Generator().manual_seed(1)
    hard = -4 + 2 * torch.randn(300, generator=generator)
    better = hard + 0.1 + 0.02 * torch.randn(300, generator=generator)
    a = write(tmp_path / "a", {"lambada_openai": {"perplexity": better.tolist(), "acc": [0] * 300}})
    b = write(tmp_path / "b", {"lambada_openai": {"perplexity": hard.tolist(), "acc": [0] * 300}})
    accuracy, perplexity = compare(a, b)
    assert (accuracy["difference"], accuracy["p"]) == (0.0, 1.0)
    assert perplexity["log_ratio"] == pytest.approx(-0.1, abs=0.005)
    assert perplexity["stderr"] == pytest.approx(0.02 / math.sqrt(300), rel=0.15)
    assert perplexity["p"] < 1e-10
    assert perplexity["difference"] < 0
    assert summary("perplexity", hard.tolist())["stderr"] > 1


def test_what_is_no_result(tmp_path):
    (tmp_path / EVAL).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)
    (tmp_path / EVAL).write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="is not what spheret eval writes here"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="evaluate the run again"):
        samples(tmp_path)
    assert average({"tasks": {}}) is None
