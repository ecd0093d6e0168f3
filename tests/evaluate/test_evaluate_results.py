"""Standard errors and paired tests against their definitions and against simulation."""

import json
import math

import pytest
import torch

from spheret.evaluate.results import compare, read, samples, summary
from spheret.runs.layout import EVAL, EVAL_SAMPLES


def write(path, values):
    """A run's eval_samples.jsonl, where values[task][metric] is one value per document."""
    path.mkdir()
    lines = []
    for task, metrics in values.items():
        for number in range(len(next(iter(metrics.values())))):
            row = {metric: per_document[number] for metric, per_document in metrics.items()}
            identity = {"task": task, "document": number, "hash": f"h{number}"}
            lines.append(json.dumps({**identity, "metrics": row, "responses": []}))
    (path / EVAL_SAMPLES).write_text("\n".join(lines) + "\n")
    return path


def test_word_perplexity_error_by_simulation():
    """The standard error of one sample of documents predicts the spread over many samples."""
    generator = torch.Generator().manual_seed(0)

    def sample():
        words = torch.randint(50, 400, (60,), generator=generator)
        likelihoods = -words * (3.4 + 0.3 * torch.randn(60, generator=generator))
        return list(zip(likelihoods.tolist(), words.tolist(), strict=True))

    summaries = [summary("word_perplexity", sample()) for _ in range(400)]
    spread = torch.tensor([s.value for s in summaries]).std().item()
    assert sum(s.stderr for s in summaries) / 400 == pytest.approx(spread, rel=0.1)


def test_paired_accuracy(tmp_path):
    first, second = [1, 1, 0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 1, 1, 0, 1]
    a = write(tmp_path / "a", {"piqa": {"acc": first, "acc_norm": first}})
    b = write(tmp_path / "b", {"piqa": {"acc": second, "acc_norm": second}})
    (row,) = compare(a, b)
    assert (row.documents, row.wins, row.losses) == (8, 3, 1)
    assert row.difference == pytest.approx(25.0)
    change = torch.tensor([100.0 * (x - y) for x, y in zip(first, second, strict=True)])
    assert row.stderr == pytest.approx(change.std().item() / math.sqrt(8))
    # of four that differ, one or fewer on either side: 2 (1 + 4)/16
    assert row.p == pytest.approx(10 / 16)
    (back,) = compare(b, a)
    assert (back.difference, back.wins) == (-row.difference, 1)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (10, 0, 2 / 1024), (1, 9, 2 * 11 / 1024), (9, 1, 2 * 11 / 1024)],
)
def test_the_p_of_an_accuracy_is_the_exact_binomial(tmp_path, wins, losses, p):
    first, second = [1] * wins + [0] * losses + [1], [0] * wins + [1] * losses + [1]
    a = write(tmp_path / "a", {"piqa": {"acc_norm": first}})
    b = write(tmp_path / "b", {"piqa": {"acc_norm": second}})
    (row,) = compare(a, b)
    assert (row.wins, row.losses) == (wins, losses)
    assert row.p == pytest.approx(p)


def test_pairing_cancels_the_difficulty_of_documents(tmp_path):
    """Two models differ little, on documents that differ a lot."""
    generator = torch.Generator().manual_seed(1)
    hard = -4 + 2 * torch.randn(300, generator=generator)
    better = hard + 0.1 + 0.02 * torch.randn(300, generator=generator)
    a = write(tmp_path / "a", {"lambada_openai": {"perplexity": better.tolist(), "acc": [0] * 300}})
    b = write(tmp_path / "b", {"lambada_openai": {"perplexity": hard.tolist(), "acc": [0] * 300}})
    accuracy, perplexity = compare(a, b)
    assert (accuracy.difference, accuracy.p) == (0.0, 1.0)
    assert perplexity.log_ratio == pytest.approx(-0.1, abs=0.005)
    assert perplexity.stderr == pytest.approx(0.02 / math.sqrt(300), rel=0.15)
    assert perplexity.p < 1e-10
    assert perplexity.difference < 0
    assert summary("perplexity", hard.tolist()).stderr > 1


def test_files_that_are_not_results(tmp_path):
    (tmp_path / EVAL).write_text("{")
    with pytest.raises(ValueError, match=r"eval\.json"):
        read(tmp_path)
    (tmp_path / EVAL).write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="spheret eval"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="evaluate the run again"):
        samples(tmp_path)
    whole = '{"task": "piqa", "document": 0, "hash": "h", "metrics": {}, "responses": []}\n'
    (tmp_path / EVAL_SAMPLES).write_text(whole + whole[:12])
    with pytest.raises(ValueError, match=r"line 2 of .*eval_samples\.jsonl"):
        samples(tmp_path)
