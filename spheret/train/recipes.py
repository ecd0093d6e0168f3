"""What `spheret train` takes where nothing is given: the small recipe, or with `--size` the paper's."""

from __future__ import annotations

from spheret.model.gpt import PRESETS
from spheret.paper.recipe import LEARNING_RATES, PAPER, paper_model, paper_recipe
from spheret.runs.config import Given, Recipe, RunConfig, complete_by

# a model of minutes on a CPU
SMALL = Recipe({
    "model": {"layers": 12, "width": 64, "block": 128},
    "train": {"batch_size": 8, "lr": 1e-3},
    "evaluation": {"eval_windows": 64},
})  # fmt: skip
# what --size changes where nothing is given, in words
WITH_SIZE = {
    **{name: "/".join(str(paper_model(size)[name]) for size in PRESETS) for name in ("layers", "heads", "width")},
    "block": str(PAPER["model"]["block"]),
    "batch_size": str(PAPER["train"]["batch_size"]),
    "tokens_per_update": str(PAPER["train"]["tokens_per_update"]),
    "eval_windows": str(PAPER["evaluation"]["eval_windows"]),
    "lr": "/".join(f"{rate:g}" for rate in LEARNING_RATES.values()),
    "warmup": "2000 from 2001 steps on",
    "eval_every": "at most 500",
    "checkpoint_every": "at most 1000",
}


def complete(
    given: Given, device: str, world_size: int = 1, vocab_size: int | None = None, padded_vocab_size: int = 64
) -> RunConfig:
    """Every setting with its value: what was given, and for the rest the recipe that `size` chooses.

    Without `vocab_size` the data is not known yet: the result is good for finding wrong settings early.
    """
    size = given.get("size")
    recipe = SMALL if size is None else paper_recipe(size)
    return complete_by(recipe, given, device, world_size, vocab_size, padded_vocab_size)
