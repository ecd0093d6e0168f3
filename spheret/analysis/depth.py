r"""What the updates of a stack add up to, by the paper's propositions, and how that grows with depth.

    sigma_max(G) <= exp(S)     sigma_min(G) >= prod m >= exp(-(A/2 + S)/m*)      S = sum Delta    A = sum theta^2

for G = J_L ... J_1 and m* the least m (paper: Layer-wise and depth-wise Jacobian bounds; Depth-wise conditioning
criterion). Under kappa = 2|B| + eta <= K and a eta <= H a schedule bounds both sums, S <= K sum lambda and
A <= H^2 sum lambda^2 (Growth under depth schedules), and the squared angle in a dyadic interval [m, 2m) stays between
two multiples of its sum of lambda^2 (Dyadic angular budget).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from spheret.schedules import factor

# how S and A grow with the number of updates, where K and H do not
GROWTH = {
    "constant": ("L", "L"),
    "sqrt": ("sqrt L", "log L"),
    "harmonic": ("log L", "1"),
    "linear": ("L", "L"),
}


class Budgets(NamedTuple):
    """Running over the layers, for each token: (layers, tokens)."""

    S: Tensor
    A: Tensor
    product_m: Tensor
    criterion: Tensor


def budgets(Delta: Tensor, theta: Tensor, m: Tensor) -> Budgets:
    """S, A, prod m and the criterion of the first 1, 2, ..., layers; each argument (layers, tokens)."""
    S, A = Delta.cumsum(0), theta.square().cumsum(0)
    least = m.cummin(0).values
    alive = least > 0
    criterion = torch.where(alive, (-(A / 2 + S) / torch.where(alive, least, 1.0)).exp(), 0.0)
    return Budgets(S, A, m.cumprod(0), criterion)


def fitted(sums: Tensor, steps: Tensor) -> dict[str, float]:
    """The factor of the least-squares fit sums = factor * summed steps, and the share of variance explained."""
    x = steps.cumsum(0)
    k = float((x * sums).sum() / (x * x).sum())
    spread = float((sums - sums.mean()).square().sum())
    left = float((sums - k * x).square().sum())
    return {"factor": k, "r2": 1 - left / spread if spread > 0 else float(left == 0)}


def growth(S: Tensor, A: Tensor, kappa: Tensor, a_eta: Tensor, lambdas: Tensor, schedule: str) -> dict[str, Any]:
    """The sums of a stack, (layers,) each, beside the table: its own schedule's envelope, every schedule's fit."""
    layers = len(S)
    K, H = float(kappa.max()), float(a_eta.max())
    fits: dict[str, dict[str, Any]] = {}
    for name, (s_order, a_order) in GROWTH.items():
        steps = torch.tensor([factor(name, l, layers) for l in range(1, layers + 1)], dtype=S.dtype)
        fits[name] = {
            "S_order": s_order,
            "A_order": a_order,
            "S": fitted(S, steps),
            "A": fitted(A, steps.square()),
        }
    return {
        "schedule": schedule,
        "K": K,
        "H": H,
        "S": float(S[-1]),
        "S_envelope": K * float(lambdas.sum()),
        "A": float(A[-1]),
        "A_envelope": H**2 * float(lambdas.square().sum()),
        "fits": fits,
        "S_grows_as": max(fits, key=lambda name: fits[name]["S"]["r2"]),
        "A_grows_as": max(fits, key=lambda name: fits[name]["A"]["r2"]),
    }


def dyadic(squares: Tensor, lambdas: Tensor) -> list[dict[str, float]]:
    """The squared angle spent in each [m, 2m) that fits, m = 1, 2, 4, ..., beside the sum of lambda^2 there."""
    rows = []
    m = 1
    while 2 * m - 1 <= len(squares):
        inside = slice(m - 1, 2 * m - 1)
        spent, share = float(squares[inside].sum()), float(lambdas[inside].square().sum())
        rows.append(
            {"m": m, "squared_angle": spent, "lambda_squared": share, "ratio": spent / share if share else 0.0}
        )
        m *= 2
    return rows
