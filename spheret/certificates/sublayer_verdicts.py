"""The rows and verdicts of a certificate, computed from measurements: one row per sublayer, and one per depth."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import is_inactive
from spheret.certificates import depth, enclosures
from spheret.certificates.enclosures import Enclosure
from spheret.certificates.measure import ROUNDING, Measured, Numbers

VERDICTS = ("proven", "at most", "measured only", "inactive", "violated")
HOLDS, TRIVIAL, DOES_NOT_APPLY = "holds", "trivial", "does not apply"
# a lower bound of the paper up to this value counts as 0
_LEAST = 1e-9
# the largest relative difference between J and automatic differentiation, or the closed form, that passes
_DIFFERENCE = 1e-8
# a matrix with a larger condition number is singular in float32
LOST = 1 / torch.finfo(torch.float32).eps


def part_of(model: Decoder, measured: Measured) -> dict[str, Any]:
    """Sublayers, depth and budgets, either of tokens on their own paths or of one whole sequence."""
    steps = [connection.retraction_step() for connection in model.connections]
    rows = []
    records = zip(steps, model.kinds, model.names, measured.updates, measured.not_enclosed, strict=True)
    for number, (step, kind, name, numbers, reason) in enumerate(records, start=1):
        row: dict[str, Any] = {"sublayer": number, "branch": kind}
        if name is not None:
            row["module"] = name
        if step is not None:
            row |= {"alpha": float(step.alpha), "lambda": step.factor}
        rows.append({**row, **_sublayer(numbers, measured.norm_method, reason)})
    part: dict[str, Any] = {
        "norm_of_B": measured.norm_method,
        "singular_values": measured.sigma_method,
        "sublayers": rows,
        "depth": _depth(measured),
    }
    if steps[0] is not None:
        part |= _budgets(measured, rows, steps[0].schedule)
    part["verdicts"] = dict(Counter(row["verdict"] for row in rows))
    part["paper"] = dict(Counter(row["paper"] for row in rows))
    # whether the paper's sums and products over all sublayers are bounds or only estimates
    part["bounds"] = _standing(part, steps[0] is not None)
    part["lost"] = _lost(part)
    return part


def _interval(low: Tensor, high: Tensor) -> list[float | None]:
    """An interval in JSON; None at the upper end is infinity."""
    return [float(low), finite(float(high))]


def _proven(numbers: Numbers) -> dict[str, list[float | None]] | None:
    """The intervals that hold the worst token's singular values and condition number; None if nothing is proven."""
    if "max_low" not in numbers or not numbers["max_high"].isfinite().all():
        return None
    e = Enclosure(*(numbers[name] for name in Enclosure._fields))
    low, high = enclosures.condition(e)
    return {
        "sigma_max": _interval(e.max_low.amax(), e.max_high.amax()),
        "sigma_min": _interval(e.min_low.amin(), e.min_high.amin()),
        "condition": _interval(low.amax(), high.amax()),
    }


def _sublayer(numbers: Numbers, norm_method: str, reason: str | None) -> dict[str, Any]:
    """The row of one sublayer: each quantity at its worst token, and the verdicts."""
    row: dict[str, Any] = {
        "angle_median": float(numbers["angle"].median()),
        "angle_max": float(numbers["angle"].max()),
        "moved": float(numbers["moved"].median()),
        "inactive": is_inactive(numbers["moved"]),
        "B_max": float(numbers["B"].max()),
        "sigma_max": float(numbers["sigma_max"].max()),
        "sigma_min": float(numbers["sigma_min"].min()),
        "proven": _proven(numbers),
        "violations": int(_violations(numbers, norm_method).sum()),
    }
    row |= {f"{name}_max": float(numbers[name].max()) for name in ("error", "residual_max") if name in numbers}
    if "radius" in numbers:
        row["radius_max"] = finite(float(numbers["radius"].max()))
    if "Delta" in numbers:
        m = numbers["m"]
        row |= {
            "Delta_max": float(numbers["Delta"].max()),
            "delta_max": float(numbers["delta"].max()),
            "m_min": float(m.min()),
            "m_exact_min": float(numbers["m_exact"].min()),
            "tokens_with_m": int((m > _LEAST).sum()),
        }
    if row["proven"] is None:
        row["condition"] = finite(float((numbers["sigma_max"] / numbers["sigma_min"]).max()))
    row["verdict"], row["why"] = judge(row, reason)
    row["paper"], row["paper_why"] = judge_paper(row, norm_method)
    return {**row, "loose": looseness(row)}


def looseness(row: dict[str, Any]) -> float | None:
    """How many times larger the paper's bound on sigma_max is than the value; None without a bound."""
    return (1 + row["Delta_max"]) / row["sigma_max"] if "Delta_max" in row and row["sigma_max"] else None


def _violations(numbers: Numbers, norm_method: str) -> Tensor:
    """A boolean per token: whether it contradicts a bound of the paper, or J is not that of the model.

    An estimated singular value causes no false violation: sigma_max is estimated from below, sigma_min from above.
    """
    broken = torch.zeros_like(numbers["sigma_max"], dtype=torch.bool)
    if "error" in numbers:
        broken |= numbers["error"] > _DIFFERENCE
    if "Delta" not in numbers or not bounds_hold(norm_method):
        return broken
    slack = ROUNDING * (1 + numbers["sigma_max"])
    broken |= (numbers["sigma_max"] > 1 + numbers["Delta"] + slack) | (numbers["sigma_min"] < numbers["m"] - slack)
    broken |= (numbers["sigma_max"] > 1 + numbers["delta"] + slack) | (
        numbers["sigma_min"] < numbers["m_exact"] - slack
    )
    # exact norm preservation gives |J| >= 1; the estimate of |J| from below may be smaller, by the residual
    return broken | (numbers["sigma_max"] + numbers.get("residual_max", 0.0) < 1 - slack)


def bounds_hold(norm_method: str) -> bool:
    """Whether the bounds computed from |B| hold. Lanczos gives a value below |B|, from which no bound follows."""
    return norm_method != "lanczos"


def judge(row: dict[str, Any], reason: str | None = None) -> tuple[str, str]:
    """The verdict on a sublayer, and its reason. `reason`: why its singular values have no proven interval."""
    if row["violations"]:
        return "violated", "a measurement contradicts a bound, or the Jacobian is not that of the model"
    if row["inactive"]:
        return "inactive", f"the branch moves the stream by {row['moved']:.2g}, less than float32 resolves"
    if row["proven"] is None:
        return "measured only", reason or "nothing is proven of its singular values"
    low, high = row["proven"]["sigma_min"]
    if not low > 0:
        return "at most", f"sigma_min is at most {high:.3g} and may be 0"
    return "proven", f"sigma_min is at least {low:.6g} at every token examined"


def judge_paper(row: dict[str, Any], norm_method: str) -> tuple[str, str]:
    """Whether the paper's sufficient condition, m > 0, bounds the sublayer's condition number, and the reason."""
    if "m_min" not in row:
        return (
            DOES_NOT_APPLY,
            "its update is no retraction of the sphere, and the propositions hold for retractions only",
        )
    if row["violations"]:
        return DOES_NOT_APPLY, "a measurement contradicts it"
    if not bounds_hold(norm_method):
        return DOES_NOT_APPLY, "|B| is estimated by Lanczos from below"
    if row["inactive"]:
        return TRIVIAL, "the sublayer is inactive"
    if not row["m_min"] > _LEAST:
        return DOES_NOT_APPLY, "m = 0 at some token, so it bounds sigma_max only"
    return HOLDS, f"m >= {row['m_min']:.3g} at every token examined"


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
            proven = _proven(product)
            smallest = float(product["sigma_min"].min())
            if proven is not None and proven["sigma_min"][0] == 0 and proven["sigma_min"][1] is not None:
                # below the rounding error the true value may be 0, so only an upper bound is known
                smallest = proven["sigma_min"][1]
            ratio = (product["sigma_max"] / product["sigma_min"]).max()
            unknown = proven is not None and proven["condition"][1] is None
            row |= {
                "sigma_max": finite(float(product["sigma_max"].max())),
                "sigma_min": finite(smallest),
                "sigma_min_is_upper_bound": proven is None or proven["sigma_min"][0] == 0,
                "condition": (proven or {})["condition"][0] if unknown else finite(float(ratio)),
                "proven": proven,
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
                slack = ROUNDING * (1 + product["sigma_max"])
                most = product.get("min_high", product["sigma_min"])
                over = product["sigma_max"].log() > b.S[index] + ROUNDING
                row["violations"] = int((over | (most < b.product_m[index] - slack)).sum())
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
    """The standing of the paper's sums over all sublayers: proven, estimated or none."""
    if not spherical:
        return "none"
    broken = "violated" in part["verdicts"] or any(row.get("violations") for row in part["depth"])
    return "proven" if bounds_hold(part["norm_of_B"]) and not broken else "estimated"


def _lost(part: dict[str, Any]) -> dict[str, int | None]:
    """Three sublayers, by number; None if there is no such sublayer.

    paper: the first after which the paper gives no lower bound.
    conditioning: the first after which the product is singular in float32.
    worst: the one with the smallest sigma_min / sigma_max of its own.
    """
    bounded = part["depth"] if part["bounds"] == "proven" else []
    paper = (row["sublayer"] for row in bounded if row["product_m_min"] == 0)
    measured = (row["sublayer"] for row in part["depth"] if "condition" in row and _condition(row) > LOST)
    worst = min(part["sublayers"], key=lambda row: row["sigma_min"] / row["sigma_max"])
    return {"paper": next(paper, None), "conditioning": next(measured, None), "worst": worst["sublayer"]}


def _condition(row: dict[str, Any]) -> float:
    return math.inf if row["condition"] is None else row["condition"]


def finite(x: float) -> float | None:
    """x, or None if it is infinite or NaN, which JSON cannot represent."""
    return x if math.isfinite(x) else None
