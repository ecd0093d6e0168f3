"""What was asked for becomes a full config, or one sentence that says what would work."""

import math
import textwrap
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import tyro
from hypothesis import given as cases
from hypothesis import strategies as st

from spheret import flags
from spheret.connections import SCHEMES
from spheret.paper.recipe import LEARNING_RATES
from spheret.runs.config import (
    SECTIONS,
    build_section,
    changed_settings,
    differences,
    merge,
    read_config,
)
from spheret.support.settings import later_settings
from spheret.train.recipes import SMALL as SMALL_RECIPE
from spheret.train.recipes import WITH_SIZE, complete

SMALL = {"model": {"scheme": "pre-ln"}, "data": {"path": "sotu"}, "train": {"steps": 1000}}
HOME = {field.name: section for section, kind in SECTIONS.items() for field in fields(kind)}


def changed(**settings):
    """SMALL with other settings, each put into its section; None leaves a setting out."""
    result = merge(SMALL, *({HOME[name]: {name: value}} for name, value in settings.items() if name != "size"))
    if "size" in settings:
        result["size"] = settings["size"]
    return {
        key: {name: each for name, each in value.items() if each is not None} if key in SECTIONS else value
        for key, value in result.items()
    }


@pytest.mark.parametrize("size", LEARNING_RATES)
def test_a_size_brings_the_papers_recipe(size):
    config = complete(changed(size=size, steps=50_000), "cuda", 1, 50257, 50304)
    train, model = config.train, config.model
    assert (train.batch_size, model.block, train.tokens_per_update) == (16, 1024, 131_072)
    assert (train.warmup, train.precision, train.seed) == (2000, "bf16", 1337)
    assert (train.lr, train.min_lr) == (LEARNING_RATES[size], LEARNING_RATES[size] / 10)
    assert (train.betas, train.weight_decay, train.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (config.accumulation(), config.accumulation(8)) == (8, 1)
    assert (model.block, model.vocab, model.head_bias, model.bias, model.dropout) == (1024, 50304, "none", True, 0.0)


def test_without_a_size_the_recipe_is_small():
    config = complete(SMALL, "cpu")
    assert (config.model.block, config.train.batch_size, config.train.tokens_per_update) == (128, 8, 1024)
    assert (config.train.lr, config.train.warmup, config.train.precision) == (1e-3, 100, "float32")
    assert (config.train.checkpoint_every, config.evaluation.eval_every) == (100, 100)
    assert complete(changed(steps=50_000), "cpu").train.warmup == 2000


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (256, 4), (512, 8), (768, 12)])
def test_heads_follow_the_width(width, heads):
    assert complete(changed(width=width), "cpu").model.heads == heads


@cases(st.integers(1, 400), st.integers(0, 400))
def test_the_learning_rate_is_nanogpts(steps, warmup):
    warmup = min(warmup, steps)
    train = complete(changed(steps=steps, warmup=warmup, lr=6e-4), "cpu").train
    for it in range(steps):
        # nanoGPT's get_lr, from its source's description
        if it < warmup:
            expected = 6e-4 * (it + 1) / (warmup + 1)
        else:
            ratio = (it - warmup) / (steps - warmup)
            expected = 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)
        assert train.lr_at(it + 1) == pytest.approx(expected, rel=1e-12)


@cases(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200))
def test_warm_up_stable_decay(steps, warmup, decay):
    warmup = min(warmup, steps - 1)
    decay = min(decay, max(1, steps - warmup))
    asked = changed(steps=steps, warmup=warmup, lr=6e-4, lr_schedule="wsd", decay_steps=decay)
    rates = [complete(asked, "cpu").train.lr_at(step) for step in range(1, steps + 1)]
    stable = rates[warmup : steps - decay + 1]
    assert rates[:warmup] == pytest.approx([6e-4 * (it + 1) / (warmup + 1) for it in range(warmup)])
    assert set(stable) == {6e-4}
    # arXiv 2405.18392: 1 - sqrt, to 0
    assert rates[steps - decay :] == pytest.approx([6e-4 * (1 - math.sqrt(n / decay)) for n in range(decay)])


def test_defaults_of_warm_up_stable_decay():
    train = complete(changed(steps=1000, lr_schedule="wsd"), "cpu").train
    assert (train.decay_steps, train.min_lr, train.warmup) == (200, 0.0, 100)
    assert complete(changed(steps=1000, lr_schedule="wsd", min_lr=1e-5), "cpu").train.lr_at(1000) > 1e-5
    assert complete(changed(steps=1, lr_schedule="wsd"), "cpu").train.lr_at(1) == 1e-3


def test_settings_that_came_later_may_be_missing(tmp_path):
    config = complete(changed(), "cpu")
    saved, later = config.as_dict(), {name: later_settings(kind) for name, kind in SECTIONS.items()}
    assert {"optimizer", "base_heads"} <= set(later["train"])
    assert {"positions", "kv_heads"} <= set(later["model"])
    whole = {name: {**saved[name], **later[name]} for name in saved}
    for section in SECTIONS:
        # a file leaves them out where they have their defaults, and may have them
        assert not set(saved[section]) & set(later[section])
        for written in (saved, whole):
            assert build_section(tmp_path, section, written[section]) == getattr(config, section)
    assert list(changed_settings(whole, saved)) == list(changed_settings(saved, whole)) == []
    given = changed(optimizer="muon", parametrization="mup", base_width=64)
    muon = complete({**given, "model": {**given["model"], "mlp": "relu2"}}, "cpu").as_dict()
    assert [name for name, *_ in changed_settings(saved, muon)] == [
        "mlp", "optimizer", "parametrization", "base_width", "base_heads",
    ]  # fmt: skip
    assert muon["train"]["optimizer"] == "muon"


BAD = [
    ({"lr": -1e-3}, r"--lr must be above 0, got -0.001"),
    ({"lr": math.nan}, r"--lr must be above 0"),
    ({"min_lr": 1.0}, r"--min-lr must lie between 0 and --lr"),
    ({"warmup": 1001}, r"--warmup 1001 lies beyond --steps 1000"),
    ({"steps": 0}, r"--steps must be at least 1"),
    ({"steps": None}, r"--steps is needed"),
    ({"path": None}, r"--data is needed"),
    ({"batch_size": 0}, r"--batch-size must be at least 1"),
    ({"keep": 0}, r"--keep must be at least 1"),
    ({"eval_every": -1}, r"--eval-every must be at least 0"),
    ({"clip": 0.0}, r"--clip must be above 0"),
    ({"betas": (0.9, 1.0)}, r"--betas must lie in \[0, 1\), got 0.9 and 1.0"),
    ({"weight_decay": -0.1}, r"--weight-decay must be at least 0"),
    ({"seed": -1}, r"--seed must lie between"),
    ({"precision": "fp8"}, r"unknown precision 'fp8'"),
    ({"tokens_per_update": 3000}, r"3,000 is no multiple of batch 8 x block 128 = 1,024: 2,048 or 3,072 would work"),
    ({"tokens_per_update": 10}, r"1,024 or 2,048 would work"),
    ({"size": "XL"}, r"unknown size 'XL'"),
    ({"scheme": None}, r"--scheme is needed"),
    ({"scheme": "proj-sphertnorm"}, r"Did you mean 'proj-spheretnorm'"),
    ({"vocab": 100}, r"--vocab 100 is smaller than the data's vocabulary of 257"),
    ({"layers": 0}, r"layers must be a positive integer, got 0"),
    ({"size": "S", "layers": 2}, r"give --size, or --layers"),
    ({"scheme_options": {"p": 0.5}}, r"unknown option of pre-ln 'p'"),
    ({"dropout": 1.5}, r"dropout must lie in"),
    ({"head_bias": "unigrams"}, r"Did you mean 'unigram'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(BAD)])
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        complete(changed(**settings), "cpu", 1, 257, 320)


def test_processes_share_an_update():
    config = complete(changed(tokens_per_update=8192), "cpu")
    assert [config.accumulation(n) for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match=r"x 3 processes = 3,072: 6,144 or 9,216 would work"):
        config.accumulation(3)


def test_zero_is_a_setting():
    config = complete(changed(eval_every=0, warmup=0, dropout=0.0, seed=0, bias=False), "cpu")
    assert (config.evaluation.eval_every, config.train.warmup, config.train.seed) == (0, 0, 0)
    assert config.model.bias is False


@pytest.mark.parametrize("name", SCHEMES)
def test_a_full_config_completes_to_itself(name):
    options = {"p": 0.25, "schedule": "constant"} if "spheret" in name else {}
    asked = changed(
        scheme=name, scheme_options=options, bias=False, dropout=0.1, tokens_per_update=4096, recompute=True
    )
    config = complete(asked, "cpu", 1, 257, 320)
    # on another device and on more processes too: what has a value keeps it
    assert complete(config.as_dict(), "cuda", 2, 257, 320) == config
    for section, values in config.as_dict().items():
        assert build_section(Path("config.json"), section, values) == getattr(config, section)
    assert differences(config, complete(config.as_dict(), "cpu")) == []


def test_a_size_completes_to_itself():
    config = complete(changed(size="M", steps=50_000), "cuda", 1, 50257, 50304)
    assert complete(config.as_dict(), "cpu", 1, 50257, 50304) == config
    assert complete({**config.as_dict(), "size": "M"}, "cpu", 1, 50257, 50304) == config


def test_a_difference_is_named_unless_it_may_change():
    config = complete(SMALL, "cpu")
    other = complete(changed(lr=0.5, width=128, keep=7, eval_every=3, batch_size=4, tokens_per_update=1024), "cpu")
    named = differences(config, other)
    assert [text.split()[0] for text in named] == ["width", "lr", "min_lr"]
    assert "lr (the run has 0.001, asked for 0.5)" in named


class TestFiles:
    def test_toml(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text(
            '[model]\nscheme = "p-spheretnorm"\nbias = false\nscheme_options = {p = 0.5}\n'
            '[data]\npath = "sotu"\n[train]\nsteps = 100\nlr = 1\nbatch_size = 4\n'
        )
        config = complete(read_config(path), "cpu")
        assert (config.model.scheme, config.model.bias, config.model.scheme_options) == (
            "p-spheretnorm",
            False,
            {"p": 0.5},
        )
        assert (config.train.steps, config.train.lr, config.train.batch_size) == (100, 1.0, 4)

    def test_json_is_what_a_config_writes(self, tmp_path):
        config = complete(changed(scheme="p-spheretnorm", scheme_options={"p": 0.3}, compile=True), "cpu")
        path = tmp_path / "run.json"
        path.write_bytes(msgspec.json.encode(config.as_dict()))
        assert complete(read_config(path), "cpu") == config

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[train]\nwarm_up = 3", r"unknown setting in .*'warm_up'.*Did you mean 'warmup'"),
            ("[training]\nsteps = 3", r"unknown section in .*'training'.*Did you mean 'train'"),
            ("[train]\nsteps = 1.5", r"train.steps in .* is 1.5: Expected `int`, got `float`"),
            ("[train]\nsteps = true", r"Expected `int`, got `bool`"),
            ("train = 3", r"train in .* must be a table of settings"),
            ("steps =", r"is not TOML"),
        ],
    )
    def test_bad_toml(self, tmp_path, text, message):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path / "run.toml")


class TestFlags:
    def test_every_setting_has_a_flag(self):
        for section, kind in SECTIONS.items():
            named = {field.name for field in fields(kind)} - {"scheme_options"}
            assert flags.HELP[section].keys() == named

    def parse(self, words):
        @tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
        def command(model, data, train, evaluation, set=()):
            return flags.given(set, model=model, data=data, train=train, evaluation=evaluation)

        kinds = {section: flags.section_flags(section, SMALL_RECIPE.sections, WITH_SIZE) for section in SECTIONS}
        command.__annotations__ = {**kinds, "set": tuple[str, ...]}
        return tyro.cli(command, args=words)

    def test_nothing_given_is_nothing(self):
        assert self.parse([]) == {}

    def test_words_and_back(self):
        asked = changed(
            scheme="p-spheretnorm",
            scheme_options={"p": 0.5, "schedule": "constant", "learnable_p": True, "max_angle": None},
            bias=False, recompute=True, compile=False, betas=(0.8, 0.9), eval_every=0, init_from="runs/a b",
            size="S", tokenizer="bytes", clip=math.inf,
        )  # fmt: skip
        assert self.parse(flags.words(asked)) == asked

    def test_every_setting_survives(self):
        config = complete(changed(scheme="pre-ln"), "cpu").as_dict()
        read = self.parse(flags.words(config))
        assert complete(read, "cpu").as_dict() == config


def test_the_config_file_of_the_docs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    block = page[page.index("    # deep.toml") :].split("\n\n## ")[0]
    (tmp_path / "deep.toml").write_text(textwrap.dedent(block))
    config = complete(read_config(tmp_path / "deep.toml"), "cpu")
    assert (config.model.layers, config.model.scheme_options) == (48, {"p": 0.25, "schedule": "constant"})
    assert (config.data.path, config.train.steps, config.train.tokens_per_update) == ("sotu", 2000, 4096)
