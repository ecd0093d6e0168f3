"""What stops a run, what only speaks, and what is never message of a healthy one."""

import math
import shutil
import statistics
from collections import deque

import msgspec
import pytest
import torch
from train_helpers import TINY as RUN_SIZES
from train_helpers import metrics, train

from spheret.analysis.remedies import Advice
from spheret.cli import main
from spheret.connections import PAPER_SCHEMES, SCHEMES, scheme
from spheret.model.gpt import GPT, MLP, Attention, GPTConfig
from spheret.model.monitor import HIGH_OWN_LOGIT, mean_cosine, measure_stream, on_bound
from spheret.model.probes import sublayer_name
from spheret.runs import checkpoint
from spheret.runs.metrics import EventRecord, SublayerRecord
from spheret.runs.plateau import LONG, plateau_updates
from spheret.runs.records import DivergenceRecord, WatchRecord
from spheret.runs.run import open_run
from spheret.train.distributed import World
from spheret.train.guards import NonFinite, collapse_sentence, find_non_finite
from spheret.watching.divergence import FEW, PATIENCE, Divergence, moved_sentence
from spheret.watching.losses import COLLAPSE_LOOK, COLLAPSE_UPDATES, LossGuard, LossState
from spheret.watching.observations import Finding

ALONE = World(torch.device("cpu"))
TINY = {"layers": 3, "heads": 2, "width": 16, "block": 16, "vocab": 32}


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
    # two blocks, which are measured before and after the first update: the fourth update fails
    poison_forward(monkeypatch, kind, 11)
    assert train(out, prepared, "--checkpoint-every", "2", "--eval-every", "0", steps=9) == 3
    message = capsys.readouterr().err
    assert f"stopped before update 4: the branch of {first} is not finite; step-2 is kept" in message
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] is None
    assert first in lines[-1]["stopped"]
    assert lines[-1]["events"] == [{"kind": "not finite", "sublayer": number, "measured": "branch"}]
    assert open_run(out).checkpoint().step == 2
    monkeypatch.undo()
    assert train(out, prepared, "--checkpoint-every", "2", "--eval-every", "0", "--resume", steps=9) == 0
    assert [line["step"] for line in metrics(out)] == list(range(1, 10))


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("inf")


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("name", PAPER_SCHEMES)
def test_the_first_bad_gradient_is_named(block, name):
    model = GPT(GPTConfig(scheme=name, **TINY))
    model.blocks[block].mlp.output.register_forward_hook(lambda module, inputs, out: _Poison.apply(out))
    x = torch.randint(32, (2, 16))
    # the branch's gradient is poisoned: the state below it is the first that shows it
    event = find_non_finite(model, [(x, x)], torch.enable_grad, ALONE)
    assert (event.kind, event.measured) == ("not finite", "gradient")
    # what lies below may be cut off by a branch that passes nothing back
    assert event.sublayer == 2 * block + 1 or event.parameter in dict(model.named_parameters())


@pytest.mark.parametrize("block", range(3))
def test_the_first_bad_output_is_named(block):
    model = GPT(GPTConfig(scheme="pre-ln", **TINY))
    torch.nn.init.constant_(model.blocks[block].attention.output.bias, 3e38)
    model.blocks[block].attention.output.register_forward_hook(lambda module, inputs, out: out * 10)
    x = torch.randint(32, (2, 16))
    event = find_non_finite(model, [(x, x)], torch.enable_grad, ALONE)
    assert event == EventRecord("not finite", sublayer=2 * block + 1, measured="branch")
    assert f"the branch of sublayer {2 * block + 1} (attention of block {block + 1})" in str(NonFinite(event))


def test_bad_weights_are_named():
    model = GPT(GPTConfig(scheme="pre-ln", **TINY))
    model.blocks[1].mlp.hidden.weight.data[0, 0] = torch.nan
    x = torch.randint(32, (2, 16))
    event = find_non_finite(model, [(x, x)], torch.enable_grad, ALONE)
    assert event == EventRecord("not finite", parameter="blocks.1.mlp.hidden.weight", measured="weights")
    assert "blocks.1.mlp.hidden.weight" in str(NonFinite(event))


def test_a_huge_learning_rate_ends_with_a_sentence_and_a_good_checkpoint(prepared, tmp_path, capsys):
    out = tmp_path / "run"
    code = train(
        out, prepared, "--lr", "1e30", "--warmup", "0", "--checkpoint-every", "1", "--clip", "inf",
        scheme="residual", steps=50,
    )  # fmt: skip
    assert code == 3
    message = capsys.readouterr().err
    assert "is kept" in message or "no checkpoint" in message
    for step in checkpoint.steps(out / "checkpoints"):
        weights = checkpoint.verify(out / "checkpoints" / f"step-{step}").model()
        assert all(tensor.isfinite().all() for _, tensor in weights)


def test_spikes_are_counted():
    watch = LossGuard(None)
    generator = torch.Generator().manual_seed(0)
    for value in (3 + 0.1 * torch.randn(200, generator=generator)).tolist():
        watch.loss(value)
    assert watch.spikes == 0
    watch.loss(5.0)
    watch.loss(3.0)
    watch.loss(6.0)
    assert watch.spikes == 2
    again = LossGuard(None)
    again.restore(msgspec.json.decode(msgspec.json.encode(watch.state()), type=WatchRecord))
    assert again.state() == watch.state()


def sublayer(number, **measures):
    usual = {"angle_mean": 0.1, "angle_max": 0.2, "alpha": None, "norm": 9.0, "drift": 0.0, "cosine": 0.1}
    return SublayerRecord(sublayer=number, **{**usual, "grad_norm": 1.0, **measures})


SUBLAYERS = [sublayer(1, cosine=0.5), sublayer(2, cosine=0.999)]


def watch_of(*losses):
    guard = LossGuard(3.0)
    for loss in losses:
        guard.loss(loss)
    return guard


class TestCollapse:
    def test_the_alarm_needs_both_signs_and_time_and_speaks_once(self):
        guard, alarms = watch_of(5.0, 4.0), {}
        for step in range(3, 100):
            guard.loss(3.02)
            if event := guard.collapse(SUBLAYERS):
                alarms[step] = event
        # the first median of the plateau has ten losses, of which six are on it
        (step,) = alarms
        assert step == 2 + 8 + COLLAPSE_UPDATES - 1
        assert alarms[step] == Finding("collapsed", sublayer=2, measured="cosine", now=0.999)
        advice = Advice("--head shifted", ""), Advice("--lr 0.1", "")
        sentence = collapse_sentence(guard, alarms[step], advice)
        assert all(fact in sentence for fact in ("sublayer 2 (MLP of block 1)", "0.999", "3.020", "3.000"))
        assert sentence.endswith("--head shifted, --lr 0.1")
        assert watch_of(*[2.5] * 200).collapse(SUBLAYERS) is None
        assert watch_of(*[3.0] * 200).collapse(SUBLAYERS[:1]) is None
        # Pre-LN passes the plateau
        passing = watch_of(*noisy((20, 5.8, 3.1), (14, 3.1, 3.0), (20, 2.9, 2.4)))
        assert passing.collapse(SUBLAYERS) is None

    def test_the_sublayers_are_measured_while_the_loss_stays(self):
        guard = watch_of()
        looks = []
        for step in range(1, 71):
            guard.loss(3.0 if step < 60 else 2.0)
            if guard.suspects_collapse(step):
                looks.append(step)
        assert looks == [30, 40, 50, 60]
        guard.alarmed = True
        assert not any(guard.suspects_collapse(step) for step in range(100))

    def test_without_an_entropy_nothing_is_suspected(self):
        guard = LossGuard(None)
        for _ in range(60):
            guard.loss(3.0)
        assert not guard.stays_on_plateau()

    def test_a_checkpoint_of_an_older_version_is_read(self):
        old = b'{"spikes":1,"collapsed_since":40,"alarmed":false,"losses":[3.0]}'
        guard = LossGuard(3.0)
        guard.restore(msgspec.json.decode(old, type=WatchRecord))
        assert guard.state() == LossState(spikes=1, alarmed=False, losses=[3.0])

    @pytest.mark.parametrize(
        ("kind", "head", "collapses"),
        [("proj-spheretnorm", "tied", True), ("proj-spheretnorm", "shifted", False), ("pre-ln", "tied", False)],
    )
    def test_a_tied_head_collapses_and_a_shifted_one_does_not(self, kind, head, collapses, tmp_path, capsys):
        words = (
            "--layers", "6", "--width", "64", "--batch-size", "8", "--lr", "2e-2", "--warmup", "5", "--seed", "1",
            "--head-bias", "unigram", "--head", head, "--eval-every", "0",
        )  # fmt: skip
        assert train(tmp_path / "run", "sotu", *words, scheme=kind, steps=60) == 0
        lines = metrics(tmp_path / "run")
        alarms = [line["step"] for line in lines if "alarm" in line]
        # no evaluation was due: the loss itself asked for a look, and the last bits of a machine decide when
        assert len(alarms) == collapses
        assert all(step % COLLAPSE_LOOK == 0 for step in alarms)
        assert capsys.readouterr().err.count("ALARM: token collapse") == collapses
        entropy = open_run(tmp_path / "run").config.data.unigram_entropy
        assert (statistics.median(line["loss"] for line in lines[-10:]) > 0.98 * entropy) == collapses
        # at this rate Pre-LN is slow to leave the plateau
        if kind != "pre-ln":
            assert (plateau_updates(open_run(tmp_path / "run").metrics(), entropy) > LONG * 60) == collapses
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
        text, start = start_of(tmp_path, prepared, capsys)
        assert text.count("WARNING") == 1
        assert f"own logit is {start['own_logit']:.1f} above the mean" in text
        assert start["own_logit"] > 2.5
        assert start["expected"] == math.log(open_run(tmp_path / "run").model_config.vocab)
        entropy = open_run(tmp_path / "run").config.data.unigram_entropy
        assert f"the token frequencies, which are worth {start['expected'] - entropy:.2f} nats" in text
        assert "the most promising first: --head shifted, --head-bias unigram, " in text
        # a run that continues is past it
        start_again = ["train", "--resume", "--steps", "2", "--out", str(tmp_path / "run")]
        assert main(start_again) == 0
        assert "WARNING" not in capsys.readouterr().err

    @pytest.mark.parametrize("words", [("--head", "shifted"), ("--head", "untied"), ("--quiet",), ("--width", "16")])
    def test_others_are_not(self, words, tmp_path, prepared, capsys):
        assert "WARNING" not in start_of(tmp_path, prepared, capsys, *words, "--head-bias", "unigram")[0]

    def test_a_shift_alone_leaves_the_frequencies_to_the_stream(self, tmp_path, prepared, capsys):
        text, _ = start_of(tmp_path, prepared, capsys, "--head", "shifted")
        assert text.count("WARNING: the stream has to carry the token frequencies") == 1
        assert "--head-bias unigram" in text
        assert "--head shifted" not in text

    @pytest.mark.parametrize("scheme", ["pre-ln", "post-ln"])
    def test_nor_is_a_stream_whose_norm_is_free(self, scheme, tmp_path, prepared, capsys):
        text, start = start_of(tmp_path, prepared, capsys, scheme=scheme)
        assert "WARNING" not in text
        assert (start["own_logit"] > HIGH_OWN_LOGIT) == (scheme == "post-ln")

    def test_the_record_is_the_loss_of_the_first_update_up_to_the_batch(self, tmp_path, prepared, capsys):
        words = ("--eval-every", "0", "--head-bias", "unigram")
        _, start = start_of(tmp_path, prepared, capsys, *words)
        # without validation the fixed tokens are the first batch
        assert start["loss"] == pytest.approx(metrics(tmp_path / "run")[0]["loss"], rel=1e-5)
        assert start["expected"] == open_run(tmp_path / "run").config.data.unigram_entropy


def test_the_last_line_says_that_a_run_stayed_at_token_frequencies(tmp_path, prepared, capsys):
    sizes = [word for word in RUN_SIZES if word != "--quiet"]
    asked = ["train", "--scheme", "pre-ln", "--data", str(prepared), "--steps", "30", "--lr", "1e-5", *sizes]
    bias = ["--head-bias", "unigram", "--eval-every", "0", "--head", "shifted"]
    assert main([*asked, *bias, "--out", str(tmp_path / "run")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    entropy = open_run(tmp_path / "run").config.data.unigram_entropy
    spent = plateau_updates(open_run(tmp_path / "run").metrics(), entropy)
    assert f"({spent} of 30 updates had the loss of token frequencies" in last or "nothing learned yet" in last


ENTROPY, VOCAB, WARMUP = 3.04, 320, 30


def noisy(*pieces):
    """Losses from pieces of (updates, first, last), straight lines with noise."""
    generator = torch.Generator().manual_seed(0)
    lines = [torch.linspace(first, last, updates) for updates, first, last in pieces]
    values = torch.cat(lines)
    return (values + 0.1 * torch.randn(len(values), generator=generator)).tolist()


def divergence(entropy, steps):
    return Divergence(math.log(VOCAB) if entropy is None else entropy, "level", WARMUP, steps)


def steps_of_divergence(values, entropy=ENTROPY, steps=1000, reload=False):
    """The steps at which the guard raised its alarm."""
    guard, recent, alarms = divergence(entropy, steps), deque(maxlen=64), []
    for step, value in enumerate(values, start=1):
        recent.append(value)
        if guard.loss(step, list(recent)):
            alarms.append(step)
        if reload:
            state = msgspec.json.decode(msgspec.json.encode(guard.state()), type=DivergenceRecord)
            guard = divergence(entropy, steps)
            guard.restore(state)
    return alarms


LEARNS = (200, 5.8, 2.4)
NORMAL = {
    "a run that learns": noisy(LEARNS, (600, 2.4, 2.0)),
    "spikes that recover": noisy(
        LEARNS, (3, 400.0, 9.0), (80, 9.0, 2.4), (100, 2.3, 2.3), (60, 5.0, 4.0), (50, 2, 2)
    ),
    "a collapse": noisy((100, 5.8, 3.1), (700, 3.1, 3.1)),
    "learning too slowly to see": noisy((800, 5.8, 5.8)),
    "learning slowly": noisy((800, 5.8, 4.5)),
    "falling fast": noisy((20, 5.8, 5.7), (25, 5.7, 3.4)),
    "a start far above a uniform guess": noisy((800, 24.0, 6.0)),
}
DIVERGED = {
    "high for long": (noisy(LEARNS, (600, 3.6, 3.6)), 200 + WARMUP + PATIENCE),
    "a learning rate far too high": (noisy((10, 5.8, 3.5), (500, 12.0, 29.9)), WARMUP + 20 + PATIENCE),
    "high after learning for a few updates": (
        noisy((8, 5.8, 5.5), (8, 3.6, 3.5), (500, 4.5, 4.5)),
        WARMUP + PATIENCE + 1,
    ),
    "orders of magnitude": (noisy(LEARNS, (100, 7e6, 7e6)), 200 + FEW),
    "orders of magnitude in the warm-up": (noisy((3, 5.8, 5.6), (20, 7e6, 7e6)), 3 + FEW),
}


class TestDivergence:
    @pytest.mark.parametrize("entropy", [ENTROPY, None])
    @pytest.mark.parametrize("name", NORMAL)
    def test_a_normal_run_is_not_called_diverged(self, name, entropy):
        assert steps_of_divergence(NORMAL[name], entropy) == []
        # nor is it at its last step
        assert steps_of_divergence(NORMAL[name], entropy, steps=len(NORMAL[name])) == []

    @pytest.mark.parametrize("name", DIVERGED)
    def test_the_alarm_comes_once_and_in_time(self, name):
        values, latest = DIVERGED[name]
        (step,) = steps_of_divergence(values)
        assert latest - 30 <= step <= latest
        # state.json carries all that the guard needs
        assert steps_of_divergence(values, reload=True) == [step]

    def test_without_an_entropy_a_uniform_guess_is_the_measure(self):
        assert steps_of_divergence(noisy(LEARNS, (300, 5.5, 5.5)), None) == []
        assert len(steps_of_divergence(noisy(LEARNS, (300, 7.0, 7.0)), None)) == 1
        assert math.log(VOCAB) < 5.8

    def test_a_run_that_ends_too_high_has_diverged(self):
        values = noisy(LEARNS, (40, 29.9, 29.9))
        assert steps_of_divergence(values, steps=1000) == []
        assert steps_of_divergence(values, steps=240) == [240]

    def test_a_long_run_has_more_time_to_recover(self):
        values = noisy(LEARNS, (500, 3.6, 3.6), (300, 2.4, 2.4))
        assert steps_of_divergence(values, steps=50_000) == []

    @pytest.mark.parametrize(
        ("change", "measured", "before", "now"),
        [
            ({"angle_mean": 1.4}, "angle", 0.1, 1.4),
            ({"grad_norm": 40.0}, "gradient share", 1 / math.sqrt(8), 40 / math.sqrt(1607)),
            ({"norm": 900.0}, "norm factor", 1.0, 100.0),
        ],
    )
    def test_the_layer_that_moved_is_named(self, change, measured, before, now):
        guard = divergence(ENTROPY, 100)
        guard.loss(1, [5.8])
        records = [sublayer(number) for number in range(1, 9)]
        assert guard.moved(records) == Finding("diverged")
        guard.remember(1, records)
        assert guard.moved(records) == Finding("diverged", since=1)
        # later sublayers inherit the norm
        event = guard.moved(
            [sublayer(n, **(change if n == 5 or (n > 5 and "norm" in change) else {})) for n in range(1, 9)]
        )
        assert (event.kind, event.sublayer, event.measured, event.since) == ("diverged", 5, measured, 1)
        assert (event.before, event.now) == pytest.approx((before, now))
        assert moved_sentence(event, sublayer_name).startswith(
            "sublayer 5 (attention of block 3) moved most since step 1: "
        )

    def test_a_record_of_a_bad_moment_is_not_a_baseline(self):
        guard = divergence(ENTROPY, 100)
        record = [sublayer(1)]
        guard.loss(1, [5.8])
        guard.remember(1, record)
        guard.loss(2, [5.8, 90.0, 90.0])
        guard.remember(2, record)
        assert guard.healthy.step == 1


HOT = ("--lr", "6", "--min-lr", "6", "--checkpoint-every", "4")


@pytest.fixture(scope="module")
def diverging(prepared, tmp_path_factory):
    """pre-ln at a learning rate of 6, which ends at a finite loss near 100. It is never validated."""
    out = tmp_path_factory.mktemp("diverging") / "run"
    assert train(out, prepared, *HOT, "--eval-every", "0", scheme="pre-ln", steps=16) == 0
    return out


def divergence_of(out):
    ((step, text),) = [(line["step"], line["diverged"]) for line in metrics(out) if "diverged" in line]
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


def test_the_last_line_of_a_run_says_that_it_diverged(diverging, prepared, tmp_path, capsys):
    sizes = [word for word in RUN_SIZES if word != "--quiet"]
    asked = ["train", "--scheme", "pre-ln", "--data", str(prepared), "--steps", "16", *sizes, *HOT]
    assert main([*asked, "--eval-every", "0", "--out", str(tmp_path / "run")]) == 0
    step, _ = divergence_of(diverging)
    assert f"(it diverged at step {step}: the report says" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("every", ["0", "2"])
def test_a_run_that_diverges_is_stopped_if_so_configured(every, diverging, prepared, tmp_path, capsys):
    out = tmp_path / "run"
    words = (*HOT, "--eval-every", every, "--on-divergence", "stop")
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
    assert train(out, prepared, *HOT, "--eval-every", "0", scheme="pre-ln", steps=16) == 0
    # the alarm was raised before the checkpoint, and is not raised again
    assert "ALARM" not in capsys.readouterr().err
    assert metrics(out) == metrics(diverging)
    # a run that diverged before this flag stops at once
    shutil.rmtree(out / "checkpoints" / "step-16")
    assert train(out, prepared, *HOT, "--eval-every", "0", "--on-divergence", "stop", scheme="pre-ln", steps=16) == 3
    assert f"stopped at step 13: the run diverged at step {step}; step-12 is kept." in capsys.readouterr().err


def test_an_unknown_way_to_meet_divergence(prepared, tmp_path, capsys):
    assert train(tmp_path / "run", prepared, "--on-divergence", "stopp") == 2
    assert "unknown on_divergence 'stopp'. Did you mean 'stop'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCHEMES)
def test_looking_changes_nothing(name):
    model = GPT(GPTConfig(scheme=name, dropout=0.2, **TINY)).train()
    x = torch.randint(32, (2, 16))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    stream = measure_stream(model, x, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(stream.sublayers) == 6


@pytest.mark.parametrize("width", [16, 48, 64, 112, 768])
def test_bounded_scalars_start_on_their_bound_and_are_seen_to_leave_it(width):
    model = GPT(GPTConfig(**{**TINY, "width": width, "scheme": "proj-spheretnorm", "layers": 1}))
    names = ["entry_norm.gamma", "blocks.0.attention_connection.norm.a", "blocks.0.mlp_connection.norm.a"]
    assert on_bound(model) == names
    with torch.no_grad():
        model.entry_norm.gamma -= 0.5
        model.blocks[0].mlp_connection.norm.a -= 0.1
    assert on_bound(model) == [names[1]]


def test_mean_cosine():
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    flat = torch.nn.functional.normalize(x.reshape(15, 7), dim=-1)
    pairs = flat @ flat.T
    expected = (pairs.sum() - pairs.trace()) / (15 * 14)
    assert float(mean_cosine(x)) == pytest.approx(float(expected), abs=1e-12)
    assert float(mean_cosine(torch.ones(4, 3))) == pytest.approx(1.0)


def test_a_scheme_has_an_entry_norm_or_not():
    # what the monitor calls a radius exists for the spherical rows alone
    assert [n for n in PAPER_SCHEMES if hasattr(scheme(n).enter(8), "radius")] == [
        "geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm",
    ]  # fmt: skip
