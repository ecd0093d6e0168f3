"""The rows and verdicts of a certificate, computed from measurements: one row per sublayer, and one per depth."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from spheret.analysis import depth
from spheret.analysis.measure import ROUNDING, Measured, Numbers
from spheret.model.gpt import GPT

VERDICTS = ("proven", "measured only", "vacuous", "violated")
_NO_RETRACTION = "its update is no retraction of the sphere, and the propositions hold for retractions only"
# a lower bound up to this value counts as 0
_LEAST = 1e-9
# the largest relative difference between the closed form and automatic differentiation that passes
_CLOSED_FORM = 1e-8
# a matrix with a larger condition number is singular in float32
LOST = 1 / torch.finfo(torch.float32).eps


def part_of(model: GPT, measured: Measured) -> dict[str, Any]:
    """Sublayers, depth and budgets, either of tokens on their own paths or of one whole sequence."""
    connections = [c for block in model.each_block() for c in (block.attention_connection, block.mlp_connection)]
    steps = [connection.retraction_step() for connection in connections]
    rows = []
    for number, (step, numbers) in enumerate(zip(steps, measured.updates, strict=True), start=1):
        row: dict[str, Any] = {"sublayer": number, "branch": "mlp" if number % 2 == 0 else "attention"}
        if step is not None:
            row |= {"alpha": float(step.alpha), "lambda": step.factor}
        rows.append({**row, **_sublayer(numbers, measured)})
    part: dict[str, Any] = {
        "norm_of_B": measured.norm_method,
        "singular_values": measured.sigma_method,
        "sublayers": rows,
        "depth": _depth(measured),
    }
    if steps[0] is not None:
        part |= _budgets(measured, rows, steps[0].schedule)
    part["verdicts"] = dict(Counter(row["verdict"] for row in rows))
    # whether S, prod m and the other sums and products are bounds or only estimates
    part["bounds"] = _standing(part, steps[0] is not None)
    part["lost"] = _lost(part)
    return part


def _sublayer(numbers: Numbers, measured: Measured) -> dict[str, Any]:
    """The row of one sublayer: each quantity at its worst token, and the verdict."""
    row: dict[str, Any] = {
        "angle_max": float(numbers["angle"].max()),
        "B_max": float(numbers["B"].max()),
        "sigma_max": float(numbers["sigma_max"].max()),
        "sigma_min": float(numbers["sigma_min"].min()),
        "residual_max": float(numbers["residual_max"].max()),
        "residual_min": float(numbers["residual_min"].max()),
    }
    if "Delta" not in numbers:
        return {
            **row,
            "verdict": "measured only",
            "why": _NO_RETRACTION,
        }
    m = numbers["m"]
    row |= {
        "Delta_max": float(numbers["Delta"].max()),
        "delta_max": float(numbers["delta"].max()),
        "m_min": float(m.min()),
        "m_exact_min": float(numbers["m_exact"].min()),
        "tokens_with_m": int((m > _LEAST).sum()),
        "violations": int(_violations(numbers, measured.norm_method).sum()),
    }
    if "error" in numbers:
        row["closed_form_error"] = float(numbers["error"].max())
    verdict, why = judge(row, measured.norm_method)
    return {**row, "verdict": verdict, "why": why}


def _violations(numbers: Numbers, norm_method: str) -> Tensor:
    """A boolean per token: whether it contradicts a bound or the closed form.

    An estimated singular value causes no false violation: sigma_max is estimated from below, sigma_min from above.
    """
    if not bounds_hold(norm_method):
        return torch.zeros_like(numbers["m"], dtype=torch.bool)
    slack = ROUNDING * (1 + numbers["sigma_max"])
    broken = (numbers["sigma_max"] > 1 + numbers["Delta"] + slack) | (numbers["sigma_min"] < numbers["m"] - slack)
    broken |= (numbers["sigma_max"] > 1 + numbers["delta"] + slack) | (
        numbers["sigma_min"] < numbers["m_exact"] - slack
    )
    # exact norm preservation gives |J| >= 1; the estimate of |J| from below may be smaller, by the residual
    broken |= numbers["sigma_max"] + numbers["residual_max"] < 1 - slack
    return broken | (numbers["error"] > _CLOSED_FORM) if "error" in numbers else broken


def bounds_hold(norm_method: str) -> bool:
    """Whether the bounds computed from |B| hold. Lanczos gives a value below |B|, from which no bound follows."""
    return norm_method != "lanczos"


def judge(row: dict[str, Any], norm_method: str) -> tuple[str, str]:
    """The verdict on a spherical sublayer, and its reason."""
    if row["violations"]:
        return "violated", "a measurement contradicts the bound or the closed form"
    if not bounds_hold(norm_method):
        return "measured only", "|B| is estimated by Lanczos from below"
    if not row["m_min"] > _LEAST:
        return "vacuous", "m = 0 at some token, so the lower bound proves nothing there"
    return "proven", f"m >= {row['m_min']:.3g} at every measured token"


def _depth(measured: Measured) -> list[dict[str, Any]]:
    """The products of the Jacobians of the first 1, 2, ... sublayers: measured values and bounds."""
    bounded = "Delta" in measured.updates[0]
    b = (
        depth.budgets(*(torch.stack([n[key] for n in measured.updates]) for key in ("Delta", "angle", "m")))
        if bounded
        else None
    )
    rows = []
    for index, product in enumerate(measured.products):
        row: dict[str, Any] = {"sublayer": index + 1}
        if product is not None:
            # below the rounding error the true value may be 0, so only an upper bound is known
            hidden = product["sigma_min"] <= product["floor"]
            above = product["sigma_min"] + torch.where(hidden, product["floor"], 0.0)
            row |= {
                "sigma_max": finite(float(product["sigma_max"].max())),
                "sigma_min": finite(float(above.min())),
                "sigma_min_is_upper_bound": bool(hidden.any()) or measured.sigma_method == "lanczos",
                "condition": finite(float((product["sigma_max"] / above).max())),
                "residual_min": float(product["residual_min"].max()),
            }
        if b is not None:
            row |= {
                "S_max": float(b.S[index].max()),
                "S_mean": float(b.S[index].mean()),
                "A_max": float(b.A[index].max()),
                "A_mean": float(b.A[index].mean()),
                "product_m_min": float(b.product_m[index].min()),
                "criterion_min": float(b.criterion[index].min()),
            }
            if product is not None and bounds_hold(measured.norm_method):
                slack = ROUNDING * (1 + product["sigma_max"]) + product["floor"]
                over = product["sigma_max"].log() > b.S[index] + ROUNDING
                row["violations"] = int((over | (product["sigma_min"] < b.product_m[index] - slack)).sum())
        rows.append(row)
    return rows


def _budgets(measured: Measured, sublayers: list[dict[str, Any]], schedule: str) -> dict[str, Any]:
    """The sums that schedules bound, averaged over tokens, beside the bounds of the run's own schedule."""
    lambdas = torch.tensor([row["lambda"] for row in sublayers], dtype=torch.float64)
    alphas = torch.tensor([row["alpha"] for row in sublayers], dtype=torch.float64)
    Delta, angle, eta = (torch.stack([n[key] for n in measured.updates]).cpu() for key in ("Delta", "angle", "eta"))
    kappa = Delta / alphas.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    a = alphas / lambdas.clamp(min=torch.finfo(torch.float64).tiny)
    squares = angle.square().mean(1)
    S, A = Delta.mean(1).cumsum(0), squares.cumsum(0)
    grown = depth.growth(S, A, kappa, a[:, None] * eta, lambdas, schedule)
    return {"growth": grown, "dyadic": depth.dyadic(squares, lambdas)}


def _standing(part: dict[str, Any], spherical: bool) -> str:
    """The standing of the sums over all sublayers: proven, estimated or none."""
    if not spherical:
        return "none"
    broken = "violated" in part["verdicts"] or any(row.get("violations") for row in part["depth"])
    return "proven" if bounds_hold(part["norm_of_B"]) and not broken else "estimated"


def _lost(part: dict[str, Any]) -> dict[str, int | None]:
    """Three sublayers, by number; None if there is no such sublayer.

    proof: the first after which no lower bound is proven.
    conditioning: the first after which the product is singular in float32.
    worst: the one with the smallest sigma_min / sigma_max of its own.
    """
    proven = part["depth"] if part["bounds"] == "proven" else []
    proof = (row["sublayer"] for row in proven if row["product_m_min"] == 0)
    measured = (row["sublayer"] for row in part["depth"] if "condition" in row and _condition(row) > LOST)
    worst = min(part["sublayers"], key=lambda row: row["sigma_min"] / row["sigma_max"])
    return {"proof": next(proof, None), "conditioning": next(measured, None), "worst": worst["sublayer"]}


def _condition(row: dict[str, Any]) -> float:
    return math.inf if row["condition"] is None else row["condition"]


def finite(x: float) -> float | None:
    """x, or None if it is infinite or NaN, which JSON cannot represent."""
    return x if math.isfinite(x) else None
