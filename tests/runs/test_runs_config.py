"""What was asked for becomes numbers, or one sentence that says what would work."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.connections import SCHEMES
from spheret.runs.config import (
    LEARNING_RATES,
    Options,
    TrainConfig,
    from_toml,
    options_of,
    resolve_model,
    resolve_training,
    scheme_options,
)  # fmt: skip

SMALL = Options(scheme="pre-ln", data="sotu", steps=1000)


@pytest.mark.parametrize("size", LEARNING_RATES)
def test_a_size_brings_the_papers_recipe(size):
    options = Options(scheme="pre-ln", size=size, steps=50_000)
    training, model = resolve_training(options, "cuda"), resolve_model(options, 50257, 50304)
    assert (training.batch_size, training.block, training.tokens_per_update) == (16, 1024, 131_072)
    assert (training.warmup, training.precision, training.seed) == (2000, "bf16", 1337)
    assert (training.lr, training.min_lr) == (LEARNING_RATES[size], LEARNING_RATES[size] / 10)
    assert (training.betas, training.weight_decay, training.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (training.accumulation(), training.accumulation(8)) == (8, 1)
    assert (model.block, model.vocab, model.head_bias, model.bias, model.dropout) == (1024, 50304, "none", True, 0.0)


def test_without_a_size_the_recipe_is_small():
    training = resolve_training(SMALL, "cpu")
    assert (training.block, training.batch_size, training.tokens_per_update) == (128, 8, 1024)
    assert (training.lr, training.warmup, training.precision) == (1e-3, 100, "float32")
    assert (training.checkpoint_every, training.eval_every) == (100, 100)
    assert resolve_training(replace(SMALL, steps=50_000), "cpu").warmup == 2000


@given(st.integers(1, 400), st.integers(0, 400))
def test_the_learning_rate_is_nanogpts(steps, warmup):
    warmup = min(warmup, steps)
    config = resolve_training(replace(SMALL, steps=steps, warmup=warmup, lr=6e-4), "cpu")
    for it in range(steps):
        # nanoGPT's get_lr, from its source's description
        if it < warmup:
            expected = 6e-4 * (it + 1) / (warmup + 1)
        else:
            ratio = (it - warmup) / (steps - warmup)
            expected = 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)
        assert config.lr_at(it + 1) == pytest.approx(expected, rel=1e-12)


BAD = [
    ({"lr": -1e-3}, r"--lr must be above 0, got -0.001"),
    ({"lr": math.nan}, r"--lr must be above 0"),
    ({"min_lr": 1.0}, r"--min-lr must lie between 0 and --lr"),
    ({"warmup": 1001}, r"--warmup 1001 lies beyond --steps 1000"),
    ({"steps": 0}, r"--steps must be at least 1"),
    ({"steps": None}, r"--steps is needed"),
    ({"batch_size": 0}, r"--batch-size must be at least 1"),
    ({"keep": 0}, r"--keep must be at least 1"),
    ({"eval_every": -1}, r"--eval-every must be at least 0"),
    ({"clip": 0.0}, r"--clip must be above 0"),
    ({"weight_decay": -0.1}, r"--weight-decay must be at least 0"),
    ({"seed": -1}, r"--seed must lie between"),
    ({"precision": "fp8"}, r"unknown precision 'fp8'"),
    ({"tokens_per_update": 3000}, r"3,000 is no multiple of batch 8 x block 128 = 1,024: 2,048 or 3,072 would work"),
    ({"tokens_per_update": 10}, r"1,024 or 2,048 would work"),
    ({"size": "XL"}, r"unknown size 'XL'"),
]


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(BAD)])
def test_bad_numbers(changes, said):
    with pytest.raises(ValueError, match=said):
        resolve_training(replace(SMALL, **changes), "cpu")


BAD_MODELS = [
    ({"scheme": None}, r"--scheme is needed"),
    ({"scheme": "proj-sphertnorm"}, r"Did you mean 'proj-spheretnorm'"),
    ({"vocab": 100}, r"--vocab 100 is smaller than the data's vocabulary of 257"),
    ({"layers": 0}, r"layers must be a positive integer, got 0"),
    ({"size": "S", "layers": 2}, r"give --size, or --layers"),
    ({"set": ("p=0.5",)}, r"unknown option of pre-ln 'p'"),
    ({"set": ("p",)}, r"--set takes option=value"),
    ({"dropout": 1.5}, r"dropout must lie in"),
    ({"head_bias": "unigrams"}, r"Did you mean 'unigram'"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_MODELS)
def test_bad_models(changes, said):
    with pytest.raises(ValueError, match=said):
        resolve_model(replace(SMALL, **changes), 257, 320)


def test_processes_share_an_update():
    config = resolve_training(replace(SMALL, tokens_per_update=8192), "cpu")
    assert [config.accumulation(n) for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match=r"x 3 processes = 3,072: 6,144 or 9,216 would work"):
        config.accumulation(3)


def test_zero_is_said():
    said = {"eval_every": 0, "warmup": 0, "dropout": 0.0, "seed": 0, "no_bias": True}
    assert Options(**said).given() == said


def test_scheme_options_are_read():
    assert scheme_options(("p=0.5", "schedule=constant", "learnable_p=true", "max_angle=none", "q=inf")) == {
        "p": 0.5, "schedule": "constant", "learnable_p": True, "max_angle": None, "q": math.inf,
    }  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_what_was_resolved_resolves_to_itself(name):
    settings = ("p=0.25", "schedule=constant") if "spheret" in name else ()
    options = replace(SMALL, scheme=name, set=settings, no_bias=True, dropout=0.1, tokens_per_update=4096)
    model, training = resolve_model(options, 257, 320), resolve_training(options, "cpu")
    again = options_of(model, training)
    assert resolve_model(again, 257, 320) == model
    # on another device too: what was resolved stays
    assert resolve_training(again, "cuda", 2) == training
    assert TrainConfig.from_dict(training.as_dict()) == training


def test_a_size_resolves_to_itself():
    options = Options(scheme="pre-ln", size="M", steps=50_000)
    model, training = resolve_model(options, 50257, 50304), resolve_training(options, "cuda")
    again = options_of(model, training)
    assert (resolve_model(again, 50257, 50304), resolve_training(again, "cpu")) == (model, training)


def test_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('scheme = "p-spheretnorm"\nsteps = 100\nlr = 1\nbatch-size = 4\nno_bias = true\n[set]\np = 0.5\n')
    read = from_toml(path)
    assert read == {
        "scheme": "p-spheretnorm", "steps": 100, "lr": 1.0, "batch_size": 4, "no_bias": True, "set": ("p=0.5",),
    }  # fmt: skip
    assert resolve_model(Options(**read), 257, 320).scheme_options == {"p": 0.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("warm_up = 3", r"unknown option in .*'warm_up'.*Did you mean 'warmup'"),
        ("steps = 1.5", r"steps in .* must be of type int, got 1.5"),
        ("steps = true", r"must be of type int"),
        ("set = 3", r"must be a table"),
        ("steps =", r"is not TOML"),
    ],
)
def test_bad_toml(tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        from_toml(tmp_path / "run.toml")
