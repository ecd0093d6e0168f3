"""A certificate: what the model achieves, and one verdict per sublayer at some real tokens.

| verdict | meaning |
|---|---|
| proven | sigma_max(J) and sigma_min(J) > 0 lie in proven intervals at every token examined |
| at most | the same, but the interval of sigma_min(J) reaches 0 |
| measured only | there is no proven interval: J is too large, or an operation has no rule in ball arithmetic |
| inactive | the branch does not move the stream, so a good condition number means nothing |
| violated | a measurement contradicts a bound: the model does not compute the update that the bound is about |

Beside it stands the paper's sufficient condition, which needs no singular values of J: it holds, or does not apply.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from msgspec import UnsetType
from torch import Tensor

from spheret.analysis import achievement
from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import OwnDecoder, check_finite, check_one_stream, float64_twin
from spheret.certificates.certificate_json import (
    CERTIFICATES,
    CertificateRecord,
    CertifiedSublayer,
    DepthRecord,
    Interval,
    PartRecord,
)
from spheret.certificates.measure import ROUNDING, Tick, measure_sequence, measure_tokens
from spheret.certificates.midpoint_radius import ULPS
from spheret.certificates.sublayer_verdicts import (
    DOES_NOT_APPLY,
    HOLDS,
    LOST,
    TRIVIAL,
    VERDICTS,
    bounds_hold,
    judge,
    judge_paper,
    part_of,
)
from spheret.model.gpt import GPT
from spheret.runs.layout import CERTIFICATE
from spheret.support.documents import known

SCOPE = (
    "it holds at the tokens examined, for the stream between its entry and its exit, and for the function that the "
    "stored weights define in exact arithmetic, at the states that a float64 copy of the model has there; it assumes "
    f"IEEE double arithmetic, and exp, erf, tanh, sin, cos, asin and atan to {ULPS} units in the last place"
)
# of a model that is not a GPT of spheret
MEASURED_SCOPE = (
    "it is measured in float64, not proven: at the tokens examined, for the stream between its entry and its exit, "
    "by automatic differentiation of the model's own code, with float64 wherever that code asks for float32"
)


def certify(
    model: GPT | Decoder,
    ids: Tensor,
    tokens: int = 64,
    sequence: int = 8,
    exact: bool = True,
    tick: Tick = lambda tokens: None,
    text: tuple[Tensor, Tensor] | None = None,
    unigram_entropy: float | None = None,
) -> CertificateRecord:
    """The certificate of a model at some tokens.

    Args:
        model: a GPT, of which a float64 copy is examined, or a `Decoder` that is in float64 already.
        ids: (windows, time) tokens.
        tokens: how many of them are examined, spread over the fewest windows that hold them.
        sequence: how many tokens at the start of the first window are examined together as one point; 0 for none.
        exact: whether the norm of B must be an upper bound even where that is slow.
        tick: called with the number of tokens of every update that was measured.
        text: inputs and targets, (windows, time), on which the loss is measured; by default each token of ids is
            predicted from the ones before it.
        unigram_entropy: the loss of token frequencies alone, with which the model's loss is compared.
    """
    if tokens < 1 or sequence < 0:
        raise ValueError(f"tokens must be at least 1 and sequence at least 0, got {tokens} and {sequence}.")
    if tokens > ids.numel():
        raise ValueError(f"{tokens:,} tokens were asked for, but ids holds {ids.numel():,}: ask for fewer.")
    twin = _in_float64(model)
    ids = ids.to(next(twin.parameters()).device)
    time = min(sequence, ids.shape[1])
    own_path = part_of(twin, measure_tokens(twin, spread(ids, tokens), exact, tick))
    together = part_of(twin, measure_sequence(twin, ids[:1, :time], exact), time) if time else None
    if text is None:
        # a window of one token has no next token: its own takes the place, and the loss says nothing
        text = (ids[:, :-1], ids[:, 1:]) if ids.shape[1] > 1 else (ids, ids)
    x, y = text
    return CertificateRecord(
        scope=SCOPE if isinstance(model, GPT) else MEASURED_SCOPE,
        scheme=twin.scheme,
        achieves=achievement.achievement(twin, x.to(ids.device), y.to(ids.device), unigram_entropy),
        tokens=tokens,
        own_path=own_path,
        sequence=together,
    )


def _in_float64(model: GPT | Decoder) -> Decoder:
    if isinstance(model, GPT):
        check_one_stream(model.scheme)
        twin = float64_twin(model)
        check_finite(twin, "the model")
        return OwnDecoder(twin)
    if next(model.parameters()).dtype != torch.float64:
        raise ValueError("a decoder is certified in float64: load it with dtype=torch.float64.")
    return model


def is_success(certificate: CertificateRecord) -> bool:
    """Whether nothing is wrong: the model has learned, no sublayer is inactive, and no bound is contradicted."""
    achieved = certificate.achieves
    return achieved.learned is not False and not achieved.inactive and not verify(certificate)


def spread(ids: Tensor, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The first windows of ids (windows, time) that hold `tokens`, each with evenly spaced positions."""
    time = ids.shape[1]
    windows = []
    for number in range(-(-tokens // time)):
        count = min(time, tokens - number * time)
        windows.append((ids[number : number + 1], torch.arange(count, device=ids.device) * time // count))
    return windows


def verify(certificate: CertificateRecord) -> list[str]:
    """Every contradiction in a certificate: a bound that a number breaks, or a verdict that does not follow.

    Args:
        certificate: what `certify` returned, or what was read from a file.
    """
    contradictions = []
    for name, part in certificate.parts.items():
        for row in part.sublayers:
            contradictions += [
                f"{name}, sublayer {row.sublayer}: {text}" for text in _check_sublayer(row, part.norm_of_B)
            ]
        for product in part.depth:
            texts = _check_intervals(product) + (_check_depth(product) if bounds_hold(part.norm_of_B) else [])
            contradictions += [f"{name}, the first {product.sublayer} sublayers: {text}" for text in texts]
    return contradictions


def _check_intervals(row: CertifiedSublayer | DepthRecord) -> list[str]:
    """The values must lie in their own proven intervals, and the intervals must agree with each other."""
    proven = known(row.proven)
    if proven is None:
        return []
    contradictions = []
    for name, number, interval in (
        ("sigma_max", known(row.sigma_max), proven.sigma_max),
        ("sigma_min", known(row.sigma_min), proven.sigma_min),
    ):
        # records without a number where something is proven are refused
        assert number is not None
        low, high = interval[0], _or_infinity(interval[1])
        slack = ROUNDING * abs(number)
        if not low - slack <= number <= high + slack:
            contradictions.append(f"{name} {number:.6g} lies outside its proven interval [{low:.6g}, {high:.6g}]")
    low, high = proven.condition[0], _or_infinity(proven.condition[1])
    least = proven.sigma_min[0]
    worst = proven.sigma_max[1] / least if least > 0 else math.inf
    # the worst condition number is that of one token, so it is at most the ratio over all tokens
    if not 1 - ROUNDING <= low <= high or low > worst * (1 + ROUNDING):
        contradictions.append(f"the condition number's interval [{low:.6g}, {high:.6g}] does not follow")
    return contradictions


def _or_infinity(x: float | None) -> float:
    return math.inf if x is None else x


def _check_sublayer(row: CertifiedSublayer, norm_method: str) -> list[str]:
    contradictions = _check_intervals(row)
    verdict, _ = judge(row.violations, row.inactive, row.moved, row.proven)
    if row.verdict != verdict:
        contradictions.append(f"the verdict {row.verdict!r} should be {verdict!r}")
    paper, _ = judge_paper(row.m_min, row.violations, row.inactive, norm_method)
    if row.paper != paper:
        contradictions.append(f"the paper's bound {row.paper!r} should be {paper!r}")
    if row.violations:
        contradictions.append(f"{row.violations} tokens contradict a bound")
    if row.Delta_max is None or row.delta_max is None or row.m_min is None or not bounds_hold(norm_method):
        return contradictions
    slack = 2 * ROUNDING * (1 + row.sigma_max)
    if row.sigma_max > 1 + row.Delta_max + slack:
        contradictions.append(f"sigma_max {row.sigma_max:.6g} > 1 + Delta = {1 + row.Delta_max:.6g}")
    if row.sigma_min < row.m_min - slack:
        contradictions.append(f"sigma_min {row.sigma_min:.6g} < m = {row.m_min:.6g}")
    if row.delta_max > row.Delta_max + slack:
        contradictions.append(f"delta {row.delta_max:.6g} > Delta = {row.Delta_max:.6g}")
    return contradictions


def _check_depth(row: DepthRecord) -> list[str]:
    contradictions = [f"{row.violations} tokens contradict a bound"] if row.violations else []
    largest, smallest = known(row.sigma_max), known(row.sigma_min)
    if row.S_max is not None and largest and math.log(largest) > row.S_max + 2 * ROUNDING:
        contradictions.append(f"sigma_max {largest:.6g} > exp(S), S = {row.S_max:.6g}")
    # an unresolved sigma_min is stated as an upper bound, so a value below prod m is wrong either way
    if row.product_m_min is not None and smallest is not None:
        slack = 2 * ROUNDING * (1 + (largest or 0))
        if smallest < row.product_m_min - slack:
            contradictions.append(f"sigma_min {smallest:.6g} < prod m = {row.product_m_min:.6g}")
    return contradictions


def read_certificate(run: Path) -> CertificateRecord | None:
    """The certificate of a run; None if there is no file."""
    try:
        return CERTIFICATES.read(run / CERTIFICATE)
    except FileNotFoundError:
        return None


# the columns of the table, and what each holds; of those without a sentence the name says it
COLUMNS = {
    "sublayer": "",
    "branch": "",
    "alpha": "step size.",
    "angle": "by which the sublayer turns the stream, in radians; the median of the tokens.",
    "sigma_max": "the most by which the sublayer stretches a small change of the stream.",
    "sigma_min": "the least; near 0 the sublayer forgets some change.",
    "condition": "sigma_max / sigma_min of one token.",
    "verdict": "whether these three are proven, and to the digits shown.",
    "1 + Delta": "the paper's bound: sigma_max is at most this.",
    "m": "the paper's bound: sigma_min is at least this; 0 says nothing.",
    "paper": "whether both bounds hold.",
    "loose": "(1 + Delta) / sigma_max.",
}


def table(part: PartRecord) -> list[list[str]]:
    """One row of text per sublayer, in the order of COLUMNS; each number is that of the worst token.

    A proven number is shown with the digits that are proven, at most six.
    """
    rows = []
    for row in part.sublayers:
        proven = row.proven
        ratio = row.sigma_max / row.sigma_min if row.sigma_min else None
        # the worst token's, if it was kept
        ratio = ratio if isinstance(row.condition, UnsetType) else row.condition
        rows.append(
            [
                str(row.sublayer),
                row.branch,
                _text(known(row.alpha)),
                _text(row.angle_median),
                interval_text(None if proven is None else proven.sigma_max, row.sigma_max),
                interval_text(None if proven is None else proven.sigma_min, row.sigma_min),
                interval_text(None if proven is None else proven.condition, ratio),
                row.verdict,
                _text(None if row.Delta_max is None else 1 + row.Delta_max),
                _text(row.m_min),
                row.paper,
                "-" if row.loose is None else f"{row.loose:.2g}x",
            ]
        )
    return rows


def _text(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0 else f"{x:.4g}"


def digits(interval: Interval) -> int:
    """How many leading digits of a number are proven by an interval that holds it, at most 15."""
    low, high = interval
    if high is None or low <= 0 or high <= 0:
        return 0
    width = (high - low) / high
    return 15 if width == 0 else max(0, min(15, math.floor(-math.log10(width))))


def interval_text(interval: Interval | None, value: float | None) -> str:
    """A number with its proven digits, at most six; `<= x` or `>= x` if one side is open, `~ x` if it is measured."""
    if interval is None:
        return "-" if value is None else f"~ {value:.4g}"
    low, high = interval
    count = min(6, digits(interval))
    if high is None:
        return f">= {low:.3g}"
    if low == 0:
        return f"<= {high:.3g}"
    return f"{(low + high) / 2:.{count}g}" if count else f"{low:.2g} to {high:.2g}"


def summary(certificate: CertificateRecord) -> list[str]:
    """A few sentences: what the model achieves, what is proven of its sublayers and of all of them together.

    Args:
        certificate: what `certify` returned.
    """
    sentences = achievement.sentences(certificate.achieves)
    for part in certificate.parts.values():
        title = f"{certificate.tokens} tokens" if part.tokens is None else f"{part.tokens} tokens as one sequence"
        counts = ", ".join(f"{part.verdicts[v]} {v}" for v in VERDICTS if v in part.verdicts)
        reasons = sorted({row.why for row in part.sublayers if row.verdict == "measured only"})
        reasons = [f" ({reason})" for reason in reasons]
        sentences.append(f"{title}: {len(part.sublayers)} sublayers, of which {counts}{''.join(reasons)}.")
        sentences += [*_worst_sentence(part), _depth_sentence(part), _paper_sentence(part)]
    return sentences


def _worst_sentence(part: PartRecord) -> list[str]:
    """The largest condition number of one sublayer, if that of every sublayer is proven."""
    proven = [(row.sublayer, row.proven.condition) for row in part.sublayers if row.proven is not None]
    bounded = [(high, number, (low, high)) for number, (low, high) in proven if high is not None]
    if len(bounded) < len(part.sublayers) or "violated" in part.verdicts:
        return []
    _, worst, interval = max(bounded, key=lambda row: row[0])
    least = min(digits(condition) for _, _, condition in bounded)
    return [
        f"The condition number of every sublayer is proven to {least} digits or more. "
        f"The largest is {interval_text(interval, None)}, at sublayer {worst}."
    ]


def _depth_sentence(part: PartRecord) -> str:
    last = part.depth[-1]
    proven, ratio = known(last.proven), known(last.condition)
    if proven is None or "violated" in part.verdicts:
        # Lanczos finds sigma_max from below and sigma_min from above
        about = "about" if part.singular_values == "svd" else "at least"
        condition = "beyond float64" if ratio is None else f"{about} {ratio:.3g}, measured"
    elif proven.condition[1] is None:
        condition = f"at least {proven.condition[0]:.3g}, proven"
    else:
        low, high = proven.condition
        condition = f"{interval_text(proven.condition, None)}, proven to lie between {low:.9g} and {high:.9g}"
    idle = part.verdicts.get("inactive", 0)
    noted = f" ({idle} of them inactive)" if idle else ""
    clauses = [f"All sublayers together{noted}: condition number {condition}"]
    if part.lost.conditioning:
        clauses.append(f"it first exceeds {LOST:.2g} at sublayer {part.lost.conditioning}")
    return "; ".join(clauses) + "."


def _paper_sentence(part: PartRecord) -> str:
    rows, last = part.sublayers, part.depth[-1]
    counts = []
    for verdict in (HOLDS, TRIVIAL, DOES_NOT_APPLY):
        reasons = sorted({row.paper_why for row in rows if row.paper == verdict != HOLDS})
        count = sum(row.paper == verdict for row in rows)
        if count or verdict == HOLDS:
            where = f"at {count} of {len(rows)} sublayers" if verdict == HOLDS else f"at {count}"
            verb = "is trivial" if verdict == TRIVIAL else verdict
            counts.append(f"{verb} {where}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    text = f"The paper's bound {', '.join(counts)}"
    if part.bounds == "proven" and last.S_max is not None and last.product_m_min is not None:
        text += f"; over all sublayers it gives sigma_max <= exp({last.S_max:.3g})"
        if largest := known(last.sigma_max):
            # a factor beyond float64 is written as a power of 10
            power = (last.S_max - math.log(largest)) / math.log(10)
            text += f", {10**power:.3g} times the value" if power < 300 else f", 10^{power:.0f} times the value"
        lower = last.product_m_min
        text += f", and sigma_min >= {lower:.3g}" if lower > 0 else ", and nothing on sigma_min"
    return text + "."
