"""What inspect.json holds: the dynamics of a model, or of two."""

from __future__ import annotations

from dataclasses import asdict

from msgspec import UNSET, UnsetType

from spheret.analysis.dynamics import Dynamics
from spheret.model.probes import BranchKind
from spheret.runs.metrics import StartRecord
from spheret.support.documents import Count, Document, Number, Positive, Record


class InspectedSublayer(Record):
    """What one sublayer does: see `SublayerDynamics`."""

    sublayer: Positive
    branch: BranchKind
    norm: Number
    massive: Number
    angle: Number
    moved: Number
    inactive: bool
    update_cosine: Number
    token_cosine: Number
    effective_rank: Number
    sink: Number
    sink_heads: list[Number] | None
    removal: Number
    gradient: Number
    stream_gradient: Number
    initial_gradient: Number
    # in someone else's model, the name of the module that ends the branch
    module: str | UnsetType = UNSET


class TrainingGradients(Record):
    """The gradient norm of every sublayer at an evaluation of the training."""

    step: Positive
    gradients: list[Number]


class InspectedRun(Record):
    """What `inspect_run` or `inspect_saved` returned. Someone else's model has a class and no checkpoint."""

    run: str
    scheme: str
    checkpoint: Count | None
    windows: Positive
    loss: Number
    entry_norm: Number
    sublayers: list[InspectedSublayer]
    # by number
    inactive: list[Positive]
    angular_distance: list[list[Number]]
    training: list[TrainingGradients]
    model: str | UnsetType = UNSET
    # of our own models: see `own_logit`, and the same before training, if the run started from weights of its own
    own_logit: Number | UnsetType = UNSET
    start: StartRecord | UnsetType = UNSET


class InspectRecord(Record):
    """inspect.json: one run, or two."""

    runs: list[InspectedRun]
    format: str = "spheret-inspect"
    version: int = 1


INSPECTIONS = Document(InspectRecord, "inspect", "inspect the run again")


def inspected_sublayers(measured: Dynamics, initial_gradients: list[float] | list[None]) -> list[InspectedSublayer]:
    """The sublayers of a model with their gradients before training, None where there is no such model."""
    return [
        InspectedSublayer(**asdict(sublayer), initial_gradient=gradient)
        for sublayer, gradient in zip(measured.sublayers, initial_gradients, strict=True)
    ]
