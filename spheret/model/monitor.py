"""Metrics of the stream at every sublayer, measured on fixed tokens during training. Training is not affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Bounded
from spheret.model.gpt import GPT
from spheret.model.probes import Sublayer, probe
from spheret.support.sharding import whole

# a loss this close to the unigram entropy, as a share of it, is that of a model that knows only token frequencies
ENTROPY_MARGIN = 0.03


def mean_cosine(states: Tensor) -> float:
    """The mean cosine between the states of different tokens, from (..., width): (|sum u|^2 - n) / (n (n - 1))."""
    units = nn.functional.normalize(states.double().flatten(0, -2), dim=-1)
    count = len(units)
    return float((units.sum(0).square().sum() - count) / max(1, count * (count - 1)))


def sublayer_record(seen: Sublayer, first_norm: Tensor) -> dict[str, Any]:
    """The metrics of one sublayer. first_norm: the norm of every state before the first sublayer."""
    angle, norm = seen.angle, seen.out.double().norm(dim=-1)
    alpha = seen.connection.alpha
    return {
        "sublayer": seen.number,
        "angle_mean": float(angle.mean()),
        "angle_max": float(angle.max()),
        "alpha": None if alpha is None else float(alpha),
        "norm": float(norm.mean()),
        "drift": float(((norm - first_norm).abs() / first_norm).max()),
        "cosine": mean_cosine(seen.out),
    }


def on_bound(model: nn.Module) -> list[str]:
    """The names of the bounded scalars that are on a bound."""
    names = []
    for prefix, module in model.named_modules():
        if not isinstance(module, Bounded):
            continue
        for scalar in module.bounded_scalars():
            value = scalar.softplus().double()
            # the softplus of the starting value may be rounded to either side of its bound
            if ((value <= scalar.low * (1 + 1e-6)) | (value >= scalar.high * (1 - 1e-6))).any():
                names.append(f"{prefix}.{scalar.name}" if prefix else scalar.name)
    return names


@torch.no_grad()
def look(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """The radius, the scalars on a bound and one record per sublayer, from one forward pass in evaluation mode."""
    sublayers: list[dict[str, Any]] = []
    first_norm: list[Tensor] = []

    def see(seen: Sublayer) -> None:
        if not first_norm:
            first_norm.append(seen.h.double().norm(dim=-1))
        sublayers.append(sublayer_record(seen, first_norm[0]))

    training = model.training
    model.eval()
    try:
        with probe(model, see):
            model.token_losses(tokens, targets)
    finally:
        model.train(training)
    return {"radius": _radius(model.entry_norm), "on_bound": on_bound(model), "sublayers": sublayers}


def _radius(entry: nn.Module) -> float | None:
    """The radius of the sphere on which the entry puts the stream, or None if it has no `radius_value`."""
    radius_value: Callable[[], float] | None = getattr(entry, "radius_value", None)
    return None if radius_value is None else radius_value()


def gradient_norms(model: GPT) -> list[float]:
    """The gradient norm of each sublayer, its branch and connection together, in order."""
    norms = []
    for block in model.each_block():
        for parts in ((block.attention, block.attention_connection), (block.mlp, block.mlp_connection)):
            grads = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
            norms.append(float(whole(torch.nn.utils.get_total_norm(grads))))
    return norms
