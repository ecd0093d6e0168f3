"""A certificate during training: `spheret train --certify-every N` calls this observer every N updates.

A call works in float64 and holds a float64 copy of the weights. For every token and every sublayer it computes
`width` directional derivatives in ball arithmetic and three decompositions of width x width matrices. Above width 512
it decomposes nothing: |B| and the singular values are Lanczos estimates, and every verdict is "measured only". The
result records the seconds that the call took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spheret.certificates.certificate import certify
from spheret.model.gpt import GPT
from spheret.support.threads import few_threads

Observer = Callable[[int, GPT, tuple[Tensor, Tensor]], dict[str, Any]]


def observer(tokens: int = 16) -> Observer:
    """An observer for a training run. It returns plain data on the first `tokens` tokens of a batch.

    It works on a copy, so the model's weights, gradients, modes and random states do not change.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}.")

    def observe(step: int, model: GPT, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        begun = time.perf_counter()
        ids = batch[0][:, :tokens]
        try:
            with few_threads(model.config.width), torch.autocast(ids.device.type, enabled=False):
                certificate = certify(model, ids, min(tokens, ids.numel()), sequence=0, exact=False)
        except ValueError as error:
            # a failed observation must not end the run
            return {"failed": str(error), "seconds": time.perf_counter() - begun}
        part = certificate["own_path"]
        last = part["depth"][-1]
        record = {
            "tokens": certificate["tokens"],
            "verdicts": part["verdicts"],
            "inactive": [row["sublayer"] for row in part["sublayers"] if row["inactive"]],
            "sigma_max": last["sigma_max"],
            "sigma_min": last["sigma_min"],
            "condition": last["condition"],
            "sublayers": [_brief(row) for row in part["sublayers"]],
        }
        if "S_max" in last:
            record |= {"S": last["S_max"], "A": last["A_max"], "product_m": last["product_m_min"]}
        return {**record, "seconds": time.perf_counter() - begun}

    return observe


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("sublayer", "angle_max", "moved", "B_max", "Delta_max", "m_min", "sigma_max", "sigma_min", "verdict")
    return {key: row[key] for key in keys if key in row}
