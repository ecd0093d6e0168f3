"""The look of a report's figures: that of every figure, and the lines of a group's contestants."""

from __future__ import annotations

from typing import Any

from spheret.analysis.line_styles import scheme_styles
from spheret.lab.runs import RunGroup


def line_styles(group: RunGroup) -> dict[str, tuple[str, Any]]:
    """The colour and dashes of each contestant."""
    return scheme_styles({label: results[0].scheme for label, results in group.contestants.items()})
