"""What convert.json holds: what was asked, every loss that was measured, and what became of each residual."""

from __future__ import annotations

from typing import Any, Literal

from spheret.runs.records import Environment
from spheret.support.documents import Count, Document, Fraction, NonNegative, Number, Positive, Record, Sha256, Text

CONVERT = "convert.json"
CONTROL, CONVERTED = "control", "converted"


class Settings(Record):
    """What was asked. The same settings go on with a conversion; other ones are another conversion."""

    model: Text
    model_sha256: Sha256
    data: Text
    manifest_sha256: Sha256
    scheme: Text
    options: dict[str, Any]
    start: Literal["exact", "calibrated", "plain"]
    steps: Positive
    anneal: Count
    lr: NonNegative
    alpha_lr: NonNegative
    batch_size: Positive
    block: Positive
    seed: Count
    eval_every: Positive
    eval_windows: Positive


class Starts(Record):
    """The validation loss before any training: of the original, and right after each kind of conversion."""

    original: Number
    exact: Number
    calibrated: Number
    plain: Number


class Evaluation(Record):
    """The validation loss after some steps. t is the position of the annealing, null in the control."""

    step: Count
    loss: Number
    t: Fraction | None


class Arm(Record):
    """One fine-tuning: the training loss of each step, and the evaluations."""

    losses: list[Number]
    evaluations: list[Evaluation]

    @property
    def last(self) -> Number:
        """The last validation loss."""
        return self.evaluations[-1].loss if self.evaluations else None

    def until(self, step: int) -> Arm:
        """What was known after some steps."""
        return Arm(self.losses[:step], [each for each in self.evaluations if each.step <= step])


class ResidualRecord(Record):
    """One residual: its step size where it started and, null before that, where it ended."""

    name: Text
    kind: Text
    stack: str
    sublayer: Positive
    mean_angle: Number
    rows: Count
    beyond_half_turn: Count
    beyond_reach: Count
    alpha: Number
    alpha_after: Number
    radius: Number
    radius_after: Number


class ConvertRecord(Record):
    """convert.json. It is written along the way, and is finished when the converted model is in the directory."""

    settings: Settings
    architecture: Text
    parameters: Positive
    # what the conversion adds
    added_parameters: Count
    starts: Starts
    # the largest difference of an output from the original's at the exact start, by the largest output
    difference: Number
    sublayers: list[ResidualRecord]
    # what was left as it was: its name, and why
    left: list[tuple[str, str]]
    control: Arm
    converted: Arm
    finished: bool
    environment: Environment
    format: str = "spheret-convert"
    version: int = 1

    def __post_init__(self) -> None:
        for name, arm in ((CONTROL, self.control), (CONVERTED, self.converted)):
            steps = [each.step for each in arm.evaluations]
            if steps != sorted(set(steps)) or (steps and steps[-1] > len(arm.losses)):
                raise ValueError(f"the evaluations of {name} are not in order, or are of steps that were not made")
            if len(arm.losses) > self.settings.steps:
                raise ValueError(f"{name} has more losses than steps")
            if self.finished and (len(arm.losses) < self.settings.steps or not arm.evaluations):
                raise ValueError(f"it is said to be finished, and {name} is not")


CONVERSIONS = Document(ConvertRecord, "convert", "delete the directory, and convert again")
