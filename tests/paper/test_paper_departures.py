"""Every setting of a run is compared with the paper's recipe. A new setting is compared too, by existing."""

from copy import deepcopy
from dataclasses import fields, replace

import pytest
from paper_configs import paper_config

from spheret.connections import scheme
from spheret.paper.assumptions import READINGS
from spheret.paper.departures import WITHOUT_EFFECT, departures, recipe_of
from spheret.paper.runs import PaperRun, paper_runs
from spheret.runs.config import SECTIONS

RECIPE = PaperRun("openwebtext", "S", "proj-spheretnorm")
SETTINGS = [(section, field.name) for section, kind in SECTIONS.items() for field in fields(kind)]
# these decide which of the paper's runs a run repeats; the options of a scheme have tests of their own
CHOOSE_THE_CELL = {"model.layers", "model.heads", "model.width", "model.scheme", "model.scheme_options"}


def another(value):
    """A value that differs from this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, list):
        return [another(each) for each in value]
    return {"name": "another"} if isinstance(value, dict) else "another"


RECIPES = [*paper_runs(size="M"), *(paper_runs("openwebtext", "S", reading=reading)[0] for reading in READINGS)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_recipe_itself_is_recognised_and_departs_in_nothing(recipe):
    config = paper_config(recipe)
    assert recipe_of(config) == recipe
    assert departures(config, recipe) == []
    assert len(departures(config, replace(recipe, reading=None))) == (recipe.reading is not None)


@pytest.mark.parametrize(("section", "name"), [s for s in SETTINGS if ".".join(s) not in CHOOSE_THE_CELL])
def test_every_setting_is_compared_or_has_a_reason(section, name):
    config = paper_config(RECIPE)
    config[section][name] = another(config[section].get(name))
    assert recipe_of(config) == RECIPE
    named = departures(config, RECIPE)
    if f"{section}.{name}" in WITHOUT_EFFECT:
        assert named == []
    else:
        assert len(named) == 1
        assert name in named[0].split(" instead of ")[0]


def test_what_is_without_effect_exists():
    assert {f"{section}.{name}" for section, name in SETTINGS} >= WITHOUT_EFFECT.keys()


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("train", {"warmup": 0}, "warmup 0 instead of 2000"),
        ("train", {"betas": [0.9, 0.999]}, "betas [0.9, 0.999] instead of [0.9, 0.95]"),
        ("model", {"scheme_options": {}}, "scheme.exact_clamp False instead of True"),
        ("data", {"val_fraction": 0.05}, "data.val_fraction 0.05 instead of 0.005"),
        ("data", {"tokenizer": {"name": "bytes"}}, "data.tokenizer bytes instead of gpt2"),
        ("train", {"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow 3 instead of none"),
    ],
)
def test_a_departure_in_words(section, change, named):
    config = paper_config(RECIPE)
    config[section] |= change
    assert departures(config, RECIPE) == [named]


def test_another_revision_of_the_corpus_is_named():
    config = deepcopy(paper_config(RECIPE))
    config["data"]["corpus"]["revision"] = "local files"
    assert [text.split(" instead")[0] for text in departures(config, RECIPE)] == ["data.revision local files"]


class TestOptions:
    @pytest.mark.parametrize("recipe", paper_runs("openwebtext", "S"), ids=lambda recipe: recipe.scheme)
    def test_a_scheme_with_another_option_does_not_pass_as_the_papers(self, recipe):
        built = scheme(recipe.scheme, **recipe.scheme_options)
        words = {"schedule": "constant", "index": "block", "norm": ("layernorm", "rmsnorm"), "output_init": "full"}
        numbers = {"p": 3.0, "retraction": 3.0, "max_angle": 0.1, "slope": 0.7, "radius": 2.0, "alpha": 0.5}
        numbers["branch_norm"] = 0.5
        for field in fields(built):
            default = getattr(built, field.name)
            # p = infinity cannot be learned
            if field.name == "name" or (field.name, default, built.name) == ("learnable_p", False, "geonorm"):
                continue
            value = {**words, **numbers}.get(field.name, another(default))
            if isinstance(value, tuple):
                value = next(each for each in value if each != default)
            config = paper_config(recipe)
            config["model"]["scheme_options"] = {**recipe.scheme_options, field.name: value}
            assert recipe_of(config) != recipe or departures(config, recipe), field.name

    def test_an_option_that_repeats_the_default_changes_nothing(self):
        config = paper_config(RECIPE)
        config["model"]["scheme_options"] = {"exact_clamp": True, "schedule": "sqrt", "p": 1.0}
        assert recipe_of(config) == RECIPE
        assert departures(config, RECIPE) == []


class TestHead:
    def test_a_head_that_is_no_reading_departs(self):
        config = paper_config(RECIPE)
        config["model"]["head"] = "untied"
        assert recipe_of(config) == RECIPE
        assert departures(config, RECIPE) == ["head untied instead of tied"]

    def test_two_readings_at_once_are_one_and_a_departure(self):
        recipe = replace(RECIPE, reading="inner-norm")
        config = paper_config(recipe)
        config["model"]["head"] = "shifted"
        assert recipe_of(config) == recipe
        assert departures(config, recipe) == ["head shifted instead of tied"]


@pytest.mark.parametrize(
    ("section", "change"),
    [("data", {"corpus": {"name": "sotu"}}), ("data", {"corpus": None}), ("model", {"layers": 13}),
     ("model", {"scheme": "post-ln", "scheme_options": {}})],
)  # fmt: skip
def test_a_run_of_another_kind_has_no_recipe(section, change):
    config = paper_config(RECIPE)
    config[section] |= change
    assert recipe_of(config) is None
