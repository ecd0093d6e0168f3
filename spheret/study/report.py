"""The report of a study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spheret.study.plan import Plan
from spheret.study.rows import Key, Row


def study_report(plan: Plan, rows: Mapping[Key, Row], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return out
