"""The records of what is seen inside a model: one per thing, in memory and in files.

`watch.jsonl` holds a `Header`, then one `Observation` per line; `metrics.jsonl` and `inspect.json` hold
`SublayerObservation`s and `Event`s. The core imports only torch and numpy, so these are plain dataclasses. They have
slots, because msgspec writes a dataclass without slots without its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# what the sublayers were found by: modules of spheret, sums in the code of the model, or neither
Found = Literal["connections", "residual sums", "parameters only"]
EventKind = Literal[
    "not finite", "spike", "diverged", "collapsed", "dead", "constant", "growth", "attention", "expert",
    "exploding", "rate", "decay", "no gradient", "no update", "not zeroed", "plateau", "head",
]  # fmt: skip
Level = Literal["alarm", "warning"]
# what changed in the sublayer that moved most before a divergence
Moved = Literal["angle", "gradient share", "norm factor"]
# the first value that was not finite
NotFinite = Literal["weights", "branch", "output", "loss", "gradient", "gradient norm"]
Measure = Moved | NotFinite | Literal["cosine", "update", "attention logit", "size"]


@dataclass(slots=True)
class SublayerName:
    """A sublayer: its number from 1 on, and the module that ends its branch."""

    sublayer: int
    name: str
    branch: str


@dataclass(slots=True)
class SublayerObservation:
    """One sublayer at one step. None: not measured, or not finite.

    Args:
        sublayer: its number, from 1 on.
        branch: "attention", "mlp", "parallel" or "other".
        module: the name of the module that ends the branch.
        norm: the mean length of the stream behind it.
        growth: by what factor it changed that length.
        drift: by how much the length of a state behind it differs from that before the first sublayer, as a share of
            the latter: the largest over the tokens.
        angle_mean: by what angle it turned the stream, in radians, on average over the tokens.
        angle_max: the largest such angle.
        moved: how far the branch moved the stream, as a share of its length: the median over the tokens.
        moved_max: the largest such share.
        size: how far the branch moved the stream, as a length: the mean over the tokens.
        inactive: whether the branch moves no token.
        cosine: the mean cosine between tokens behind it.
        update_cosine: the mean cosine between its change of the stream and the previous sublayer's.
        effective_rank: exp of the entropy of the normalised singular values of the states behind it.
        common_stream: the share of the direction that all tokens have in common, in the stream behind it.
        common_output: the same in the branch's output.
        massive: the largest activation over the median one.
        sink: the mean attention to the first token, where weights are to be had.
        sink_heads: the same for each head.
        attention_logit: the largest logit of its attention in one sequence.
        alpha: the step size, if the connection has one.
        stream_cosine: of several streams per token, the mean cosine between two of them, behind the sublayer.
        mix_from_identity: how far the matrix that mixes n streams is from the identity, as the Frobenius norm of the
            difference over sqrt(n).
        mix_from_uniform: the same, from the matrix whose entries are all 1/n.
        mix_saturation: the largest entry of each of its rows over the row's sum of magnitudes, on average: 1 where
            each stream takes one other, 1/n where it takes all alike.
        mix_gain: the largest singular value of the product of these matrices up to this sublayer.
        grad_norm: the norm of the gradient of all its weights.
        experts: how many of its experts have a gradient, if it has experts.
        stream_grad_norm: the norm of the gradient with respect to the state before it.
        update: the norm of the last change of its weights over their own norm.
        shrunk: by what share the last update shortened its weights.
        removal: by how much the loss rises without it.
    """

    sublayer: int
    branch: str | None = None
    module: str | None = None
    norm: float | None = None
    growth: float | None = None
    drift: float | None = None
    angle_mean: float | None = None
    angle_max: float | None = None
    moved: float | None = None
    moved_max: float | None = None
    size: float | None = None
    inactive: bool | None = None
    cosine: float | None = None
    update_cosine: float | None = None
    effective_rank: float | None = None
    common_stream: float | None = None
    common_output: float | None = None
    massive: float | None = None
    sink: float | None = None
    sink_heads: list[float | None] | None = None
    attention_logit: float | None = None
    alpha: float | None = None
    stream_cosine: float | None = None
    mix_from_identity: float | None = None
    mix_from_uniform: float | None = None
    mix_saturation: float | None = None
    mix_gain: float | None = None
    grad_norm: float | None = None
    experts: int | None = None
    stream_grad_norm: float | None = None
    update: float | None = None
    shrunk: float | None = None
    removal: float | None = None


@dataclass(slots=True)
class PlaceObservation:
    """Weights outside of the sublayers, such as an embedding; without sublayers, every layer."""

    name: str
    grad_norm: float | None = None
    update: float | None = None
    shrunk: float | None = None
    experts: int | None = None


@dataclass(slots=True)
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
        parameter: the name of the parameter, if it is one.
        measured: the measure that gave it away.
        before: its value when all was well, at step `since` if that is known.
        now: its value now.
        since: the step of `before`.
    """

    kind: EventKind
    step: int
    where: str
    sentence: str
    remedy: str = ""
    level: Level = "alarm"
    sublayer: int | None = None
    parameter: str | None = None
    measured: Measure | None = None
    before: float | None = None
    now: float | None = None
    since: int | None = None


@dataclass(slots=True)
class Start:
    """The untrained model on fixed tokens: the logit of the token itself above the mean logit, and the loss.

    expected: the loss of a model that knows nothing: ln(vocabulary), or the unigram entropy if its head's bias starts
        at the token frequencies.
    """

    own_logit: float | None
    loss: float | None
    expected: float

    @property
    def distance(self) -> str:
        """How far the loss is from the expected one, in words."""
        assert self.loss is not None
        side = "above" if self.loss >= self.expected else "below"
        return f"{abs(self.loss - self.expected):.2f} {side} the loss of a model that knows nothing"


@dataclass(slots=True)
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
    version: int = 2


@dataclass(slots=True)
class Observation:
    """One watched step.

    Args:
        step: the update.
        losses: the losses of the steps since the last observation, this one last; None where a loss was not finite.
        grad_norm: the norm of the whole gradient.
        sublayers: what was seen at each sublayer.
        places: what was seen at the weights outside of the sublayers.
        on_bound: the names of learned scalars that have reached a bound.
        events: what was said since the last observation.
        own_logit: at the first step, the logit of the current token above the mean logit, if the head is tied.
        zeroed: whether the gradients of the step before were set to zero.
        rate: the largest learning rate of the optimisers that have been seen to update the model.
        seconds: since the watch began.
    """

    step: int
    losses: list[float | None] = field(default_factory=list)
    grad_norm: float | None = None
    sublayers: list[SublayerObservation] = field(default_factory=list)
    places: list[PlaceObservation] = field(default_factory=list)
    on_bound: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    own_logit: float | None = None
    zeroed: bool = True
    rate: float | None = None
    seconds: float | None = None

    @property
    def everywhere(self) -> list[SublayerObservation | PlaceObservation]:
        """The sublayers, then the other places."""
        return [*self.sublayers, *self.places]
