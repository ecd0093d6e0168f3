"""A certificate: one verdict per sublayer at some real tokens.

| verdict | meaning |
|---|---|
| proven | m > 0 at every token, from an upper bound on |B|: sigma_min(J) >= m and sigma_max(J) <= 1 + Delta |
| vacuous | m = 0 at some token, so nothing bounds sigma_min there; sigma_max(J) <= 1 + Delta still holds |
| measured only | no bound applies: the update is not a retraction of the sphere, or |B| is estimated from below |
| violated | a measurement contradicts a bound: the model does not compute the update that the bound is about |
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.analysis.measure import ROUNDING, Tick, measure_sequence, measure_tokens
from spheret.analysis.sublayer_verdicts import LOST, VERDICTS, bounds_hold, judge, part_of
from spheret.analysis.sublayers import check_finite, float64_twin
from spheret.model.gpt import GPT
from spheret.runs.layout import CERTIFICATE
from spheret.support import files

FORMAT, VERSION = "spheret-certificate", 1
SCOPE = (
    "it holds at the tokens examined, for the stream between its entry and its exit, and for these weights in exact "
    "arithmetic (computed in float64)"
)


def certify(
    model: GPT, ids: Tensor, tokens: int = 64, sequence: int = 8, exact: bool = True, tick: Tick = lambda tokens: None
) -> dict[str, Any]:
    """The certificate of a model at some tokens, as plain data.

    ids: (windows, time). `tokens` of them are examined, spread over the fewest windows that hold them.
    sequence: how many tokens at the start of the first window are examined together as one point; 0 for none.
    exact: whether |B| must be an upper bound even where that is slow.
    tick: called with the number of tokens of every update that was measured.
    """
    if tokens < 1 or sequence < 0:
        raise ValueError(f"tokens must be at least 1 and sequence at least 0, got {tokens} and {sequence}.")
    if tokens > ids.numel():
        raise ValueError(f"{tokens:,} tokens were asked for, but ids holds {ids.numel():,}: ask for fewer.")
    twin = float64_twin(model)
    check_finite(twin, "the model")
    ids = ids.to(next(twin.parameters()).device)
    time = min(sequence, ids.shape[1])
    own_path = part_of(twin, measure_tokens(twin, spread(ids, tokens), exact, tick))
    together = {"tokens": time, **part_of(twin, measure_sequence(twin, ids[:1, :time], exact))} if time else None
    return {
        "format": FORMAT,
        "version": VERSION,
        "scope": SCOPE,
        "scheme": model.config.scheme,
        "tokens": tokens,
        "own_path": own_path,
        "sequence": together,
    }


def spread(ids: Tensor, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The first windows of ids (windows, time) that hold `tokens`, each with evenly spaced positions."""
    time = ids.shape[1]
    windows = []
    for number in range(-(-tokens // time)):
        count = min(time, tokens - number * time)
        windows.append((ids[number : number + 1], torch.arange(count, device=ids.device) * time // count))
    return windows


def verify(certificate: dict[str, Any]) -> list[str]:
    """Every contradiction in a certificate: a bound that a measurement breaks, or a verdict that does not follow."""
    contradictions = []
    for name in ("own_path", "sequence"):
        part = certificate.get(name)
        if part is None:
            continue
        for row in part["sublayers"]:
            contradictions += [
                f"{name}, sublayer {row['sublayer']}: {text}" for text in _check_sublayer(row, part["norm_of_B"])
            ]
        for row in part["depth"] if bounds_hold(part["norm_of_B"]) else []:
            contradictions += [f"{name}, the first {row['sublayer']} sublayers: {text}" for text in _check_depth(row)]
    return contradictions


def _check_sublayer(row: dict[str, Any], norm_method: str) -> list[str]:
    if "Delta_max" not in row:
        return [] if row["verdict"] == "measured only" else [f"no bound, yet the verdict is {row['verdict']!r}"]
    contradictions = []
    verdict, _ = judge(row, norm_method)
    if row["verdict"] != verdict:
        contradictions.append(f"the verdict {row['verdict']!r} should be {verdict!r}")
    if not bounds_hold(norm_method):
        return contradictions
    slack = 2 * ROUNDING * (1 + row["sigma_max"])
    if row["sigma_max"] > 1 + row["Delta_max"] + slack:
        contradictions.append(f"sigma_max {row['sigma_max']:.6g} > 1 + Delta = {1 + row['Delta_max']:.6g}")
    if row["sigma_min"] < row["m_min"] - slack:
        contradictions.append(f"sigma_min {row['sigma_min']:.6g} < m = {row['m_min']:.6g}")
    if row["delta_max"] > row["Delta_max"] + slack:
        contradictions.append(f"delta {row['delta_max']:.6g} > Delta = {row['Delta_max']:.6g}")
    if row["violations"]:
        contradictions.append(f"{row['violations']} tokens contradict a bound")
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


def read(path: Path) -> dict[str, Any]:
    """Read certificate.json and check that it is complete."""
    certificate = files.read_document(path, FORMAT, VERSION, "certify", "run spheret certify again")
    try:
        verify(certificate), summary(certificate), table(certificate["own_path"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): run spheret certify again.") from None
    return certificate


def section(run: str | Path) -> dict[str, Any] | None:
    """A run's certificate as a report shows it, as plain data; None if the run has none.

    `columns` and `rows` are a table of text. `series` maps each quantity to one value per sublayer, None where it is
    missing. `verdicts` counts the sublayers of each verdict. `contradictions` is empty unless a bound is broken.
    """
    path = Path(run).expanduser() / CERTIFICATE
    if not path.exists():
        return None
    certificate = read(path)
    part, sequence = certificate["own_path"], certificate["sequence"]
    names = ("sigma_max", "sigma_min", "Delta_max", "m_min", "angle_max", "B_max")
    series = {"sublayer": [row["sublayer"] for row in part["sublayers"]]}
    series |= {name: [row.get(name) for row in part["sublayers"]] for name in names}
    depth_names = ("sigma_max", "sigma_min", "condition", "S_max", "product_m_min", "criterion_min")
    series |= {f"depth_{name}": [row.get(name) for row in part["depth"]] for name in depth_names}
    return {
        "checkpoint": certificate.get("checkpoint"),
        "scope": certificate["scope"],
        "summary": summary(certificate),
        "columns": list(COLUMNS),
        "rows": table(part),
        "sequence": None if sequence is None else {"tokens": sequence["tokens"], "rows": table(sequence)},
        "verdicts": {name: part["verdicts"].get(name, 0) for name in VERDICTS},
        "series": series,
        "contradictions": verify(certificate),
    }


COLUMNS = ("sublayer", "branch", "alpha", "angle", "|B|", "Delta", "sigma_max", "sigma_min", "m", "verdict")


def table(part: dict[str, Any]) -> list[list[str]]:
    """One row of text per sublayer, in the order of COLUMNS; each number is that of the worst token."""
    keys = ("alpha", "angle_max", "B_max", "Delta_max", "sigma_max", "sigma_min", "m_min")
    return [
        [str(row["sublayer"]), row["branch"], *(_text(row.get(key)) for key in keys), row["verdict"]]
        for row in part["sublayers"]
    ]


def _text(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0 else f"{x:.4g}"


def summary(certificate: dict[str, Any]) -> list[str]:
    """A few sentences: how many sublayers have each verdict, and what holds for all sublayers together."""
    parts = [(f"{certificate['tokens']} tokens", certificate["own_path"])]
    sequence = certificate["sequence"]
    if sequence is not None:
        parts.append((f"{sequence['tokens']} tokens as one sequence", sequence))
    sentences = []
    for title, part in parts:
        counts = ", ".join(f"{part['verdicts'][v]} {v}" for v in VERDICTS if v in part["verdicts"])
        reasons = sorted({row["why"] for row in part["sublayers"] if row["verdict"] == "measured only"})
        reasons = [f" ({reason})" for reason in reasons]
        sentences.append(f"{title}: {len(part['sublayers'])} sublayers, of which {counts}{''.join(reasons)}.")
        sentences.append(_depth_sentence(part))
    return sentences


def _depth_sentence(part: dict[str, Any]) -> str:
    last, lost = part["depth"][-1], part["lost"]
    condition = "beyond float64" if last["condition"] is None else f"{last['condition']:.3g}"
    clauses = [f"all sublayers together: condition number {condition}"]
    if part["bounds"] == "proven":
        lower = last["product_m_min"]
        clauses.append(
            f"proven: sigma_max <= exp({last['S_max']:.3g}), "
            + (f"sigma_min >= {lower:.3g}" if lower > 0 else f"nothing on sigma_min from sublayer {lost['proof']} on")
        )
    if lost["conditioning"]:
        clauses.append(f"the condition number first exceeds {LOST:.2g} at sublayer {lost['conditioning']}")
    return "; ".join(clauses) + "."
