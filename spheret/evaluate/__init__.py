"""Zero-shot evaluation through lm_eval: `spheret eval`, and what it found as rows for a report."""

from __future__ import annotations

from spheret.evaluate.eval_json import average, compare, read, table
from spheret.evaluate.tasks import PAPER_TASKS, TASKS

__all__ = ["PAPER_TASKS", "TASKS", "average", "compare", "read", "table"]
