"""The plan that a race proposes at its end: its contestants around their best rates, with fresh seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spheret.lab.answers import GroupAnswer
from spheret.lab.laboratory import PLAN
from spheret.lab.plan import OWN, rounded
from spheret.runs.config import SECTIONS, Given
from spheret.support import files

HEAD = "# proposed by spheret race"
SEEDS, STEP = 5, 2**0.5


def propose_study(directory: Path, answer: GroupAnswer, shared: Given) -> Path | None:
    """Write DIR/plan.toml and return its path; None if no contestant has a loss, or if a plan of one's own is there.

    The rates are those that were best for some contestant, in steps of a square root of two, and one step beyond. A
    study tunes every contestant by itself, and tries more rates where the best one lies at an edge.
    """
    path = directory / PLAN
    best = sorted(entry.rate for entry in answer.entries if entry.rate is not None and not entry.failed)
    foreign = path.is_symlink() or (path.exists() and not path.read_bytes().startswith(HEAD.encode()))
    if not best or foreign:
        return None
    rates = [rounded(best[0] / STEP)]
    while rates[-1] < best[-1] * STEP * 0.99:
        rates.append(rounded(rates[0] * STEP ** len(rates)))
    labels = [_words(contestant.given["model"]) for contestant in answer.group.contestants]
    lines = [
        f"{HEAD}: every contestant tuned by itself, then compared with fresh seeds. docs/lab.md lists the keys",
        'title = "Deep connections, each at its own best learning rate"',
        f"reference = {json.dumps(answer.reference)}",
        *_sections(shared),
        "",
        "[[parts]]",
        'name = "tuned"',
        f"contestants = {json.dumps(labels)}",
        f"rates = {json.dumps(rates)}",
        f"seeds = {SEEDS}",
        f"first = {len(labels)}",
    ]
    files.write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def _words(model: Mapping[str, Any]) -> str:
    """A contestant as the command line spells it."""
    others = {name: value for name, value in model.items() if name not in ("scheme", "scheme_options")}
    settings = {**model["scheme_options"], **others}
    return ":".join([model["scheme"], *(f"{name}={_word(value)}" for name, value in settings.items())])


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _sections(shared: Given) -> list[str]:
    lines = []
    for section in SECTIONS:
        # TOML has no null: what is not given is the default
        values = {
            key: value for key, value in shared.get(section, {}).items() if key not in OWN and value is not None
        }
        if values:
            lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return lines


def _toml(value: Any) -> str:
    """A setting as TOML spells it: as JSON does, but for infinity, as in clip = inf."""
    # TOML knows no pairs of surrogates
    return str(value) if value == math.inf else json.dumps(value, ensure_ascii=False)
