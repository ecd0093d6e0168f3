"""The paper's recipe: its hyperparameters, by size where they differ. `--size` chooses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spheret.model.config import MODERN_KV_HEADS
from spheret.model.gpt import PRESETS
from spheret.runs.config import Recipe
from spheret.support.errors import unknown

# the paper's learning rates by size
LEARNING_RATES = {"S": 6e-4, "M": 3e-4, "L": 2.5e-4}

# "Shared hyperparameters" of the paper's Appendix B; biases, no compilation and AdamW's betas are the defaults anyway
PAPER: dict[str, dict[str, Any]] = {
    "model": {"block": 1024, "vocab": 50_304, "dropout": 0.0, "head_bias": "none"},
    "train": {
        "steps": 50_000,
        "warmup": 2_000,
        "batch_size": 16,
        "tokens_per_update": 131_072,
        "weight_decay": 0.1,
        "clip": 1.0,
        "seed": 1337,
        "precision": "bf16",
    },
    # the paper does not say how it validates
    "evaluation": {"eval_windows": 512},
}


def paper_model(size: str) -> dict[str, int]:
    """Layers, heads and width of the paper's S, M or L."""
    if size in MODERN_KV_HEADS:
        raise ValueError(
            f"--size {size} is a shape of spheret plan and has no recipe: give --size "
            f"{size.removeprefix('modern-')} with --positions rope --mlp swiglu --norm rmsnorm --qk-norm --kv-heads "
            f"{MODERN_KV_HEADS[size]} --no-bias."
        )
    if size not in PRESETS:
        raise unknown("size", size, PRESETS)
    return dict(zip(("layers", "heads", "width"), PRESETS[size], strict=True))


def paper_size(config: Mapping[str, Any]) -> str | None:
    """The paper's S, M or L if the model has that shape, else None. config: that of a run, as plain data."""
    model = config["model"]
    shape = model["layers"], model["heads"], model["width"]
    return next((size for size, preset in PRESETS.items() if preset == shape), None)


def paper_recipe(size: str) -> Recipe:
    """The recipe that `--size` chooses.

    Steps, vocabulary and precision are left to `spheret.runs.config.complete_by`, which knows the data, the device
    and how many steps were asked for. The warm-up belongs to 50,000 steps; a short trial has a shorter one.
    """
    model = {**paper_model(size), "block": PAPER["model"]["block"]}
    train = {name: PAPER["train"][name] for name in ("batch_size", "tokens_per_update")}
    return Recipe(
        {"model": model, "train": {**train, "lr": LEARNING_RATES[size]}, "evaluation": PAPER["evaluation"]},
        size, PAPER["train"]["warmup"], checkpoint_every=1000, eval_every=500,
    )  # fmt: skip
