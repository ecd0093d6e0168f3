"""What was asked for becomes a full config, or one sentence that says what would work."""

import math
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import tyro
from hypothesis import given as cases
from hypothesis import strategies as st

from spheret import flags
from spheret.connections import SCHEMES
from spheret.paper.recipe import LEARNING_RATES
from spheret.runs.config import SECTIONS, build_section, changed_settings, differences, merge, read_config
from spheret.train.recipes import SMALL as SMALL_RECIPE
from spheret.train.recipes import complete, known_rate, rate_words, rates

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
    assert config.train.lr == known_rate("pre-ln", 64)
    assert (config.train.warmup, config.train.precision) == (100, "float32")
    assert (config.train.checkpoint_every, config.evaluation.eval_every) == (100, 100)
    assert complete(changed(steps=50_000), "cpu").train.warmup == 2000


def test_a_rate_says_its_study_and_size():
    model = complete(changed(scheme="keel", width=256), "cpu").model
    assert known_rate("keel", 256) == known_rate("keel", 64) / 2 == rates()["keel"] / 2
    assert all(fact in rate_words(model) for fact in (f"{rates()['keel']:g}", "64/256", "study depth", "12 layers"))
    new = complete(changed(scheme="pre-ln", width=32), "cpu").model
    assert "study depth" in rate_words(new)


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
    assert complete(changed(steps=1, lr_schedule="wsd"), "cpu").train.lr_at(1) == known_rate("pre-ln", 64)


def test_a_config_holds_every_setting(tmp_path):
    config = complete(changed(), "cpu")
    saved = config.as_dict()
    for section, kind in SECTIONS.items():
        assert saved[section].keys() == {field.name for field in fields(kind)}
        assert build_section(tmp_path, section, saved[section]) == getattr(config, section)
        for name in saved[section]:
            rest = {other: value for other, value in saved[section].items() if other != name}
            with pytest.raises(ValueError, match=rf"{section}\.{name} .* older"):
                build_section(tmp_path, section, rest)
    given = changed(optimizer="muon", parametrization="mup", base_width=64)
    muon = complete({**given, "model": {**given["model"], "mlp": "relu2"}}, "cpu").as_dict()
    assert [name for name, *_ in changed_settings(saved, muon)] == [
        "mlp", "optimizer", "parametrization", "base_width", "base_heads",
    ]  # fmt: skip
    assert muon["train"]["optimizer"] == "muon"


def test_processes_share_an_update():
    config = complete(changed(tokens_per_update=8192), "cpu")
    assert [config.accumulation(n) for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match="6,144 or 9,216"):
        config.accumulation(3)


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
    sized = complete(changed(size="M", steps=50_000), "cuda", 1, 50257, 50304)
    assert complete({**sized.as_dict(), "size": "M"}, "cpu", 1, 50257, 50304) == sized


def test_a_difference_is_named_unless_it_may_change():
    config = complete(SMALL, "cpu")
    other = complete(changed(lr=0.5, width=128, keep=7, eval_every=3, batch_size=4, tokens_per_update=1024), "cpu")
    named = differences(config, other)
    assert [text.split()[0] for text in named] == ["width", "lr", "min_lr"]
    assert f"lr (the run has {config.train.lr}, asked for 0.5)" in named


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "noun"),
        [
            ("[train]\nwarm_up = 3", "'warmup'"), ("[training]\nsteps = 3", "'train'"), ("train = 3", "table"),
            ("[train]\nsteps = 1.5", "train.steps"), ("[train]\nsteps = true", "train.steps"), ("steps =", "TOML"),
            ("[train]\nsteps = 0x" + "f" * 10_000, "bits"), ("[train]\nsteps = " + "9" * 10_000, "TOML"),
        ],
    )  # fmt: skip
    def test_bad_toml(self, tmp_path, text, noun):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ValueError, match=noun):
            read_config(tmp_path / "run.toml")


class TestFlags:
    @pytest.mark.parametrize(
        ("word", "section", "value"),
        [
            ("train.betas=[0.8, 0.9]", "train", {"betas": (0.8, 0.9)}),
            ("train.clip=inf", "train", {"clip": math.inf}),
            ("model.bias=false", "model", {"bias": False}),
            ("model.head_bias=none", "model", {"head_bias": "none"}),
            ("model.norm=none", "model", {"norm": None}),
            ("model.kv_heads=none", "model", {"kv_heads": None}),
            ("train.init_from=123", "train", {"init_from": "123"}),
            ("p=0.5", "model", {"scheme_options": {"p": 0.5}}),
        ],
    )
    def test_set(self, word, section, value):
        assert self.parse(["--set", word]) == {section: value}

    def parse(self, words):
        @tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
        def command(model, data, train, evaluation, set=()):
            return flags.given(set, model=model, data=data, train=train, evaluation=evaluation)

        kinds = {section: flags.section_flags(section, SMALL_RECIPE.sections, size=True) for section in SECTIONS}
        command.__annotations__ = {**kinds, "set": tuple[str, ...]}
        return tyro.cli(command, args=words)

    def test_words_and_back(self):
        asked = changed(
            scheme="p-spheretnorm",
            scheme_options={"p": 0.5, "schedule": "constant", "learnable_p": True, "max_angle": None},
            bias=False, recompute=True, compile=False, betas=(0.8, 0.9), eval_every=0, init_from="runs/a b",
            size="S", tokenizer="bytes", clip=math.inf,
        )  # fmt: skip
        assert self.parse(flags.words(asked)) == asked
        assert self.parse([]) == {}


def test_the_config_file_of_the_docs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    block = page[page.index("    # deep.toml") :].split("\n\n## ")[0]
    (tmp_path / "deep.toml").write_text(textwrap.dedent(block))
    config = complete(read_config(tmp_path / "deep.toml"), "cpu")
    assert (config.model.layers, config.model.scheme_options) == (48, {"p": 0.25, "schedule": "constant"})
    assert (config.data.path, config.train.steps, config.train.tokens_per_update) == ("sotu", 2000, 4096)
