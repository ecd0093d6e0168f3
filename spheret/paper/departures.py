"""Which run of the paper's tables a run repeats, and every setting in which it departs from the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from spheret.connections import scheme
from spheret.paper.assumptions import DATASETS, READINGS, TABLE_SCHEMES
from spheret.paper.recipe import paper_size
from spheret.paper.runs import PaperRun
from spheret.runs.records import corpus_name

Config = Mapping[str, Any]

# settings that change neither an update nor the final validation, each with the reason; all others are compared
WITHOUT_EFFECT = {
    "data.path": "where the data lies; its revision, tokenizer and split are compared",
    "model.recompute": "the same numbers, computed twice",
    "train.batch_size": "how an update is divided; its tokens are compared",
    "train.checkpoint_every": "when a run is saved",
    "train.keep": "how many checkpoints are kept",
    "evaluation.eval_every": "when a run is watched; the last update is validated in any case",
}


def _all_options(name: str, options: Config) -> dict[str, Any]:
    """Every option of a scheme with its value. An option that repeats the default makes no difference."""
    built = scheme(name, **options)
    return {field.name: getattr(built, field.name) for field in fields(built) if field.name != "name"}


def recipe_of(config: Config) -> PaperRun | None:
    """The run of the paper's tables that has this corpus, size and scheme, in the reading that its settings make.

    None if there is no such run. A scheme with any other option is not a scheme of the paper.
    """
    corpus, size, name = corpus_name(config), paper_size(config), config["model"]["scheme"]
    if corpus not in DATASETS or size is None or name not in TABLE_SCHEMES:
        return None
    # a run without exact_clamp has the paper's scheme, and departs from its recipe
    options = {**(config["model"].get("scheme_options") or {})}
    options.pop("exact_clamp", None)
    for reading, other in READINGS.items():
        followed = name in other.schemes and other.model.items() <= config["model"].items()
        if followed and _all_options(name, options) == _all_options(name, other.options):
            return PaperRun(str(corpus), size, name, reading=reading)
    return PaperRun(str(corpus), size, name) if _all_options(name, options) == _all_options(name, {}) else None


def _settings(config: Config, data: Config) -> dict[str, Any]:
    """Every setting that is compared, by section and name."""
    sections = {**config, "data": data}
    settings = {
        f"{section}.{name}": value
        for section in ("data", "model", "train", "evaluation")
        for name, value in sections.get(section, {}).items()
        if f"{section}.{name}" not in WITHOUT_EFFECT and name != "scheme_options"
    }
    model = config["model"]
    options = _all_options(model["scheme"], model.get("scheme_options") or {})
    return {**settings, **{f"scheme.{name}": value for name, value in options.items()}}


def departures(config: Config, recipe: PaperRun) -> list[str]:
    """The settings of a run that differ from the recipe's, each as "NAME VALUE instead of VALUE".

    Every setting is compared except WITHOUT_EFFECT.
    """
    data = config["data"]
    corpus = data["corpus"] if isinstance(data.get("corpus"), Mapping) else {}
    tokenizer = (data.get("tokenizer") or {}).get("name")
    identity = {
        "revision": corpus.get("revision"), "tokenizer": tokenizer, "val_fraction": data.get("val_fraction"),
    }  # fmt: skip
    ours = _settings(config, identity)
    papers = _settings(recipe.config(None).as_dict(), recipe.data_settings())
    return [
        f"{_shown_name(name)} {ours.get(name, 'none')} instead of {papers.get(name, 'none')}"
        for name in dict.fromkeys((*papers, *ours))
        if ours.get(name, "none") != papers.get(name, "none")
    ]


def _shown_name(name: str) -> str:
    section, _, setting = name.partition(".")
    return name if section in ("data", "scheme") else setting
