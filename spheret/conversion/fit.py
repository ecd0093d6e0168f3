"""Radius and step sizes by least squares, in closed form, from what the residual sums do on a few batches.

The turn of a row answers to log alpha with the slope s = beta theta'(beta). To first order, the one step size of a
sublayer whose turns differ least from the rows' own, in squared angle, is the mean of the rows' log alpha with the
weights s^2. The radius is the geometric mean of the rows' lengths, moved into ScaleNorm's interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spheret.conversion import identity
from spheret.support.precision import widest

if TYPE_CHECKING:
    from spheret.conversion.steps import Passage, Step


@dataclass
class Sums:
    """Sums over the rows of one sublayer."""

    rows: int = 0
    weights: float = 0.0
    log_alpha: float = 0.0
    log_length: float = 0.0  # of the stream before the step
    log_next_length: float = 0.0  # and after it
    angle: float = 0.0
    beyond_half_turn: int = 0
    beyond_reach: int = 0

    def mean(self, total: float) -> float:
        return total / max(self.rows, 1)


class Observations:
    """The sums of each step, filled by the steps while a model runs at t = 0."""

    def __init__(self) -> None:
        self.sums: dict[int, Sums] = {}

    @torch.no_grad()
    def add(self, step: Step, passage: Passage) -> None:
        x, f = passage.stream, passage.branch
        wide = widest(x.device)
        radius = step.radius.detach().to(wide)
        u, ratio = identity.on_sphere(x.detach().to(wide), radius)
        if not step.first:
            assert passage.ratio is not None
            ratio = passage.ratio.detach().to(wide)
        live = (ratio > 0).squeeze(-1)
        u, ratio, f = u[live], ratio[live], f.detach().to(wide)[live]
        scheme_step = step.connection.retraction_step()
        assert scheme_step is not None
        row, p, cap = scheme_step.retraction, scheme_step.p, scheme_step.max_angle
        p = p.detach().to(wide) if isinstance(p, Tensor) else p
        turned = identity.turn(u, f, ratio, radius)
        own = identity.own_step(turned, radius, row, p, cap)
        weights = identity.slope(row, p, own.beta).square()
        sums = self.sums.setdefault(id(step), Sums())
        sums.rows += ratio.numel()
        sums.weights += float(weights.sum())
        sums.log_alpha += float((weights * own.log_alpha).sum())
        sums.log_length += float((ratio * radius).log().sum())
        tiny = torch.finfo(wide).tiny
        sums.log_next_length += float((turned.ratio * radius).clamp(min=tiny).log().sum())
        sums.angle += float(turned.angle.sum())
        sums.beyond_half_turn += int((turned.along <= 0).sum())
        sums.beyond_reach += int((own.excess > 0).sum())

    def of(self, step: Step) -> Sums:
        return self.sums.setdefault(id(step), Sums())


def fitted_radius(all_sums: list[Sums], dim: int) -> float:
    """The geometric mean of the lengths before all steps of a stack, from 1 to sqrt dim."""
    rows = sum(sums.rows for sums in all_sums)
    mean = math.exp(sum(sums.log_length for sums in all_sums) / max(rows, 1))
    return min(max(mean, 1.0), math.sqrt(dim))


def fitted_alpha(sums: Sums, radius: float, observed_radius: float) -> float:
    """The step size at a radius, from rows that were observed at another one."""
    if sums.weights == 0:
        # branches that return zeros turn nothing: a step of the stream's own scale
        return radius * math.exp(-sums.mean(sums.log_length))
    return math.exp(sums.log_alpha / sums.weights) * radius / observed_radius
