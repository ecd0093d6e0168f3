"""The paper's recipe: its hyperparameters, by size where they differ. `--size` chooses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spheret.model.config import MODERN_KV_HEADS
from spheret.model.gpt import PRESETS
from spheret.runs.config import SECTIONS, EvaluationConfig, Recipe, TrainConfig
from spheret.support.errors import unknown
from spheret.support.settings import declared

# the paper's learning rates by size
LEARNING_RATES = {size: declared(TrainConfig)["lr"].paper_value(size) for size in PRESETS}

# "Shared hyperparameters" of the paper's Appendix B; it does not say when it evaluates and saves
PAPER: dict[str, dict[str, Any]] = {
    section: {
        name: each.paper
        for name, each in declared(kind).items()
        if each.paper is not None and not isinstance(each.paper, tuple) and "at most" not in each.with_size
    }
    for section, kind in SECTIONS.items()
    if section != "data"
}


def paper_size(config: Mapping[str, Any]) -> str | None:
    """The paper's S, M or L if the model has that shape, else None. config: a run's config, as plain data."""
    model = config["model"]
    shape = model["layers"], model["heads"], model["width"]
    return next((size for size, preset in PRESETS.items() if preset == shape), None)


def paper_recipe(size: str) -> Recipe:
    """The recipe that `--size` chooses.

    Steps, vocabulary and precision are left to `spheret.runs.config.complete_by`, which knows the data, the device
    and how many steps were asked for. The warm-up belongs to 50,000 steps; a short trial has a shorter one.
    """
    if size in MODERN_KV_HEADS:
        raise ValueError(
            f"--size {size} is a preset of spheret.GPTConfig and has no recipe: give --size "
            f"{size.removeprefix('modern-')}, and in a --config positions, mlp, norm, qk_norm, kv_heads and bias."
        )
    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    sections = {
        section: {name: each.paper_value(size) for name, each in declared(kind).items() if each.with_size == "{}"}
        for section, kind in SECTIONS.items()
    }
    train, evaluation = declared(TrainConfig), declared(EvaluationConfig)
    return Recipe(
        sections, size, train["warmup"].paper, train["checkpoint_every"].paper, evaluation["eval_every"].paper
    )
