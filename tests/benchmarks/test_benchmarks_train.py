import json

import pytest
import torch
from scripts import script

from spheret.data import cached
from spheret.model.gpt import GPTConfig
from spheret.runs.config import EvaluationConfig, TrainConfig

bench = script("benchmarks/train.py")
QUICK = ["--layers", "2", "--heads", "2", "--width", "16", "--block", "16", "--batch-size", "2"]
ROWS = ["bare step", "trainer", "evaluation", "look inside", "checkpoint"]


def test_command(tmp_path, capsys):
    out = tmp_path / "train.json"
    bench.run(bench.main, [*QUICK, "--repeats", "1", "--device", "cpu", "--json", str(out)])
    printed, results = capsys.readouterr().out, json.loads(out.read_text())
    assert list(results["seconds"]) == ROWS
    assert all(took > 0 for took in results["seconds"].values())
    assert results["trainer_over_bare"] == results["seconds"]["trainer"] / results["seconds"]["bare step"]
    assert all(name in printed for name in ROWS)
    (row,) = bench.comparisons(results)
    assert row.ours / row.rival == results["trainer_over_bare"]
    assert (results["width"], results["device"], results["torch"]) == (16, "cpu", torch.__version__)


def test_the_trainer_is_measured_at_work(tmp_path):
    config = GPTConfig(layers=1, heads=2, width=16, block=16, vocab=320, scheme="proj-spheretnorm")
    training = TrainConfig(
        steps=bench.STEPS, batch_size=2, tokens_per_update=32, lr=1e-3, min_lr=1e-4, warmup=0,
        checkpoint_every=bench.STEPS,
    )  # fmt: skip
    evaluation = EvaluationConfig(eval_every=bench.STEPS, eval_windows=2)
    bench.measure(config, training, evaluation, cached("sotu", "bytes"), tmp_path, repeats=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # two warm-up rounds and three that count: each is a real update and writes its line
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_both_contestants_compute_the_same(tmp_path, monkeypatch):
    # the first loss of the bare step is the trainer's: same weights, same windows
    config = GPTConfig(layers=1, heads=2, width=16, block=16, vocab=320, scheme="pre-ln")
    training = TrainConfig(
        steps=bench.STEPS, batch_size=2, tokens_per_update=32, lr=1e-3, min_lr=1e-4, warmup=0,
        checkpoint_every=bench.STEPS,
    )  # fmt: skip
    evaluation = EvaluationConfig(eval_every=bench.STEPS, eval_windows=2)
    seen = []
    real = bench._model

    def model(config):
        gpt = real(config)
        gpt.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0].clone(), float(out.detach()))))
        return gpt

    monkeypatch.setattr(bench, "_model", model)
    monkeypatch.setattr(bench, "medians", lambda _, runs, *__: [run() for run in list(runs.values())[:2]] and {})
    bench.measure(config, training, evaluation, cached("sotu", "bytes"), tmp_path, repeats=1)
    (bare_inputs, bare_loss), (trainer_inputs, trainer_loss) = seen[:2]
    assert torch.equal(bare_inputs, trainer_inputs)
    assert bare_loss == trainer_loss


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--heads", "3"], "not divisible by heads 3"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(SystemExit, match=message):
        bench.run(bench.main, words)
