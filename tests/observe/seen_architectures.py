"""Which architectures of transformers `spheret.watch` sees inside of: each is trained for three steps, twice.

They are those of tests/conversion/sweep.py, each in a fork with little memory and little time.
"""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spheret

sys.path.insert(0, str(Path(__file__).parents[1] / "conversion"))
import sweep

STEPS = 3
# what a model returns beside its results
SKIPPED = ("hidden_states", "attentions", "past_key_values")


def numbers(output: Any) -> list[torch.Tensor]:
    """The numbers that a model returns, without the stream itself and the caches."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [x for name, part in output.items() if not name.endswith(SKIPPED) for x in numbers(part)]
    return [x for part in output for x in numbers(part)] if isinstance(output, (tuple, list)) else []


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model that returns one, or the mean square of the numbers that it returns."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    return sum(x.float().square().mean() for x in numbers(output) if x.requires_grad)


def train(model: torch.nn.Module, given: Any, watch: spheret.observe.Watch | None) -> list[torch.Tensor]:
    """The parameters and buffers after three steps in training mode, with the same random numbers each time."""
    torch.manual_seed(3)
    # transformers draws masks of audio from numpy's global state
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        loss = loss_of(model(**given) if isinstance(given, dict) else model(given))
        loss.backward()
        if watch is not None:
            watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """To the bit. What is not a number is so in both."""
    return len(first) == len(second) and all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(first, second, strict=True)
    )


def hooks(model: torch.nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def compare(model: torch.nn.Module, given: Any) -> dict[str, Any]:
    """Train it with and without a watch. The outcome has an `end`: found, parameters only, not run, or wrong."""
    watched, again = copy.deepcopy(model), copy.deepcopy(model)
    try:
        truth = train(model, given, None)
    except Exception as error:
        return {"end": "not run", "why": sweep._said(error)}
    if not same(truth, train(again, given, None)):
        return {"end": "not run", "why": "two trainings differ"}
    keys, before = list(watched.state_dict()), hooks(watched)
    watch = spheret.watch(watched, every=2, quiet=True)
    ended = train(watched, given, watch)
    watch.close()
    if not same(truth, ended):
        return {"end": "wrong", "why": "the training is another"}
    if hooks(watched) != before or list(watched.state_dict()) != keys:
        return {"end": "wrong", "why": "close leaves something in the model"}
    sublayers = watch.observations[0].sublayers
    seen = sum(each.norm is not None for each in sublayers)
    anatomy = watch.anatomy
    if [each.step for each in watch.observations] != [1, 2]:
        return {"end": "wrong", "why": "a watched step is missing"}
    why = "sublayers are found, and none is seen" if anatomy.sublayers and not seen else anatomy.note
    return {"end": "found" if seen else "parameters only", "why": why, "sublayers": len(sublayers), "seen": seen}


def attempt(case: sweep.Case) -> dict[str, Any]:
    try:
        model = sweep.build(case)
    except Exception as error:
        return {"end": "not built", "why": sweep._said(error)}
    why = f"no inputs are made for {model.main_input_name}"
    for given in sweep.inputs(model, 1):
        try:
            takes = bool(sweep._run(model, given))
        except Exception as error:
            takes, why = False, sweep._said(error)
        if takes:
            return compare(model, given)
    return {"end": "not run", "why": why}
