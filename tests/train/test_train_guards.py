"""What stops a run, what only speaks, and what is never message of a healthy one."""

import msgspec
import pytest
import torch
from train_helpers import metrics, train

from spheret.connections import PAPER_SCHEMES, SCHEMES, scheme
from spheret.model.gpt import GPT, MLP, Attention, GPTConfig
from spheret.model.monitor import look, mean_cosine, on_bound
from spheret.runs import checkpoint
from spheret.runs.records import WatchRecord
from spheret.runs.run import open_run
from spheret.train.distributed import World
from spheret.train.guards import SPIKE_LEAST, Watch, find_non_finite

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
    ("kind", "first"), [(MLP, "sublayer 2 (MLP of block 1)"), (Attention, "sublayer 1 (attention of block 1)")]
)
def test_a_non_finite_loss_stops_before_the_update(kind, first, prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    # two blocks: the fourth update fails
    poison_forward(monkeypatch, kind, 7)
    assert train(out, prepared, "--checkpoint-every", "2", "--eval-every", "0", steps=9) == 3
    message = capsys.readouterr().err
    assert f"stopped before update 4: the branch of {first} is not finite; step-2 is kept" in message
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] is None
    assert first in lines[-1]["stopped"]
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
    place = find_non_finite(model, [(x, x)], torch.enable_grad, ALONE)
    below = f"sublayer {2 * block + 1} (attention of block {block + 1})"
    # what lies below may be cut off by a branch that passes nothing back
    assert below in place or "gradient of" in place


@pytest.mark.parametrize("block", range(3))
def test_the_first_bad_output_is_named(block):
    model = GPT(GPTConfig(scheme="pre-ln", **TINY))
    torch.nn.init.constant_(model.blocks[block].attention.output.bias, 3e38)
    model.blocks[block].attention.output.register_forward_hook(lambda module, inputs, out: out * 10)
    x = torch.randint(32, (2, 16))
    assert f"the branch of sublayer {2 * block + 1} (attention" in find_non_finite(
        model, [(x, x)], torch.enable_grad, ALONE
    )


def test_bad_weights_are_named():
    model = GPT(GPTConfig(scheme="pre-ln", **TINY))
    model.blocks[1].mlp.hidden.weight.data[0, 0] = torch.nan
    x = torch.randint(32, (2, 16))
    assert (
        find_non_finite(model, [(x, x)], torch.enable_grad, ALONE)
        == "the weights blocks.1.mlp.hidden.weight are not finite"
    )


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
    watch = Watch(None)
    generator = torch.Generator().manual_seed(0)
    for value in (3 + 0.1 * torch.randn(200, generator=generator)).tolist():
        watch.loss(value)
    assert watch.spikes == 0
    watch.loss(5.0)
    watch.loss(3.0)
    watch.loss(6.0)
    assert watch.spikes == 2
    again = Watch(None)
    again.restore(msgspec.json.decode(msgspec.json.encode(watch.state()), type=WatchRecord))
    assert again.state() == watch.state()


SUBLAYERS = [{"sublayer": 1, "cosine": 0.5}, {"sublayer": 2, "cosine": 0.999}]


def test_the_alarm_needs_both_signs_and_time_and_speaks_once():
    def watch(loss):
        guard = Watch(3.0)
        for _ in range(SPIKE_LEAST):
            guard.loss(loss)
        return guard

    stuck = watch(3.02)
    message = [stuck.collapse(step, 10, SUBLAYERS) for step in range(10, 100, 5)]
    alarms = [text for text in message if text]
    assert len(alarms) == 1
    assert "sublayer 2" in alarms[0]
    assert "--head-bias unigram" in alarms[0]
    # the first look after the warm-up is at 15, and 20 updates must pass
    assert message.index(alarms[0]) == 5
    learning = watch(2.5)
    assert not any(learning.collapse(step, 0, SUBLAYERS) for step in range(1, 200))
    healthy = watch(3.0)
    assert not any(healthy.collapse(step, 0, SUBLAYERS[:1]) for step in range(1, 200))


@pytest.mark.slow
def test_a_collapsing_run_raises_the_alarm_and_a_healthy_one_does_not(tmp_path, capsys):
    words = (
        "--layers",
        "12",
        "--width",
        "64",
        "--heads",
        "4",
        "--block",
        "128",
        "--batch-size",
        "8",
        "--warmup",
        "24",
    )
    runs = {"bad": ("proj-spheretnorm", "none"), "good": ("proj-spheretnorm", "unigram"), "plain": ("pre-ln", "none")}
    for name, (kind, bias) in runs.items():
        code = train(
            tmp_path / name,
            "sotu",
            *words,
            "--warmup",
            "24",
            "--head-bias",
            bias,
            "--eval-every",
            "5",
            scheme=kind,
            steps=130,
        )
        assert code == 0
        message = capsys.readouterr().err
        assert message.count("ALARM: token collapse") == (name == "bad")
        assert any("alarm" in line for line in metrics(tmp_path / name)) == (name == "bad")


@pytest.mark.parametrize("name", SCHEMES)
def test_looking_changes_nothing(name):
    model = GPT(GPTConfig(scheme=name, dropout=0.2, **TINY)).train()
    x = torch.randint(32, (2, 16))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    seen = look(model, x, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(seen["sublayers"]) == 6


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
    assert mean_cosine(x) == pytest.approx(float(expected), abs=1e-12)
    assert mean_cosine(torch.ones(4, 3)) == pytest.approx(1.0)


def test_a_scheme_has_an_entry_norm_or_not():
    # what the monitor calls a radius exists for the spherical rows alone
    assert [n for n in PAPER_SCHEMES if hasattr(scheme(n).enter(8), "radius")] == [
        "geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm",
    ]  # fmt: skip
