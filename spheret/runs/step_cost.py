"""step_cost.json: the seconds of one update of a run, measured beside the other contestants of its race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from spheret.runs.layout import STEP_COST
from spheret.support.documents import Document, Positive, Record, Text

METHOD = "medians of updates that were interleaved in one process, after all runs of the race had ended"


class StepCost(Record):
    """The cost of an update. Two costs can be compared if their `together` is the same.

    contestant: the scheme of the run with its options.
    seconds: of one update.
    together: the seconds of every contestant of the same measurement.
    rounds: how many updates of each were timed.
    machine: versions, processor and threads.
    """

    contestant: Text
    seconds: float
    together: dict[str, Annotated[float, Meta(gt=0)]]
    rounds: Positive
    device: Text
    machine: dict[str, Any]
    method: str
    format: str = "spheret-step-cost"
    version: int = 1

    def __post_init__(self) -> None:
        if self.together.get(self.contestant) != self.seconds:
            raise ValueError(f"seconds is not the cost of the contestant {self.contestant[:80]!r} in together")

    @classmethod
    def of(
        cls, contestant: str, together: dict[str, float], rounds: int, device: str, machine: dict[str, Any]
    ) -> StepCost:
        return cls(contestant, together[contestant], together, rounds, device, machine, METHOD)

    def write(self, run: Path) -> None:
        COSTS.write(run / STEP_COST, self)


COSTS = Document(StepCost, "race", "delete it, and run the race again to measure")


def measured_together(costs: Sequence[StepCost | None]) -> bool:
    """Whether all costs are there and come from one measurement. One that was interrupted left some runs without."""
    first = costs[0]
    return first is not None and all(cost is not None and cost.together == first.together for cost in costs)


def read_step_cost(run: Path) -> StepCost | None:
    """The cost in a run directory, or None if it was not measured."""
    try:
        return COSTS.read(run / STEP_COST)
    except FileNotFoundError:
        return None
