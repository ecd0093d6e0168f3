"""A certificate while training: `spheret train --certify-every N` asks this observer every N updates.

What it costs each time: for every token looked at and every sublayer, `width` directional derivatives and three
decompositions of width x width matrices, in float64, with a float64 copy of the weights meanwhile. Beyond width 512
nothing is decomposed: |B| and the singular values are Lanczos estimates, and every verdict is "measured only". The
seconds it took are in its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spheret.analysis.certificate import certify
from spheret.analysis.threads import few_threads
from spheret.model.gpt import GPT

Observer = Callable[[int, GPT, tuple[Tensor, Tensor]], dict[str, Any]]


def observer(tokens: int = 16) -> Observer:
    """An observer of a training run: plain data from the first `tokens` tokens of a batch.

    It works on a copy: weights, gradients, modes and random states of the model are as before.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}.")

    def observe(step: int, model: GPT, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        begun = time.perf_counter()
        ids = batch[0][:, :tokens]
        try:
            with few_threads(model.config.width), torch.autocast(ids.device.type, enabled=False):
                found = certify(model, ids, min(tokens, ids.numel()), sequence=0, exact=False)
        except ValueError as error:
            # a run does not end because someone looked at it
            return {"failed": str(error), "seconds": time.perf_counter() - begun}
        part = found["own_path"]
        last, layers = part["depth"][-1], part["sublayers"]
        result = {
            "tokens": found["tokens"],
            "verdicts": part["verdicts"],
            "lost": part["lost"],
            "bounds": part["bounds"],
            "sigma_max": last["sigma_max"],
            "sigma_min": last["sigma_min"],
            "condition": last["condition"],
            "sublayers": [_brief(row) for row in layers],
        }
        if "S_max" in last:
            result |= {"S": last["S_max"], "A": last["A_max"], "product_m": last["product_m_min"]}
        return {**result, "seconds": time.perf_counter() - begun}

    return observe


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("sublayer", "angle_max", "B_max", "Delta_max", "m_min", "sigma_max", "sigma_min", "verdict")
    return {key: row[key] for key in keys if key in row}
