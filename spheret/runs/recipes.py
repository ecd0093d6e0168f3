"""Recipes: the settings that a run takes where nothing else is given. `--size` chooses the paper's."""

from __future__ import annotations

from typing import Any

from spheret.model.config import MODERN_KV_HEADS
from spheret.model.gpt import PRESETS
from spheret.support.errors import unknown

# the paper's learning rates by size
LEARNING_RATES = {"S": 6e-4, "M": 3e-4, "L": 2.5e-4}

# a model of minutes on a CPU
SMALL: dict[str, dict[str, Any]] = {
    "model": {"layers": 12, "width": 64, "block": 128},
    "train": {"batch_size": 8, "lr": 1e-3},
    "evaluation": {"eval_windows": 64},
}

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


def defaults(size: str | None) -> dict[str, dict[str, Any]]:
    """What a run takes where nothing is given: the small recipe, or with a size the paper's.

    Steps, warm-up, vocabulary and precision are left to `spheret.runs.config.complete`, which knows the data, the
    device and how many steps were asked for.
    """
    if size is None:
        return SMALL
    model = {**paper_model(size), "block": PAPER["model"]["block"]}
    train = {name: PAPER["train"][name] for name in ("batch_size", "tokens_per_update")}
    return {"model": model, "train": {**train, "lr": LEARNING_RATES[size]}, "evaluation": PAPER["evaluation"]}
