r"""How the bounds of single updates combine over a stack, and how the sums grow with depth.

    sigma_max(G) <= exp(S)     sigma_min(G) >= prod m >= exp(-(A/2 + S)/m*)      S = sum Delta    A = sum theta^2

Here G = J_L ... J_1, and m* is the smallest m (paper: Layer-wise and depth-wise Jacobian bounds; Depth-wise
conditioning criterion). If kappa = 2|B| + eta <= K and a eta <= H, a schedule bounds both sums: S <= K sum lambda and
A <= H^2 sum lambda^2 (Growth under depth schedules). The squared angle in a dyadic interval [m, 2m) then lies between
two multiples of the sum of lambda^2 over the interval (Dyadic angular budget).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.certificates.certificate_json import DyadicRecord, FitRecord, FitsRecord, GrowthRecord
from spheret.schedules import factor

# the order of S and of A in the number of updates L, for constant K and H
GROWTH = {
    "constant": ("L", "L"),
    "sqrt": ("sqrt L", "log L"),
    "harmonic": ("log L", "1"),
    "linear": ("L", "L"),
}


class Budgets(NamedTuple):
    """Running values after 1, 2, ... sublayers, for each token: (sublayers, tokens)."""

    S: Tensor
    A: Tensor
    product_m: Tensor
    criterion: Tensor


def budgets(Delta: Tensor, theta: Tensor, m: Tensor) -> Budgets:
    """S, A, prod m and the criterion of the first 1, 2, ... sublayers; each argument is (sublayers, tokens)."""
    S, A = Delta.cumsum(0), theta.square().cumsum(0)
    smallest = m.cummin(0).values
    positive = smallest > 0
    criterion = torch.where(positive, (-(A / 2 + S) / torch.where(positive, smallest, 1.0)).exp(), 0.0)
    return Budgets(S, A, m.cumprod(0), criterion)


def fitted(sums: Tensor, steps: Tensor) -> FitRecord:
    """The least-squares factor in sums = factor * cumsum(steps), and the share of variance that it explains."""
    x = steps.cumsum(0)
    k = float((x * sums).sum() / (x * x).sum())
    variance = float((sums - sums.mean()).square().sum())
    residual = float((sums - k * x).square().sum())
    return FitRecord(factor=k, r2=1 - residual / variance if variance > 0 else float(residual == 0))


def growth(S: Tensor, A: Tensor, kappa: Tensor, a_eta: Tensor, lambdas: Tensor, schedule: str) -> GrowthRecord:
    """S and A of a stack, (sublayers,) each, with the bounds of its own schedule and a fit to every schedule."""
    count = len(S)
    K, H = float(kappa.max()), float(a_eta.max())
    fits: dict[str, FitsRecord] = {}
    for name, (s_order, a_order) in GROWTH.items():
        steps = torch.tensor([factor(name, l, count) for l in range(1, count + 1)], dtype=S.dtype)
        fits[name] = FitsRecord(S_order=s_order, A_order=a_order, S=fitted(S, steps), A=fitted(A, steps.square()))
    return GrowthRecord(
        schedule=schedule,
        K=K,
        H=H,
        S=float(S[-1]),
        S_envelope=K * float(lambdas.sum()),
        A=float(A[-1]),
        A_envelope=H**2 * float(lambdas.square().sum()),
        fits=fits,
        S_grows_as=max(fits, key=lambda name: _explained(fits[name].S)),
        A_grows_as=max(fits, key=lambda name: _explained(fits[name].A)),
    )


def _explained(fit: FitRecord) -> float:
    return -math.inf if fit.r2 is None else fit.r2


def dyadic(squares: Tensor, lambdas: Tensor) -> list[DyadicRecord]:
    """The squared angle in each whole interval [m, 2m), m = 1, 2, 4, ..., with the sum of lambda^2 over it."""
    rows = []
    m = 1
    while 2 * m - 1 <= len(squares):
        interval = slice(m - 1, 2 * m - 1)
        angle, total = float(squares[interval].sum()), float(lambdas[interval].square().sum())
        ratio = angle / total if total else 0.0
        rows.append(DyadicRecord(m=m, squared_angle=angle, lambda_squared=total, ratio=ratio))
        m *= 2
    return rows
