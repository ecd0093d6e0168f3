"""The rows and verdicts of a certificate, computed from measurements: one row per sublayer, and one per depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import is_inactive
from spheret.certificates import depth, enclosures
from spheret.certificates.certificate_json import (
    BoundsStanding,
    CertifiedSublayer,
    DepthRecord,
    DyadicRecord,
    GrowthRecord,
    LostRecord,
    PaperVerdict,
    PartRecord,
    ProvenRecord,
    Verdict,
)
from spheret.certificates.enclosures import Enclosure
from spheret.certificates.measure import ROUNDING, Measured, Numbers
from spheret.model.probes import BranchKind
from spheret.support.documents import known

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
HOLDS: PaperVerdict = "holds"
TRIVIAL: PaperVerdict = "trivial"
DOES_NOT_APPLY: PaperVerdict = "does not apply"
# a lower bound of the paper up to this value counts as 0
_LEAST = 1e-9
# the largest relative difference between J and automatic differentiation, or the closed form, that passes
_DIFFERENCE = 1e-8
# a matrix with a larger condition number is singular in float32
LOST = 1 / torch.finfo(torch.float32).eps


def part_of(model: Decoder, measured: Measured, tokens: int | None = None) -> PartRecord:
    """Sublayers, depth and budgets, of tokens on their own paths, or of so many `tokens` as one whole sequence."""
    steps = [connection.retraction_step() for connection in model.connections]
    records = zip(model.kinds, measured.updates, measured.not_enclosed, strict=True)
    rows = [
        _sublayer(number, kind, numbers, measured.norm_method, reason)
        for number, (kind, numbers, reason) in enumerate(records, start=1)
    ]
    for row, step, name in zip(rows, steps, model.names, strict=True):
        row.module = name
        if step is not None:
            row.alpha, row.lambda_ = float(step.alpha), step.factor
    depth_rows = _depth(measured)
    verdicts = dict(Counter(row.verdict for row in rows))
    standing = _standing(verdicts, depth_rows, measured.norm_method, steps[0] is not None)
    part = PartRecord(
        norm_of_B=measured.norm_method,
        singular_values=measured.sigma_method,
        sublayers=rows,
        depth=depth_rows,
        verdicts=verdicts,
        paper=dict(Counter(row.paper for row in rows)),
        bounds=standing,
        lost=_lost(rows, depth_rows, standing),
        tokens=tokens,
    )
    if steps[0] is not None:
        alphas, lambdas = zip(*((float(step.alpha), step.factor) for step in steps if step is not None), strict=True)
        part.growth, part.dyadic = _budgets(measured, alphas, lambdas, steps[0].schedule)
    return part


def _proven(numbers: Numbers) -> ProvenRecord | None:
    """The intervals that hold the worst token's singular values and condition number; None if nothing is proven."""
    if "max_low" not in numbers or not numbers["max_high"].isfinite().all():
        return None
    e = Enclosure(*(numbers[name] for name in Enclosure._fields))
    low, high = enclosures.condition(e)
    # None at the upper end is infinity
    return ProvenRecord(
        sigma_max=(float(e.max_low.amax()), float(e.max_high.amax())),
        sigma_min=(float(e.min_low.amin()), finite(float(e.min_high.amin()))),
        condition=(float(low.amax()), finite(float(high.amax()))),
    )


def _sublayer(
    number: int, kind: BranchKind, numbers: Numbers, norm_method: str, reason: str | None
) -> CertifiedSublayer:
    """The row of one sublayer: each quantity at its worst token, and the verdicts."""
    proven, violations = _proven(numbers), int(_violations(numbers, norm_method).sum())
    share, inactive = float(numbers["moved"].median()), is_inactive(numbers["moved"])
    largest = float(numbers["sigma_max"].max())
    bounded = "Delta" in numbers
    Delta_max = float(numbers["Delta"].max()) if bounded else None
    m_min = float(numbers["m"].min()) if bounded else None
    verdict, why = judge(violations, inactive, share, proven, reason)
    paper, paper_why = judge_paper(m_min, violations, inactive, norm_method)
    row = CertifiedSublayer(
        sublayer=number,
        branch=kind,
        angle_median=float(numbers["angle"].median()),
        angle_max=float(numbers["angle"].max()),
        moved=share,
        inactive=inactive,
        B_max=float(numbers["B"].max()),
        sigma_max=largest,
        sigma_min=float(numbers["sigma_min"].min()),
        proven=proven,
        violations=violations,
        verdict=verdict,
        why=why,
        paper=paper,
        paper_why=paper_why,
        loose=None if Delta_max is None or not largest else (1 + Delta_max) / largest,
        Delta_max=Delta_max,
        delta_max=float(numbers["delta"].max()) if bounded else None,
        m_min=m_min,
        m_exact_min=float(numbers["m_exact"].min()) if bounded else None,
        tokens_with_m=int((numbers["m"] > _LEAST).sum()) if bounded else None,
    )
    if "error" in numbers:
        row.error_max = float(numbers["error"].max())
    if "residual_max" in numbers:
        row.residual_max_max = float(numbers["residual_max"].max())
    if "radius" in numbers:
        row.radius_max = finite(float(numbers["radius"].max()))
    if proven is None:
        row.condition = finite(float((numbers["sigma_max"] / numbers["sigma_min"]).max()))
    return row


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


def judge(
    violations: int, inactive: bool, moved: float, proven: ProvenRecord | None, reason: str | None = None
) -> tuple[Verdict, str]:
    """The verdict on a sublayer, and its reason. `reason`: why its singular values have no proven interval."""
    if violations:
        return "violated", "a measurement contradicts a bound, or the Jacobian is not that of the model"
    if inactive:
        return "inactive", f"the branch moves the stream by {moved:.2g}, less than float32 resolves"
    if proven is None:
        return "measured only", reason or "nothing is proven of its singular values"
    low, high = proven.sigma_min
    if not low > 0:
        return "at most", f"sigma_min is at most {math.inf if high is None else high:.3g} and may be 0"
    return "proven", f"sigma_min is at least {low:.6g} at every token examined"


def judge_paper(m_min: float | None, violations: int, inactive: bool, norm_method: str) -> tuple[PaperVerdict, str]:
    """Whether the paper's sufficient condition, m > 0, bounds the sublayer's condition number, and the reason."""
    if m_min is None:
        return (
            DOES_NOT_APPLY,
            "its update is no retraction of the sphere, and the propositions hold for retractions only",
        )
    if violations:
        return DOES_NOT_APPLY, "a measurement contradicts it"
    if not bounds_hold(norm_method):
        return DOES_NOT_APPLY, "|B| is estimated by Lanczos from below"
    if inactive:
        return TRIVIAL, "the sublayer is inactive"
    if not m_min > _LEAST:
        return DOES_NOT_APPLY, "m = 0 at some token, so it bounds sigma_max only"
    return HOLDS, f"m >= {m_min:.3g} at every token examined"


def _depth(measured: Measured) -> list[DepthRecord]:
    """The products of the Jacobians of the first 1, 2, ... sublayers: measured values and bounds."""
    bounded = "Delta" in measured.updates[0]
    b = (
        depth.budgets(*(torch.stack([n[key] for n in measured.updates]) for key in ("Delta", "angle", "m")))
        if bounded
        else None
    )
    rows = []
    for index, product in enumerate(measured.products):
        row = DepthRecord(sublayer=index + 1)
        if product is not None:
            proven = _proven(product)
            smallest: float | None = float(product["sigma_min"].min())
            if proven is not None and proven.sigma_min[0] == 0 and proven.sigma_min[1] is not None:
                # below the rounding error the true value may be 0, so only an upper bound is known
                smallest = proven.sigma_min[1]
            ratio = finite(float((product["sigma_max"] / product["sigma_min"]).max()))
            row.sigma_max, row.sigma_min = finite(float(product["sigma_max"].max())), finite(smallest)
            row.sigma_min_is_upper_bound = proven is None or proven.sigma_min[0] == 0
            row.condition = proven.condition[0] if proven and proven.condition[1] is None else ratio
            row.proven = proven
        if b is not None:
            row.S_max, row.S_mean = float(b.S[index].max()), float(b.S[index].mean())
            row.A_max, row.A_mean = float(b.A[index].max()), float(b.A[index].mean())
            row.product_m_min = float(b.product_m[index].min())
            row.criterion_min = float(b.criterion[index].min())
            if product is not None and bounds_hold(measured.norm_method):
                slack = ROUNDING * (1 + product["sigma_max"])
                most = product.get("min_high", product["sigma_min"])
                over = product["sigma_max"].log() > b.S[index] + ROUNDING
                row.violations = int((over | (most < b.product_m[index] - slack)).sum())
        rows.append(row)
    return rows


def _budgets(
    measured: Measured, step_sizes: Sequence[float], factors: Sequence[float], schedule: str
) -> tuple[GrowthRecord, list[DyadicRecord]]:
    """The sums that schedules bound, averaged over tokens, beside the bounds of the run's own schedule."""
    lambdas = torch.tensor(factors, dtype=torch.float64)
    alphas = torch.tensor(step_sizes, dtype=torch.float64)
    Delta, angle, eta = (torch.stack([n[key] for n in measured.updates]).cpu() for key in ("Delta", "angle", "eta"))
    kappa = Delta / alphas.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    a = alphas / lambdas.clamp(min=torch.finfo(torch.float64).tiny)
    squares = angle.square().mean(1)
    S, A = Delta.mean(1).cumsum(0), squares.cumsum(0)
    grown = depth.growth(S, A, kappa, a[:, None] * eta, lambdas, schedule)
    return grown, depth.dyadic(squares, lambdas)


def _standing(
    verdicts: dict[Verdict, int], depth_rows: list[DepthRecord], norm_method: str, spherical: bool
) -> BoundsStanding:
    """The standing of the paper's sums over all sublayers: proven, estimated or none."""
    if not spherical:
        return "none"
    broken = "violated" in verdicts or any(row.violations for row in depth_rows)
    return "proven" if bounds_hold(norm_method) and not broken else "estimated"


def _lost(sublayers: list[CertifiedSublayer], depth_rows: list[DepthRecord], standing: BoundsStanding) -> LostRecord:
    """Three sublayers, by number; None if there is no such sublayer.

    paper: the first after which the paper gives no lower bound.
    conditioning: the first after which the product is singular in float32.
    worst: the one with the smallest sigma_min / sigma_max of its own.
    """
    bounded = depth_rows if standing == "proven" else []
    paper = (row.sublayer for row in bounded if row.product_m_min == 0)
    measured = (row for row in depth_rows if row.is_measured())
    conditioning = (row.sublayer for row in measured if _condition(row) > LOST)
    worst = min(sublayers, key=lambda row: row.sigma_min / row.sigma_max)
    return LostRecord(paper=next(paper, None), conditioning=next(conditioning, None), worst=worst.sublayer)


def _condition(row: DepthRecord) -> float:
    condition = known(row.condition)
    return math.inf if condition is None else condition


def finite(x: float | None) -> float | None:
    """x, or None if it is infinite or NaN, which JSON cannot represent."""
    return x if x is not None and math.isfinite(x) else None
