"""Zero-shot evaluation with lm_eval: `spheret eval`, and functions that read its results."""

from __future__ import annotations

from spheret.evaluate.results import average, number, read
from spheret.evaluate.tasks import PAPER_COLUMNS, TASKS, Column

__all__ = ["PAPER_COLUMNS", "TASKS", "Column", "average", "number", "read"]
