"""A certificate: what is proven of every sublayer at some real tokens, what is only measured, and what is neither.

| verdict | means |
|---|---|
| proven | m > 0 at every token, from a |B| that is an upper bound: sigma_min(J) >= m and sigma_max(J) <= 1 + Delta |
| vacuous | m = 0 at some token: the bound from below says nothing there; sigma_max(J) <= 1 + Delta still holds |
| measured only | no bound applies (the update is no retraction of the sphere), or |B| is an estimate from below |
| violated | a measurement contradicts a bound: the model does not compute what the bound is about |
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
from spheret.runs.layout import CERTIFICATE, CERTIFICATE_FIGURE
from spheret.support import files

FORMAT, VERSION = "spheret-certificate", 1
SCOPE = (
    "at the tokens looked at, for the stream between its entry and its exit, of these weights in exact arithmetic "
    "(computed in float64)"
)


def certify(
    model: GPT, ids: Tensor, tokens: int = 64, sequence: int = 8, exact: bool = True, tick: Tick = lambda tokens: None
) -> dict[str, Any]:
    """The certificate of a model on some of its tokens, as plain data.

    ids: (windows, time); `tokens` of them are looked at, spread over as few windows as hold them.
    sequence: how many tokens at the start of the first window are looked at as one; 0 for none.
    exact: whether |B| must be an upper bound whatever it costs.
    """
    if tokens < 1 or sequence < 0:
        raise ValueError(f"tokens must be at least 1 and sequence at least 0, got {tokens} and {sequence}.")
    if tokens > ids.numel():
        raise ValueError(f"{tokens:,} tokens were asked for and {ids.numel():,} are there: ask for fewer.")
    twin = float64_twin(model)
    check_finite(twin, "the model")
    ids = ids.to(next(twin.parameters()).device)
    windows = spread(ids, tokens)
    found = {"scheme": model.config.scheme, "width": model.config.width, "tokens": tokens, "windows": len(windows)}
    whole = min(sequence, ids.shape[1])
    return {
        "format": FORMAT,
        "version": VERSION,
        "scope": SCOPE,
        **found,
        "own_path": part_of(twin, measure_tokens(twin, windows, exact, tick)),
        "sequence": {"tokens": whole, **part_of(twin, measure_sequence(twin, ids[:1, :whole], exact))}
        if whole
        else None,
    }


def spread(ids: Tensor, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The first windows of ids (windows, time) that hold `tokens`, and evenly spaced positions in each."""
    time = ids.shape[1]
    found = []
    for number in range(-(-tokens // time)):
        count = min(time, tokens - number * time)
        found.append((ids[number : number + 1], torch.arange(count, device=ids.device) * time // count))
    return found


def verify(certificate: dict[str, Any]) -> list[str]:
    """What in a certificate contradicts itself: a bound that its measurements break, a verdict it has not earned."""
    wrong = []
    for name in ("own_path", "sequence"):
        part = certificate.get(name)
        if part is None:
            continue
        for row in part["sublayers"]:
            wrong += [f"{name}, layer {row['sublayer']}: {said}" for said in _wrong_layer(row, part["norm_of_B"])]
        for row in part["depth"] if bounds_hold(part["norm_of_B"]) else []:
            wrong += [f"{name}, the first {row['sublayer']} layers: {said}" for said in _wrong_depth(row)]
    return wrong


def _wrong_layer(row: dict[str, Any], norm_method: str) -> list[str]:
    if "Delta_max" not in row:
        return [] if row["verdict"] == "measured only" else [f"no bound, yet the verdict is {row['verdict']!r}"]
    wrong = []
    earned, _ = judge(row, norm_method)
    if row["verdict"] != earned:
        wrong.append(f"the verdict {row['verdict']!r} should be {earned!r}")
    if not bounds_hold(norm_method):
        return wrong
    slack = 2 * ROUNDING * (1 + row["sigma_max"])
    if row["sigma_max"] > 1 + row["Delta_max"] + slack:
        wrong.append(f"sigma_max {row['sigma_max']:.6g} > 1 + Delta = {1 + row['Delta_max']:.6g}")
    if row["sigma_min"] < row["m_min"] - slack:
        wrong.append(f"sigma_min {row['sigma_min']:.6g} < m = {row['m_min']:.6g}")
    if row["delta_max"] > row["Delta_max"] + slack:
        wrong.append(f"delta {row['delta_max']:.6g} > Delta = {row['Delta_max']:.6g}")
    if row["violations"]:
        wrong.append(f"{row['violations']} tokens contradict a bound")
    return wrong


def _wrong_depth(row: dict[str, Any]) -> list[str]:
    wrong = [f"{row['violations']} tokens contradict a bound"] if row.get("violations") else []
    if "S_max" in row and row.get("sigma_max") and math.log(row["sigma_max"]) > row["S_max"] + 2 * ROUNDING:
        wrong.append(f"sigma_max {row['sigma_max']:.6g} > exp(S), S = {row['S_max']:.6g}")
    # stated from above where it is not resolved: below prod m it is wrong either way
    if "product_m_min" in row and row.get("sigma_min") is not None:
        slack = 2 * ROUNDING * (1 + (row["sigma_max"] or 0))
        if row["sigma_min"] < row["product_m_min"] - slack:
            wrong.append(f"sigma_min {row['sigma_min']:.6g} < prod m = {row['product_m_min']:.6g}")
    return wrong


def read(path: Path) -> dict[str, Any]:
    """A certificate.json, checked to be one."""
    certificate = files.read_document(path, FORMAT, VERSION, "certify", "run spheret certify again")
    try:
        verify(certificate), summary(certificate), table(certificate["own_path"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): run spheret certify again.") from None
    return certificate


def section(run: str | Path) -> dict[str, Any] | None:
    """What a report shows of a run's certificate, as plain data; None where there is none.

    `columns` and `rows` are a table of text; `series` has a list a quantity over `layer`, None where it has no value;
    `verdicts` counts the layers of each; `contradictions` is empty unless a bound is broken.
    """
    directory = Path(run).expanduser()
    if not (directory / CERTIFICATE).exists():
        return None
    certificate = read(directory / CERTIFICATE)
    part = certificate["own_path"]
    names = ("sigma_max", "sigma_min", "Delta_max", "m_min", "angle_max", "B_max")
    series = {"sublayer": [row["sublayer"] for row in part["sublayers"]]}
    series |= {name: [row.get(name) for row in part["sublayers"]] for name in names}
    along = ("sigma_max", "sigma_min", "condition", "S_max", "product_m_min", "criterion_min")
    series |= {f"depth_{name}": [row.get(name) for row in part["depth"]] for name in along}
    figure = directory / CERTIFICATE_FIGURE
    return {
        "checkpoint": certificate.get("checkpoint"),
        "scheme": certificate["scheme"],
        "tokens": certificate["tokens"],
        "scope": certificate["scope"],
        "summary": summary(certificate),
        "columns": list(COLUMNS),
        "rows": table(part),
        "sequence": None
        if certificate["sequence"] is None
        else {"tokens": certificate["sequence"]["tokens"], "rows": table(certificate["sequence"])},
        "verdicts": {name: part["verdicts"].get(name, 0) for name in VERDICTS},
        "lost": part["lost"],
        "growth": part.get("growth"),
        "dyadic": part.get("dyadic"),
        "series": series,
        "figures": [str(figure)] if figure.exists() else [],
        "contradictions": verify(certificate),
    }


COLUMNS = ("sublayer", "branch", "alpha", "angle", "|B|", "Delta", "sigma_max", "sigma_min", "m", "verdict")


def table(part: dict[str, Any]) -> list[list[str]]:
    """A row of text a sublayer, in the order of COLUMNS; each number is that of the worst token."""
    keys = ("alpha", "angle_max", "B_max", "Delta_max", "sigma_max", "sigma_min", "m_min")
    return [
        [str(row["sublayer"]), row["branch"], *(_text(row.get(key)) for key in keys), row["verdict"]]
        for row in part["sublayers"]
    ]


def _text(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0 else f"{x:.4g}"


def summary(certificate: dict[str, Any]) -> list[str]:
    """A few sentences: how much is proven, where the proof and where the conditioning ends."""
    said = []
    for name, whom in (("own_path", f"{certificate['tokens']} tokens"), ("sequence", "a whole sequence")):
        part = certificate[name]
        if part is None:
            continue
        if name == "sequence":
            whom = f"{part['tokens']} tokens as one sequence"
        counts = ", ".join(f"{part['verdicts'][v]} {v}" for v in VERDICTS if v in part["verdicts"])
        why = {row["why"] for row in part["sublayers"] if row["verdict"] == "measured only"}
        said.append(
            f"{whom}: of {len(part['sublayers'])} layers {counts}" + "".join(f" ({w})" for w in sorted(why)) + "."
        )
        last = part["depth"][-1]
        conditioned = "beyond float64" if last["condition"] is None else f"{last['condition']:.3g}"
        sentence = f"all layers together: condition number {conditioned}"
        if part["bounds"] == "proven":
            lower = last["product_m_min"]
            sentence += f"; proven: sigma_max <= exp({last['S_max']:.3g}), sigma_min >= " + (
                f"{lower:.3g}" if lower > 0 else f"nothing from layer {part['lost']['proof']} on"
            )
        lost = part["lost"]["conditioning"]
        said.append(sentence + (f"; conditioning is lost (beyond {LOST:.2g}) at layer {lost}." if lost else "."))
    return said
