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
from typing import Any

import msgspec
import torch
from torch import Tensor

from spheret.analysis import achievement
from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import OwnDecoder, check_finite, float64_twin
from spheret.certificates.measure import ROUNDING, Tick, measure_sequence, measure_tokens
from spheret.certificates.midpoint_radius import ULPS
from spheret.certificates.records import CERTIFICATES, CertificateRecord
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
) -> dict[str, Any]:
    """The certificate of a model at some tokens, as plain data.

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
    together = {"tokens": time, **part_of(twin, measure_sequence(twin, ids[:1, :time], exact))} if time else None
    if text is None:
        # a window of one token has no next token: its own takes the place, and the loss says nothing
        text = (ids[:, :-1], ids[:, 1:]) if ids.shape[1] > 1 else (ids, ids)
    x, y = text
    return {
        "format": CERTIFICATES.format,
        "version": CERTIFICATES.version,
        "scope": SCOPE if isinstance(model, GPT) else MEASURED_SCOPE,
        "scheme": twin.scheme,
        "achieves": achievement.achievement(twin, x.to(ids.device), y.to(ids.device), unigram_entropy),
        "tokens": tokens,
        "own_path": own_path,
        "sequence": together,
    }


def _in_float64(model: GPT | Decoder) -> Decoder:
    if isinstance(model, GPT):
        twin = float64_twin(model)
        check_finite(twin, "the model")
        return OwnDecoder(twin)
    if next(model.parameters()).dtype != torch.float64:
        raise ValueError("a decoder is certified in float64: load it with dtype=torch.float64.")
    return model


def is_success(certificate: dict[str, Any]) -> bool:
    """Whether nothing is wrong: the model has learned, no sublayer is inactive, and no bound is contradicted."""
    achieved = certificate["achieves"]
    return achieved["learned"] is not False and not achieved["inactive"] and not verify(certificate)


def spread(ids: Tensor, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The first windows of ids (windows, time) that hold `tokens`, each with evenly spaced positions."""
    time = ids.shape[1]
    windows = []
    for number in range(-(-tokens // time)):
        count = min(time, tokens - number * time)
        windows.append((ids[number : number + 1], torch.arange(count, device=ids.device) * time // count))
    return windows


def verify(certificate: dict[str, Any]) -> list[str]:
    """Every contradiction in a certificate: a bound that a number breaks, or a verdict that does not follow.

    Args:
        certificate: what `certify` returned, or what was read from a file.
    """
    contradictions = []
    for name in ("own_path", "sequence"):
        part = certificate.get(name)
        if part is None:
            continue
        for row in part["sublayers"]:
            contradictions += [
                f"{name}, sublayer {row['sublayer']}: {text}" for text in _check_sublayer(row, part["norm_of_B"])
            ]
        for row in part["depth"]:
            texts = _check_intervals(row) + (_check_depth(row) if bounds_hold(part["norm_of_B"]) else [])
            contradictions += [f"{name}, the first {row['sublayer']} sublayers: {text}" for text in texts]
    return contradictions


def _check_intervals(row: dict[str, Any]) -> list[str]:
    """The values must lie in their own proven intervals, and the intervals must agree with each other."""
    proven = row.get("proven")
    if proven is None:
        return []
    contradictions = []
    for name in ("sigma_max", "sigma_min"):
        low, high = proven[name][0], _or_infinity(proven[name][1])
        slack = ROUNDING * abs(row[name])
        if not low - slack <= row[name] <= high + slack:
            contradictions.append(f"{name} {row[name]:.6g} lies outside its proven interval [{low:.6g}, {high:.6g}]")
    low, high = proven["condition"][0], _or_infinity(proven["condition"][1])
    least = proven["sigma_min"][0]
    worst = proven["sigma_max"][1] / least if least > 0 else math.inf
    # the worst condition number is that of one token, so it is at most the ratio over all tokens
    if not 1 - ROUNDING <= low <= high or low > worst * (1 + ROUNDING):
        contradictions.append(f"the condition number's interval [{low:.6g}, {high:.6g}] does not follow")
    return contradictions


def _or_infinity(x: float | None) -> float:
    return math.inf if x is None else x


def _check_sublayer(row: dict[str, Any], norm_method: str) -> list[str]:
    contradictions = _check_intervals(row)
    verdict, _ = judge(row)
    if row["verdict"] != verdict:
        contradictions.append(f"the verdict {row['verdict']!r} should be {verdict!r}")
    paper, _ = judge_paper(row, norm_method)
    if row["paper"] != paper:
        contradictions.append(f"the paper's bound {row['paper']!r} should be {paper!r}")
    if row["violations"]:
        contradictions.append(f"{row['violations']} tokens contradict a bound")
    if "Delta_max" not in row or not bounds_hold(norm_method):
        return contradictions
    slack = 2 * ROUNDING * (1 + row["sigma_max"])
    if row["sigma_max"] > 1 + row["Delta_max"] + slack:
        contradictions.append(f"sigma_max {row['sigma_max']:.6g} > 1 + Delta = {1 + row['Delta_max']:.6g}")
    if row["sigma_min"] < row["m_min"] - slack:
        contradictions.append(f"sigma_min {row['sigma_min']:.6g} < m = {row['m_min']:.6g}")
    if row["delta_max"] > row["Delta_max"] + slack:
        contradictions.append(f"delta {row['delta_max']:.6g} > Delta = {row['Delta_max']:.6g}")
    return contradictions


def _check_depth(row: dict[str, Any]) -> list[str]:
    contradictions = [f"{row['violations']} tokens contradict a bound"] if row.get("violations") else []
    if "S_max" in row and row.get("sigma_max") and math.log(row["sigma_max"]) > row["S_max"] + 2 * ROUNDING:
        contradictions.append(f"sigma_max {row['sigma_max']:.6g} > exp(S), S = {row['S_max']:.6g}")
    # an unresolved sigma_min is stated as an upper bound, so a value below prod m is wrong either way
    if "product_m_min" in row and row.get("sigma_min") is not None:
        slack = 2 * ROUNDING * (1 + (row["sigma_max"] or 0))
        if row["sigma_min"] < row["product_m_min"] - slack:
            contradictions.append(f"sigma_min {row['sigma_min']:.6g} < prod m = {row['product_m_min']:.6g}")
    return contradictions


def write(path: Path, certificate: dict[str, Any]) -> None:
    """Write certificate.json."""
    CERTIFICATES.write(path, msgspec.convert(certificate, CertificateRecord))


def read(path: Path) -> dict[str, Any]:
    """Read certificate.json. Keys that do not apply are absent."""
    return msgspec.to_builtins(CERTIFICATES.read(path))


def section(run: str | Path) -> dict[str, Any] | None:
    """A run's certificate as a report shows it, as plain data; None if the run has none.

    `columns` and `rows` are a table of text. `series` maps each quantity to one value per sublayer, None where it is
    missing. `verdicts` counts the sublayers of each verdict. `contradictions` is empty unless a bound is broken.
    `success` is False if the model has not learned, a sublayer is inactive or a bound is broken.
    """
    path = Path(run).expanduser() / CERTIFICATE
    if not path.exists():
        return None
    certificate = read(path)
    part, sequence = certificate["own_path"], certificate["sequence"]
    names = ("sigma_max", "sigma_min", "Delta_max", "m_min", "angle_median", "angle_max", "B_max")
    series = {"sublayer": [row["sublayer"] for row in part["sublayers"]]}
    series |= {name: [row.get(name) for row in part["sublayers"]] for name in names}
    depth_names = ("sigma_max", "sigma_min", "condition", "S_max", "product_m_min", "criterion_min")
    series |= {f"depth_{name}": [row.get(name) for row in part["depth"]] for name in depth_names}
    return {
        "checkpoint": certificate.get("checkpoint"),
        "scope": certificate["scope"],
        "summary": summary(certificate),
        "success": is_success(certificate),
        "achieves": certificate["achieves"],
        "columns": list(COLUMNS),
        "rows": table(part),
        "sequence": None if sequence is None else {"tokens": sequence["tokens"], "rows": table(sequence)},
        "verdicts": {name: part["verdicts"].get(name, 0) for name in VERDICTS},
        "series": series,
        "contradictions": verify(certificate),
    }


COLUMNS = (
    "sublayer", "branch", "alpha", "angle", "sigma_max", "sigma_min", "condition", "verdict",
    "1 + Delta", "m", "paper", "loose",
)  # fmt: skip


def table(part: dict[str, Any]) -> list[list[str]]:
    """One row of text per sublayer, in the order of COLUMNS; each number is that of the worst token.

    A proven number is shown with the digits that are proven, at most six.
    """
    rows = []
    for row in part["sublayers"]:
        proven = row["proven"] or {}
        ratio = row["sigma_max"] / row["sigma_min"] if row["sigma_min"] else None
        # the worst token's, if it was kept
        ratio = row.get("condition", ratio)
        rows.append(
            [
                str(row["sublayer"]),
                row["branch"],
                _text(row.get("alpha")),
                _text(row["angle_median"]),
                interval_text(proven.get("sigma_max"), row["sigma_max"]),
                interval_text(proven.get("sigma_min"), row["sigma_min"]),
                interval_text(proven.get("condition"), ratio),
                row["verdict"],
                _text(1 + row["Delta_max"] if "Delta_max" in row else None),
                _text(row.get("m_min")),
                row["paper"],
                "-" if row["loose"] is None else f"{row['loose']:.2g}x",
            ]
        )
    return rows


def _text(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0 else f"{x:.4g}"


def digits(interval: list[float | None]) -> int:
    """How many leading digits of a number are proven by an interval that holds it, at most 15."""
    low, high = interval
    if high is None or low is None or low <= 0 or high <= 0:
        return 0
    width = (high - low) / high
    return 15 if width == 0 else max(0, min(15, math.floor(-math.log10(width))))


def interval_text(interval: list[float | None] | None, value: float | None) -> str:
    """A number with its proven digits, at most six; `<= x` or `>= x` if one side is open, `~ x` if it is measured."""
    if interval is None:
        return "-" if value is None else f"~ {value:.4g}"
    low, high = interval
    count = min(6, digits(interval))
    if high is None:
        return f">= {low:.3g}"
    if low == 0 or low is None:
        return f"<= {high:.3g}"
    return f"{(low + high) / 2:.{count}g}" if count else f"{low:.2g} to {high:.2g}"


def summary(certificate: dict[str, Any]) -> list[str]:
    """A few sentences: what the model achieves, what is proven of its sublayers and of all of them together.

    Args:
        certificate: what `certify` returned.
    """
    parts = [(f"{certificate['tokens']} tokens", certificate["own_path"])]
    sequence = certificate["sequence"]
    if sequence is not None:
        parts.append((f"{sequence['tokens']} tokens as one sequence", sequence))
    sentences = achievement.sentences(certificate["achieves"])
    for title, part in parts:
        counts = ", ".join(f"{part['verdicts'][v]} {v}" for v in VERDICTS if v in part["verdicts"])
        reasons = sorted({row["why"] for row in part["sublayers"] if row["verdict"] == "measured only"})
        reasons = [f" ({reason})" for reason in reasons]
        sentences.append(f"{title}: {len(part['sublayers'])} sublayers, of which {counts}{''.join(reasons)}.")
        sentences += [*_worst_sentence(part), _depth_sentence(part), _paper_sentence(part)]
    return sentences


def _worst_sentence(part: dict[str, Any]) -> list[str]:
    """The largest condition number of one sublayer, if that of every sublayer is proven."""
    rows = part["sublayers"]
    if not all(row["proven"] and row["proven"]["condition"][1] for row in rows) or "violated" in part["verdicts"]:
        return []
    worst = max(rows, key=lambda row: row["proven"]["condition"][1])
    least = min(digits(row["proven"]["condition"]) for row in rows)
    return [
        f"The condition number of every sublayer is proven to {least} digits or more. "
        f"The largest is {interval_text(worst['proven']['condition'], None)}, at sublayer {worst['sublayer']}."
    ]


def _depth_sentence(part: dict[str, Any]) -> str:
    last, lost = part["depth"][-1], part["lost"]
    proven = last["proven"]
    if proven is None or "violated" in part["verdicts"]:
        # Lanczos finds sigma_max from below and sigma_min from above
        about = "about" if part["singular_values"] == "svd" else "at least"
        condition = "beyond float64" if last["condition"] is None else f"{about} {last['condition']:.3g}, measured"
    elif proven["condition"][1] is None:
        condition = f"at least {proven['condition'][0]:.3g}, proven"
    else:
        low, high = proven["condition"]
        condition = f"{interval_text(proven['condition'], None)}, proven to lie between {low:.9g} and {high:.9g}"
    idle = part["verdicts"].get("inactive", 0)
    noted = f" ({idle} of them inactive)" if idle else ""
    clauses = [f"All sublayers together{noted}: condition number {condition}"]
    if lost["conditioning"]:
        clauses.append(f"it first exceeds {LOST:.2g} at sublayer {lost['conditioning']}")
    return "; ".join(clauses) + "."


def _paper_sentence(part: dict[str, Any]) -> str:
    rows, last = part["sublayers"], part["depth"][-1]
    counts = []
    for verdict in (HOLDS, TRIVIAL, DOES_NOT_APPLY):
        reasons = sorted({row["paper_why"] for row in rows if row["paper"] == verdict != HOLDS})
        count = sum(row["paper"] == verdict for row in rows)
        if count or verdict == HOLDS:
            where = f"at {count} of {len(rows)} sublayers" if verdict == HOLDS else f"at {count}"
            verb = "is trivial" if verdict == TRIVIAL else verdict
            counts.append(f"{verb} {where}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    text = f"The paper's bound {', '.join(counts)}"
    if part["bounds"] == "proven":
        text += f"; over all sublayers it gives sigma_max <= exp({last['S_max']:.3g})"
        if last.get("sigma_max"):
            # a factor beyond float64 is written as a power of 10
            power = (last["S_max"] - math.log(last["sigma_max"])) / math.log(10)
            text += f", {10**power:.3g} times the value" if power < 300 else f", 10^{power:.0f} times the value"
        lower = last["product_m_min"]
        text += f", and sigma_min >= {lower:.3g}" if lower > 0 else ", and nothing on sigma_min"
    return text + "."
