"""What `spheret train` takes where nothing is given: the small recipe, or with `--size` the paper's."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

from spheret.data.named import named_vocabulary
from spheret.data.tokenizers import padded
from spheret.model.config import GPTConfig
from spheret.paper.recipe import paper_recipe
from spheret.runs.config import SECTIONS, DataConfig, Given, Recipe, RunConfig, complete_by, merge
from spheret.support.settings import declared

# a model of minutes on a CPU
SMALL = Recipe({
    section: {name: each.small for name, each in declared(kind).items() if each.small is not None}
    for section, kind in SECTIONS.items()
})  # fmt: skip


# of a scheme that no study has
UNKNOWN_RATE = 1e-3


@cache
def _studies() -> dict[str, dict[str, float]]:
    """The best learning rate of each contestant at the shape of SMALL, 300 updates, by study, from `make results`."""
    return tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))


def rates() -> dict[str, float]:
    """The same of all studies."""
    return {contestant: rate for found in _studies().values() for contestant, rate in found.items()}


def known_rate(scheme: str, width: int) -> float:
    """The learning rate where none is given: the studies' own, and less for a wider model.

    The root of the widths is a rule of thumb. It meets the best rates of the study at width 256.
    """
    measured = SMALL.sections["model"]["width"]
    # an invalid width is refused with all other settings
    return float(f"{rates().get(scheme, UNKNOWN_RATE) * math.sqrt(measured / max(measured, width)):.3g}")


def rate_words(model: GPTConfig) -> str:
    """Where that learning rate comes from: the study, and the size that it had."""
    shape, rate = SMALL.sections["model"], rates().get(model.scheme, UNKNOWN_RATE)
    study = next((name for name, found in _studies().items() if model.scheme in found), None)
    words = f"the best of the study {study} at {shape['layers']} layers of width {shape['width']}"
    if study is None:
        words = "a guess, because no study has this scheme: try others with --lr"
    if model.width > shape["width"]:
        return f"{rate:g} times the root of {shape['width']}/{model.width}; {rate:g} is {words}"
    return words


def complete(
    given: Given, device: str, world_size: int = 1, vocab_size: int | None = None, padded_vocab_size: int = 64
) -> RunConfig:
    """Every setting with its value: what was given, and for the rest the recipe that `size` chooses.

    Without `vocab_size` the data is not known yet: the result is good for finding wrong settings early.
    """
    return complete_by(_recipe(given), given, device, world_size, vocab_size, padded_vocab_size)


def complete_for_data(given: Given, device: str, world_size: int) -> RunConfig:
    """The same, with the vocabulary of the data that was asked for. Data that is not prepared stays so."""
    data = merge(_recipe(given).sections, given).get("data", {})
    if "path" not in data:
        return complete(given, device, world_size)
    asked = DataConfig(**data)
    vocab = named_vocabulary(asked.path, asked.tokenizer)
    return complete(given, device, world_size, vocab, padded(vocab))


def _recipe(given: Given) -> Recipe:
    size = given.get("size")
    if size is not None:
        return paper_recipe(size)
    model = merge(SMALL.sections, given)["model"]
    rate = known_rate(model.get("scheme", ""), model["width"])
    return replace(SMALL, sections=merge(SMALL.sections, {"train": {"lr": rate}}))
