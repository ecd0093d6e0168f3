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

    norm: the mean |h| behind it; growth: by what factor it changed it.
    angle_mean, angle_max: by what angle it turned the stream, in radians.
    moved, moved_max: the median and the largest over the tokens of how far the branch moved the stream, as a share of
        its length.
    cosine: the mean cosine between tokens behind it.
    common_stream, common_output, common_gradient: the share of the common direction, see `common_share` and
        `common_gradient_share`, in the stream behind it, in the branch's output and in the gradient of the matrix
        that writes to the stream.
    massive: the largest activation over the median one; first_token: the first tokens' norm over the mean.
    sink: the mean attention to the first token, where weights are to be had.
    alpha: the step size, if the connection has one.
    grad_norm: of all its weights; update: the norm of their last change over their own norm.
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

    where: the name of a module or of a parameter, "the batch" or "the model".
    measured, before, now: the measure that gave it away, when all was well and now.
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

    losses: those of the steps since the last observation, this one last; None where a loss was not finite.
    grad_norm: of the whole gradient.
    skipped: how many updates were skipped so far.
    own_logit: at the first step, the logit of the current token above the mean logit, if the head is tied.
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
