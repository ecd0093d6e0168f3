"""What a model looks like inside while it trains: per sublayer, on fixed tokens, without touching the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import ScaleNorm, SpheretNorm, SphericalConnection
from spheret.model.gpt import GPT
from spheret.model.probes import Sublayer, probe
from spheret.support.sharding import whole


def mean_cosine(states: Tensor) -> float:
    """The mean cosine between the states of different tokens, from (..., width): (|sum u|^2 - n) / (n (n - 1))."""
    units = nn.functional.normalize(states.double().flatten(0, -2), dim=-1)
    count = len(units)
    return float((units.sum(0).square().sum() - count) / max(1, count * (count - 1)))


def sublayer_record(seen: Sublayer, entry_norm: Tensor) -> dict[str, Any]:
    """One sublayer as numbers."""
    angle, norm = seen.angle, seen.out.double().norm(dim=-1)
    spherical = isinstance(seen.connection, SphericalConnection)
    return {
        "sublayer": seen.number,
        "angle_mean": float(angle.mean()),
        "angle_max": float(angle.max()),
        "alpha": float(seen.connection.update.alpha) if spherical else None,
        "norm": float(norm.mean()),
        "drift": float(((norm - entry_norm).abs() / entry_norm).max()),
        "cosine": mean_cosine(seen.out),
    }


def on_bound(model: nn.Module) -> list[str]:
    """The bounded scalars that sit on a bound, by parameter name."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, (SpheretNorm, ScaleNorm)):
            parameter, low, high = module.bounded()
            value = float(nn.functional.softplus(whole(parameter)))
            # softplus of the start rounds to either side of its bound
            if value <= low * (1 + 1e-6) or value >= high * (1 - 1e-6):
                names.append(f"{name}.{'a' if isinstance(module, SpheretNorm) else 'gamma'}")
    return names


@torch.no_grad()
def look(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """Radius, bounded scalars and a record a sublayer, from one forward pass in evaluation mode."""
    sublayers: list[dict[str, Any]] = []
    entry: list[Tensor] = []

    def see(seen: Sublayer) -> None:
        if not entry:
            entry.append(seen.h.double().norm(dim=-1))
        sublayers.append(sublayer_record(seen, entry[0]))

    training = model.training
    model.eval()
    try:
        with probe(model, see):
            model.token_losses(tokens, targets)
    finally:
        model.train(training)
    return {"radius": _radius(model.enter), "on_bound": on_bound(model), "sublayers": sublayers}


def _radius(entry: nn.Module) -> float | None:
    if not isinstance(entry, ScaleNorm):
        return None
    parameter, low, high = entry.bounded()
    return min(max(float(nn.functional.softplus(whole(parameter))), low), high)


def gradient_norms(model: GPT) -> list[float]:
    """The norm of the gradient of every sublayer's branch and connection, in order."""
    found = []
    for block in model.each_block():
        for parts in ((block.attention, block.attention_connection), (block.mlp, block.mlp_connection)):
            grads = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
            found.append(float(whole(torch.nn.utils.get_total_norm(grads))))
    return found
