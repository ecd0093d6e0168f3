"""What is seen at a watched step, and what is said about it. `watch.jsonl` holds a `Header`, then `Observation`s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

# what the sublayers were found by: modules of spheret, sums in the code of the model, or neither
Found = Literal["connections", "residual sums", "parameters only"]
EventKind = Literal["not finite", "spike", "diverged", "collapsed", "dead", "exploding", "head"]
Level = Literal["alarm", "warning"]
Moved = Literal["angle", "gradient share", "norm factor"]


class Measured(Protocol):
    """What the guards need to know of a sublayer."""

    @property
    def sublayer(self) -> int: ...
    @property
    def norm(self) -> float | None: ...
    @property
    def angle_mean(self) -> float | None: ...
    @property
    def cosine(self) -> float | None: ...
    @property
    def grad_norm(self) -> float | None: ...


@dataclass(frozen=True)
class Finding:
    """What a guard found, before it is put into words.

    sublayer, parameter: where. A finding about the whole model has neither.
    measured: what was measured there; before, now: that when the loss was last normal, at step `since`, and now.
    """

    kind: Literal["collapsed", "diverged", "not finite"]
    sublayer: int | None = None
    parameter: str | None = None
    measured: str | None = None
    before: float | None = None
    now: float | None = None
    since: int | None = None


@dataclass(frozen=True)
class SublayerName:
    """A sublayer: its number from 1 on, and the module that ends its branch."""

    sublayer: int
    name: str
    branch: str


@dataclass(frozen=True)
class Header:
    """The first line of watch.jsonl: what is watched."""

    model: str
    parameters: int
    every: int
    found: Found
    sublayers: list[SublayerName]
    # why the stream was not found, or what else a reader should know
    note: str = ""
    format: str = "spheret-watch"
    version: int = 1


@dataclass
class SublayerObservation:
    """One sublayer at a watched step. None: not measured, or not finite.

    Args:
        sublayer: its number, from 1 on.
        norm: the mean length of the stream behind it.
        growth: by what factor it changed that length.
        angle_mean: by what angle it turned the stream, in radians, on average over the tokens.
        angle_max: the largest such angle.
        moved: how far the branch moved the stream, as a share of its length: the median over the tokens.
        moved_max: the largest such share.
        cosine: the mean cosine between tokens behind it.
        common_stream: the share of the direction that all tokens have in common, in the stream behind it.
        common_output: the same in the branch's output.
        common_gradient: the same in the gradient of the matrix that writes to the stream.
        massive: the largest activation over the median one.
        first_token: the first tokens' norm over the mean.
        sink: the mean attention to the first token, where weights are to be had.
        alpha: the step size, if the connection has one.
        grad_norm: the norm of the gradient of all its weights.
        update: the norm of their last change over their own norm.
    """

    sublayer: int
    norm: float | None = None
    growth: float | None = None
    angle_mean: float | None = None
    angle_max: float | None = None
    moved: float | None = None
    moved_max: float | None = None
    cosine: float | None = None
    common_stream: float | None = None
    common_output: float | None = None
    common_gradient: float | None = None
    massive: float | None = None
    first_token: float | None = None
    sink: float | None = None
    alpha: float | None = None
    grad_norm: float | None = None
    update: float | None = None


@dataclass
class PlaceObservation:
    """Weights outside of the sublayers, such as an embedding; without sublayers, every layer."""

    name: str
    grad_norm: float | None = None
    update: float | None = None


@dataclass(frozen=True)
class Event:
    """An alarm or a warning: what, at which step, where, and in a sentence, with what helps.

    Args:
        kind: one of the kinds that docs/watch.md lists.
        step: the update.
        where: the name of a module or of a parameter, "the batch" or "the model".
        sentence: what happened.
        remedy: what helps.
        level: "alarm" or "warning".
        sublayer: the number of the sublayer, if it is one.
        measured: the measure that gave it away.
        before: its value when all was well.
        now: its value now.
    """

    kind: EventKind
    step: int
    where: str
    sentence: str
    remedy: str = ""
    level: Level = "alarm"
    sublayer: int | None = None
    measured: str = ""
    before: float | None = None
    now: float | None = None


@dataclass
class Observation:
    """One watched step.

    Args:
        step: the update.
        losses: those of the steps since the last observation, this one last; None where a loss was not finite.
        grad_norm: the norm of the whole gradient.
        sublayers: what was seen at each sublayer.
        places: what was seen at the weights outside of the sublayers.
        on_bound: the names of learned scalars that have reached a bound.
        events: what was said since the last observation.
        skipped: how many updates were skipped so far.
        own_logit: at the first step, the logit of the current token above the mean logit, if the head is tied.
        seconds: since the watch began.
    """

    step: int
    losses: list[float | None] = field(default_factory=list)
    grad_norm: float | None = None
    sublayers: list[SublayerObservation] = field(default_factory=list)
    places: list[PlaceObservation] = field(default_factory=list)
    on_bound: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    skipped: int = 0
    own_logit: float | None = None
    seconds: float | None = None

    @property
    def everywhere(self) -> list[SublayerObservation | PlaceObservation]:
        """The sublayers, then the other places."""
        return [*self.sublayers, *self.places]

    @property
    def loss(self) -> float | None:
        return self.losses[-1] if self.losses else None
