"""What stops a run, what only speaks, and what is never message of a healthy one."""

import math
import shutil
import statistics

import pytest
from train_helpers import TINY as RUN_SIZES
from train_helpers import metrics, train

from spheret.cli import main
from spheret.model.gpt import MLP, Attention
from spheret.observe.plateau import LOOK
from spheret.observe.rules import HIGH_OWN_LOGIT
from spheret.runs import checkpoint
from spheret.runs.run import open_run


def poison_forward(monkeypatch, kind, call):
    """The `call`-th forward pass of a kind of branch gives NaN."""
    real, count = kind.forward, 0

    def forward(self, *arguments):
        nonlocal count
        count += 1
        out = real(self, *arguments)
        return out * float("nan") if count >= call else out

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize(
    ("kind", "number", "first"),
    [(MLP, 2, "sublayer 2 (MLP of block 1)"), (Attention, 1, "sublayer 1 (attention of block 1)")],
)
def test_a_non_finite_loss_stops_before_the_update(kind, number, first, prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    # two blocks, which run twice before the first update and once more after it: the fourth update fails
    poison_forward(monkeypatch, kind, 13)
    assert train(out, prepared, "--set", "train.checkpoint_every=2", "--eval-every", "0", steps=9) == 3
    message = capsys.readouterr().err
    assert all(fact in message for fact in ("update 4", first, "step-2"))
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] is None
    assert first in lines[-1]["stopped"]
    (event,) = lines[-1]["events"]
    assert (event["kind"], event["sublayer"], event["measured"]) == ("not finite", number, "branch")
    assert open_run(out).checkpoint().step == 2
    monkeypatch.undo()
    assert train(out, prepared, "--set", "train.checkpoint_every=2", "--eval-every", "0", "--resume", steps=9) == 0
    assert [line["step"] for line in metrics(out)] == list(range(1, 10))


@pytest.mark.parametrize(
    ("kind", "head", "collapses"),
    [
        ("proj-spheretnorm", "tied", True),
        pytest.param("proj-spheretnorm", "shifted", False, marks=pytest.mark.slow),
        pytest.param("pre-ln", "tied", False, marks=pytest.mark.slow),
    ],
)
def test_a_tied_head_collapses_and_a_shifted_one_does_not(kind, head, collapses, tmp_path, capsys):
    words = (
        "--layers", "6", "--width", "64", "--batch-size", "8", "--lr", "2e-2", "--warmup", "5", "--seed", "1",
        "--head-bias", "unigram", "--head", head, "--eval-every", "0",
    )  # fmt: skip
    assert train(tmp_path / "run", "sotu", *words, scheme=kind, steps=120) == 0
    lines = metrics(tmp_path / "run")
    alarms = [line["step"] for line in lines if "events" in line]
    # no evaluation was due: the loss itself asked for a look, and the last bits of a machine decide when
    assert len(alarms) == collapses
    assert all(step % LOOK == 0 for step in alarms)
    assert capsys.readouterr().err.count("ALARM: token collapse") == collapses
    entropy = open_run(tmp_path / "run").config.data.unigram_entropy
    assert (statistics.median(line["loss"] for line in lines[-10:]) > 0.98 * entropy) == collapses
    # it was known before the first update
    assert (lines[0]["start"]["own_logit"] > HIGH_OWN_LOGIT) == collapses


def start_of(tmp_path, prepared, capsys, *words, scheme="proj-spheretnorm"):
    """What is printed before the first update, and the record of it."""
    sizes = [word for word in RUN_SIZES if word != "--quiet"]
    asked = ["train", "--scheme", scheme, "--data", str(prepared), "--steps", "2", *sizes, "--width", "64"]
    assert main([*asked, *words, "--out", str(tmp_path / "run")]) == 0
    return capsys.readouterr().err, metrics(tmp_path / "run")[0]["start"]


class TestStart:
    def test_a_tied_head_on_a_sphere_is_warned_of_once(self, tmp_path, prepared, capsys):
        text, start = start_of(tmp_path, prepared, capsys, "--head", "tied", "--head-bias", "none")
        assert text.count("WARNING") == 1
        assert f"own logit is {start['own_logit']:.1f} above the mean" in text
        assert start["own_logit"] > 2.5
        assert start["expected"] == math.log(open_run(tmp_path / "run").model_config.vocab)
        entropy = open_run(tmp_path / "run").config.data.unigram_entropy
        assert f"the token frequencies, which are worth {start['expected'] - entropy:.2f} nats" in text
        assert "the most promising first: --head-bias unigram, --head shifted, " in text
        # a run that continues is past it
        start_again = ["train", "--resume", "--steps", "2", "--out", str(tmp_path / "run")]
        assert main(start_again) == 0
        assert "WARNING" not in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("scheme", "words"),
        [
            *(("proj-spheretnorm", f"--head-bias unigram {words}") for words in ("--head shifted", "--head untied")),
            *(("proj-spheretnorm", f"--head-bias unigram {words}") for words in ("--quiet", "--width 16")),
            # streams whose norm is free
            ("pre-ln", ""),
            ("post-ln", "--head tied"),
        ],
    )
    def test_others_are_not(self, scheme, words, tmp_path, prepared, capsys):
        text, start = start_of(tmp_path, prepared, capsys, *words.split(), scheme=scheme)
        assert "WARNING" not in text
        assert scheme == "proj-spheretnorm" or (start["own_logit"] > HIGH_OWN_LOGIT) == (scheme == "post-ln")

    def test_a_shift_alone_leaves_the_frequencies_to_the_stream(self, tmp_path, prepared, capsys):
        text, _ = start_of(tmp_path, prepared, capsys, "--head", "shifted", "--head-bias", "none")
        assert text.count("WARNING: the stream has to carry the token frequencies") == 1
        assert "--head-bias unigram" in text
        assert "--head shifted" not in text

    def test_the_record_is_the_loss_of_the_first_update_up_to_the_batch(self, tmp_path, prepared, capsys):
        words = ("--eval-every", "0", "--head-bias", "unigram")
        _, start = start_of(tmp_path, prepared, capsys, *words)
        # without validation the fixed tokens are the first batch
        assert start["loss"] == pytest.approx(metrics(tmp_path / "run")[0]["loss"], rel=1e-5)
        assert start["expected"] == open_run(tmp_path / "run").config.data.unigram_entropy


HOT = ("--lr", "6", "--set", "train.min_lr=6", "--set", "train.checkpoint_every=4")


@pytest.fixture(scope="module")
def diverging(prepared, tmp_path_factory):
    """pre-ln at a learning rate of 6, which ends at a finite loss near 100. It is never validated."""
    out = tmp_path_factory.mktemp("diverging") / "run"
    assert train(out, prepared, *HOT, "--eval-every", "0", scheme="pre-ln", steps=16) == 0
    return out


def divergence_of(out):
    ((step, text),) = [(line["step"], line["events"][0]["sentence"]) for line in metrics(out) if "events" in line]
    return step, text


def test_a_run_that_diverges_without_nan_is_recorded_and_goes_on(diverging):
    lines = metrics(diverging)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert not any("stopped" in line for line in lines)
    step, text = divergence_of(diverging)
    assert lines[step - 1]["loss"] > 30
    assert "the unigram entropy" in text
    (event,) = lines[step - 1]["events"]
    assert (event["kind"], event["since"]) == ("diverged", 1)
    assert f"sublayer {event['sublayer']} " in text


@pytest.mark.parametrize("every", ["0", "2"])
def test_a_run_that_diverges_is_stopped_if_so_configured(every, diverging, prepared, tmp_path, capsys):
    out = tmp_path / "run"
    words = (*HOT, "--eval-every", every, "--set", "evaluation.on_divergence=stop")
    for again in (False, True):
        # the same command again computes the same, from the last checkpoint
        assert train(out, prepared, *words, scheme="pre-ln", steps=16) == 3
        step, _ = divergence_of(diverging)
        message = capsys.readouterr().err
        assert message.count("ALARM: divergence") == 1
        assert f"stopped at step {step}: the run diverged at step {step}; step-4 is kept." in message, again
        lines = metrics(out)
        assert lines[-1]["stopped"] == f"the run diverged at step {step}"
        # up to there it is the run that went on
        assert [line["loss"] for line in lines] == [line["loss"] for line in metrics(diverging)[:step]]


def test_a_divergence_survives_a_resume(diverging, prepared, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(diverging, out)
    step, _ = divergence_of(diverging)
    for saved in checkpoint.steps(out / "checkpoints")[-1:]:
        shutil.rmtree(out / "checkpoints" / f"step-{saved}")
    assert step < checkpoint.steps(out / "checkpoints")[-1] < 16
    assert main(["train", "--resume", "--out", str(out)]) == 0
    # the alarm was raised before the checkpoint, and is not raised again; the last line still tells
    printed = capsys.readouterr()
    assert "ALARM" not in printed.err
    assert f"(it diverged at step {step}: the report says" in printed.out.splitlines()[-1]
    assert metrics(out) == metrics(diverging)
    # a run that diverged before this flag stops at once
    shutil.rmtree(out / "checkpoints" / "step-16")
    words = (*HOT, "--eval-every", "0", "--set", "evaluation.on_divergence=stop")
    assert train(out, prepared, *words, scheme="pre-ln", steps=16) == 3
    assert f"stopped at step 13: the run diverged at step {step}; step-12 is kept." in capsys.readouterr().err
