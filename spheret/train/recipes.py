"""What `spheret train` takes where nothing is given: the small recipe, or with `--size` the paper's."""

from __future__ import annotations

from spheret.data.named import named_vocabulary
from spheret.data.tokenizers import padded
from spheret.paper.recipe import paper_recipe
from spheret.runs.config import SECTIONS, DataConfig, Given, Recipe, RunConfig, complete_by, merge
from spheret.support.settings import declared

# a model of minutes on a CPU
SMALL = Recipe({
    section: {name: each.small for name, each in declared(kind).items() if each.small is not None}
    for section, kind in SECTIONS.items()
})  # fmt: skip


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
    return SMALL if size is None else paper_recipe(size)
