"""Runs through the command line: what they leave, that they repeat, and that they resume bitwise."""

import json
import shutil
import signal
import time
from pathlib import Path

import drill
import pytest
import torch
from train_helpers import TINY, losses, metrics, train, weights

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.data import open_data
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.runs.layout import LOCK, SAMPLE
from spheret.runs.metrics import TIMING
from spheret.runs.records import RUN_SAMPLES
from spheret.runs.run import open_run
from spheret.support.errors import SIGNALS
from spheret.support.files import Lock
from spheret.train.distributed import World
from spheret.train.loop import Trainer
from spheret.train.recipes import rate_words
from spheret.train.sample import write_ending_sample


@pytest.fixture(scope="module")
def unbroken(prepared, tmp_path_factory):
    """A run of twelve steps with dropout, a checkpoint every other."""
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    assert train(out, prepared, *BROKEN_WORDS, steps=12) == 0
    return out


BROKEN_WORDS = ("--set", "train.checkpoint_every=2", "--eval-every", "3", "--set", "model.dropout=0.1")


def test_it_starts_with_four_lines_and_ends_with_one(prepared, tmp_path, capsys):
    out = tmp_path / "my run"
    words = [word for word in TINY if word != "--quiet"]
    asked = ["train", "--scheme", "p-spheretnorm", "--set", "p=0.3", "--data", str(prepared), "--steps", "2", *words]
    assert main([*asked, "--out", str(out)]) == 0
    model, rate, data, run, end = capsys.readouterr().out.splitlines()
    parameters = GPT(open_run(out).settings.model).parameter_count()
    assert all(fact in model for fact in ("p-spheretnorm:p=0.3", "width 16", f"{parameters:,} parameters"))
    assert f"{open_run(out).settings.train.lr:g}, {rate_words(open_run(out).model_config)}" in rate
    assert f"{open_data(prepared).manifest.tokens['train']:,} training" in data
    assert "2 steps of 128 tokens" in run
    last = open_run(out).metrics()[-1]
    assert all(fact in end for fact in (f"{last.loss:.4f}", f"{last.val_loss:.4f}", f"spheret report '{out}'"))
    # the same command again has nothing to do
    assert main([*asked, "--out", str(out)]) == 0
    again = capsys.readouterr()
    assert "after step 2" in again.out.splitlines()[2]
    assert "finished" in again.err


def test_text_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "my.txt"
    text.write_text("".join(f"{number}. A line of my own text, as short as it is.\n" for number in range(200)))
    out = tmp_path / "run"
    assert train(out, text, steps=2) == 0
    # the children of a race are quiet
    assert "my.txt" not in capsys.readouterr().err
    run = open_run(out)
    assert run.data().path.is_relative_to(tmp_path / "cache")
    assert run.config.data.corpus.name == "my.txt"
    # the same command goes on with it, and changed text is another run
    assert train(out, text, steps=2) == 0
    text.write_text(text.read_text().replace("short", "brief"))
    capsys.readouterr()
    assert train(out, text, steps=2) == 2
    assert "is a different run; these differ: data" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_trains_and_says_what_it_sees(scheme, prepared, tmp_path):
    assert train(tmp_path / "run", prepared, scheme=scheme, steps=3) == 0
    run = open_run(tmp_path / "run")
    lines = run.metrics()
    assert [line.step for line in lines] == [1, 2, 3]
    for line in lines:
        assert None not in (line.loss, line.lr, line.grad_norm, line.spikes, *(getattr(line, key) for key in TIMING))
    last = lines[-1]
    assert [layer.sublayer for layer in last.sublayers] == [1, 2, 3, 4]
    written = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(
        layer[key] is not None for layer in written["sublayers"] for key in ("angle_max", "cosine", "grad_norm")
    )
    # a stream without a radius has null there
    assert written["radius"] == last.radius
    spherical = last.radius is not None
    assert spherical == ("geonorm" in scheme or "spheretnorm" in scheme)
    if spherical:
        assert max(layer.drift for layer in last.sublayers) < 1e-5
        assert all(name.endswith((".a", ".gamma")) for name in last.on_bound)
        # geonorm-affine scales the angle instead
        assert all(layer.alpha is None or layer.alpha > 0 for layer in last.sublayers)
    documents = last.val_documents
    assert sum(row[2] for row in documents) / sum(row[1] for row in documents) == pytest.approx(last.val_loss)


def test_the_first_loss_and_the_validation_loss_are_the_models(prepared, tmp_path):
    assert train(tmp_path / "run", prepared, "--seed", "7", steps=2) == 0
    run, data = open_run(tmp_path / "run"), open_data(prepared)
    torch.manual_seed(7)
    model = GPT(run.model_config, data.counts())
    assert losses(tmp_path / "run")[0] == pytest.approx(
        float(model(*data.loader(32, 4, 7).batch(0)).detach()), rel=1e-6
    )
    trained = run.model()
    losses_now = torch.cat([trained.token_losses(x, y).flatten() for x, y, _ in data.validation(32, 4, 4)])
    assert run.metrics()[-1].val_loss == pytest.approx(float(losses_now.double().mean()), rel=1e-6)


def test_the_directory_and_its_config(unbroken, prepared):
    config = json.loads((unbroken / "config.json").read_text())
    assert GPTConfig.from_dict(config["model"]).scheme == "proj-spheretnorm"
    assert config["train"]["steps"] == 12
    assert config["data"]["path"] == str(prepared)
    assert config["environment"]["threads"] == 1
    names = {path.name for path in (unbroken / "checkpoints").iterdir()}
    best = min((line for line in metrics(unbroken) if "val_loss" in line and line["step"] % 2 == 0), key=_val_loss)
    assert names == {"step-10", "step-12", f"step-{best['step']}"}
    state = json.loads((unbroken / "checkpoints" / "step-12" / "state.json").read_text())
    assert state["training"]["threads"] == 1
    assert state["training"]["rng"]


def _val_loss(line):
    return line["val_loss"]


def test_the_evaluation_interval_changes_no_training_loss(unbroken, prepared, tmp_path):
    words = ("--set", "train.checkpoint_every=2", "--eval-every", "5", "--set", "model.dropout=0.1")
    assert train(tmp_path / "run", prepared, *words, steps=12) == 0
    assert losses(tmp_path / "run") == losses(unbroken)
    assert weights(tmp_path / "run") == weights(unbroken)
    assert train(tmp_path / "never", prepared, *words[:2], "--eval-every", "0", *words[4:], steps=12) == 0
    assert losses(tmp_path / "never") == losses(unbroken)


@pytest.mark.parametrize("scheme", PAPER_SCHEMES)
def test_accumulation_is_a_larger_batch(scheme, prepared, tmp_path):
    updates = []
    for batch_size in (2, 8):
        config = TrainConfig(
            steps=1, batch_size=batch_size, tokens_per_update=256, lr=1e-3, min_lr=1e-4, warmup=0,
            checkpoint_every=1,
        )  # fmt: skip
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, heads=2, width=16, block=32, vocab=320, scheme=scheme, head_bias="none"))
        trainer = Trainer(
            tmp_path,
            model,
            config,
            EvaluationConfig(0, 1),
            open_data(prepared),
            World(torch.device("cpu")),
            quiet=True,
        )
        gradients = {}

        def keep(*_, model=model, gradients=gradients):
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

        trainer.optimizer.register_step_pre_hook(keep)
        windows = open_data(prepared).loader(32, batch_size, accumulation=8 // batch_size)
        line = trainer.update(windows.batches(0, 1))
        updates.append((line.loss, line.grad_norm, gradients))
    (loss, norm, gradients), (other_loss, other_norm, others) = updates
    assert (loss, norm) == pytest.approx((other_loss, other_norm), rel=1e-6)
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).norm()) < 1e-6, name


def test_init_from_takes_the_weights_and_nothing_else(unbroken, prepared, tmp_path):
    out = tmp_path / "run"
    assert train(out, prepared, "--set", f"train.init_from={unbroken}", "--seed", "5", steps=2) == 0
    model = open_run(unbroken).model()
    first = open_data(prepared).loader(32, 4, 5).batch(0)
    assert losses(out)[0] == pytest.approx(float(model(*first).detach()), rel=1e-6)
    assert [line["step"] for line in metrics(out)] == [1, 2]
    assert metrics(out)[0]["lr"] == open_run(out).config.train.lr / 1
    # the same from one checkpoint of it
    source = str(unbroken / "checkpoints" / "step-12")
    assert train(tmp_path / "same", prepared, "--set", f"train.init_from={source}", "--seed", "5", steps=2) == 0
    assert losses(tmp_path / "same") == losses(out)


BACKBONE = ("positions=rope", "mlp=swiglu", "norm=rmsnorm", "qk_norm=true", "kv_heads=1", "bias=false", "dropout=0.1")
OPTIONS = {
    "shifted": ("--head", "shifted"),
    "untied": ("--head", "untied"),
    "backbone": tuple(word for option in BACKBONE for word in ("--set", f"model.{option}")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_with_options_resumes_bit_for_bit(name, prepared, tmp_path):
    words = (*OPTIONS[name], "--set", "train.checkpoint_every=2", "--set", "train.keep=9")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, prepared, *words, steps=4) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-4")
    assert train(parts, prepared, *words, "--resume", steps=4) == 0
    assert drill.differences(whole, parts) == []
    assert ("head.weight" in dict(open_run(whole).checkpoint().model())) == (name == "untied")


@pytest.mark.parametrize("start", ["missing", "empty", "no checkpoint"])
def test_resume_with_nothing_to_resume_starts(start, unbroken, prepared, tmp_path):
    out = tmp_path / "run"
    if start == "empty":
        out.mkdir()
    if start == "no checkpoint":
        shutil.copytree(unbroken, out)
        shutil.rmtree(out / "checkpoints")
    assert train(out, prepared, *BROKEN_WORDS, "--resume", steps=12) == 0
    assert drill.differences(unbroken, out) == []


def test_resuming_a_finished_run_does_nothing(unbroken, capsys):
    before = {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()}
    assert main(["train", "--out", str(unbroken), "--resume"]) == 0
    assert "is finished: 12 steps" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()} == before


def test_killed_and_resumed(unbroken, prepared, tmp_path):
    out, words = tmp_path / "run", ("--scheme", "proj-spheretnorm", "--data", str(prepared), "--steps", "12", *TINY)
    process = drill.start(out, [*words, *BROKEN_WORDS])
    assert drill.reached(process, out / "metrics.jsonl", (unbroken / "metrics.jsonl").stat().st_size // 3)
    process.kill()
    process.communicate()
    assert train(out, prepared, *BROKEN_WORDS, steps=12) == 0
    assert drill.differences(unbroken, out) == []


@pytest.mark.parametrize(
    ("kills", "seed", "precision"),
    [
        pytest.param(1, 1337, "bf16", marks=pytest.mark.slow),
        *(
            pytest.param(20, seed, precision, marks=pytest.mark.drill)
            for precision in ("float32", "bf16")
            for seed in range(1, 6)
        ),
    ],
)
def test_killed_at_seeded_moments_and_resumed(kills, seed, precision, prepared, tmp_path):
    words = list(drill.RECIPE)
    words[words.index("--data") + 1] = str(prepared)
    if kills == 1:
        words[words.index("--steps") + 1] = "24"
    said: list[str] = []
    assert drill.drill(tmp_path, kills, seed, [*words, "--precision", precision], said.append) == []
    assert said[1] == f"kill 1 of {kills}"


@pytest.mark.parametrize(("number", "code"), SIGNALS.items())
def test_a_signal_saves_and_ends(number, code, unbroken, prepared, tmp_path, monkeypatch, capsys):
    """Also if it comes again: a scheduler sends SIGTERM, and the shell between sends it once more."""
    real, again = Trainer.update, 20 if number == signal.SIGTERM else 1
    before = {each: signal.getsignal(each) for each in SIGNALS}

    def update(self, batches):
        for _ in range(again if self.step == 4 else 0):
            signal.raise_signal(number)
        return real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", update)
        try:
            assert train(tmp_path / "run", prepared, *BROKEN_WORDS, steps=12) == code
        finally:
            # after the first signal all but SIGINT are ignored until the process ends
            for each, handler in before.items():
                signal.signal(each, handler)
    assert "run the same command again" in capsys.readouterr().err
    assert open_run(tmp_path / "run").checkpoint().step == len(metrics(tmp_path / "run")) == 5
    assert train(tmp_path / "run", prepared, *BROKEN_WORDS, steps=12) == 0
    assert drill.differences(unbroken, tmp_path / "run") == []


def test_a_directory_is_one_process_s(unbroken, prepared, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    lock = Lock(out / LOCK)
    assert lock.acquire()
    assert open_run(out).is_locked()
    assert train(out, prepared, *BROKEN_WORDS, steps=12) == 2
    assert "another process is training" in capsys.readouterr().err
    lock.release()
    assert not open_run(out).is_locked()


def test_toml_and_flags(prepared, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\nscheme = "p-spheretnorm"\nscheme_options = {p = 0.25}\n[train]\nsteps = 3\nlr = 0.5\n'
    )
    words = ["--config", str(tmp_path / "run.toml"), "--lr", "0.001", "--data", str(prepared), *TINY]
    assert main(["train", *words, "--set", "schedule=constant", "--set", "p=0.5", "--out", str(tmp_path / "a")]) == 0
    config = open_run(tmp_path / "a").config
    assert (config.train.lr, config.train.steps) == (0.001, 3)
    assert config.model.scheme_options == {"schedule": "constant", "p": 0.5}


def test_sampling(unbroken, capsys):
    assert main(["sample", str(unbroken), "--prompt", "The", "--tokens", "30", "--count", "2"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("The")
    assert main(["sample", str(unbroken), "--prompt", "The", "--tokens", "30", "--count", "2"]) == 0
    assert capsys.readouterr().out == first
    assert main(["sample", str(unbroken), "--tokens", "5", "--temperature", "0"]) == 0
    assert main(["sample", str(unbroken / "nowhere")]) == 2
    assert "no run directory" in capsys.readouterr().err


def test_a_training_ends_with_a_sample(unbroken, capsys):
    sample = RUN_SAMPLES.read(unbroken / "sample.json")
    block = json.loads((unbroken / "config.json").read_text())["model"]["block"]
    assert (sample.step, sample.prompt, sample.tokens) == (12, "", min(128, block))
    # spheret sample gives the same text from the checkpoint, so the model was that of the last step
    words = ["--tokens", str(sample.tokens), "--temperature", str(sample.temperature), "--seed", str(sample.seed)]
    assert main(["sample", str(unbroken), *words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == sample.text + "\n"


def test_a_sample_that_is_gone_is_written_again(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    (out / SAMPLE).unlink()
    before = torch.random.get_rng_state()
    model = open_run(out).model()
    write_ending_sample(tmp_path, model, open_run(out).tokenizer(), 12)
    # it takes no number from the generator of the training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert main(["train", "--out", str(out), "--resume", "--quiet"]) == 0
    assert (out / SAMPLE).read_bytes() == (unbroken / SAMPLE).read_bytes() == (tmp_path / SAMPLE).read_bytes()


@pytest.mark.slow
def test_compiled_training_is_the_same_training(prepared, tmp_path):
    assert train(tmp_path / "a", prepared, steps=3) == 0
    assert train(tmp_path / "b", prepared, "--set", "train.compile=true", steps=3) == 0
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-5)


@pytest.mark.slow
def test_memory_is_constant_over_two_thousand_steps(prepared, tmp_path):
    words = ("--scheme", "proj-spheretnorm", "--steps", "2000", "--eval-every", "100", "--data", str(prepared), *TINY)
    process = drill.start(tmp_path / "run", words)
    seen = {}
    while process.poll() is None:
        path = tmp_path / "run" / "metrics.jsonl"
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        about = Path(f"/proc/{process.pid}/status")
        status = about.read_text() if about.exists() else ""
        if "VmRSS:" in status:
            seen[lines] = int(status.split("VmRSS:")[1].split()[0])
        time.sleep(0.2)
    drill.finish(process)
    early = max(size for lines, size in seen.items() if 150 <= lines <= 500)
    late = max(size for lines, size in seen.items() if lines >= 1500)
    assert late < 1.02 * early + 2048
