"""step_cost.json: the seconds of one update of a run, measured beside the other contestants of its race."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from spheret.runs.layout import STEP_COST
from spheret.support import files

FORMAT, VERSION = "spheret-step-cost", 1
METHOD = "medians of updates that were interleaved in one process, after all runs of the race had ended"


@dataclass(frozen=True)
class StepCost:
    """The cost of an update. Two costs can be compared if their `together` is the same.

    contestant: the scheme of the run with its options.
    together: the seconds of every contestant of the same measurement.
    rounds: how many updates of each were timed.
    machine: versions, processor and threads.
    """

    contestant: str
    together: dict[str, float]
    rounds: int
    device: str
    machine: dict[str, Any]
    method: str = METHOD

    @property
    def seconds(self) -> float:
        return self.together[self.contestant]

    def write(self, run: Path) -> None:
        document = {"format": FORMAT, "version": VERSION, "seconds": self.seconds, **asdict(self)}
        files.write_atomically(run / STEP_COST, files.dump(document))


def measured_together(costs: Sequence[StepCost | None]) -> bool:
    """Whether all costs are there and come from one measurement. One that was interrupted left some runs without."""
    first = costs[0]
    return first is not None and all(cost is not None and cost.together == first.together for cost in costs)


def read_step_cost(run: Path) -> StepCost | None:
    """The cost in a run directory, or None if it was not measured."""
    path, remedy = run / STEP_COST, "delete it, and run the race again to measure"
    try:
        document = files.read_document(path, FORMAT, VERSION, "race", remedy)
    except FileNotFoundError:
        return None
    try:
        cost = msgspec.convert(document, StepCost)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}.") from None
    if not cost.together.get(cost.contestant, 0) > 0:
        raise ValueError(f"{path} is damaged (no cost of {cost.contestant!r}): {remedy}.")
    return cost
