"""What went wrong in a run that diverged or collapsed: the step, the sublayer, and what to try.

A pure function of a run directory. The guards of the trainer wrote what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spheret.analysis.remedies import Advice, against_collapse, longer_warmup, lower_rate
from spheret.connections import SCHEMES, scheme
from spheret.model.probes import sublayer_name
from spheret.runs.metrics import EventKind, EventRecord, MetricsRecord
from spheret.runs.run import Run

# what happened: how the words begin that tell it, and what the place is
WORDS = {
    "diverged": ("It diverged", "The sublayer that moved most"),
    "not finite": ("A value was not finite", "The first such value"),
    "collapsed": ("Its tokens collapsed into one direction", "Where they are closest"),
}
# which key of a line says that it happened, the worst first
_KEYS: dict[EventKind, str] = {"diverged": "diverged", "not finite": "stopped", "collapsed": "alarm"}


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    what: "diverged", "not finite" or "collapsed".
    step: the step at which a guard saw it.
    place: the sublayer that moved most, or the first that was not finite, with its block; "not recorded" in runs of
        older versions.
    reason: the words of the guard.
    lowest: the step and the value of the lowest training loss until then; None if there was none.
    advice: what to try, the most promising first.
    """

    what: EventKind
    step: int
    place: str
    reason: str
    lowest: tuple[int, float] | None
    advice: tuple[Advice, ...]

    @property
    def sentence(self) -> str:
        before = (
            "" if self.lowest is None else f" The loss was lowest at step {self.lowest[0]}: {self.lowest[1]:.3f}."
        )
        happened, place = WORDS[self.what]
        return f"{happened} at step {self.step}. {place}: {self.place}.{before} The guard wrote: {self.reason}."

    @property
    def what_to_try(self) -> str:
        numbered = (f"({number}) {each.flags}: {each.why}" for number, each in enumerate(self.advice, start=1))
        return " ".join(["What to try, in this order:", *numbered])


def failure_of(run: Run, lines: Sequence[MetricsRecord] | None = None) -> Failure | None:
    """How the run failed; None if it did not. lines: its metrics, if they were read before."""
    lines = run.metrics() if lines is None else lines
    for what, key in _KEYS.items():
        line = next((line for line in lines if getattr(line, key)), None)
        if line is not None:
            step, reason = line.step, str(getattr(line, key)).rstrip(".")
            losses = [(each.loss, each.step) for each in lines if each.loss is not None]
            lowest = min((pair for pair in losses if pair[1] <= step), default=None)
            event = line.event(what)
            advice = tuple(_advice(run, what, event))
            return Failure(what, step, _place(event), reason, lowest and (lowest[1], lowest[0]), advice)
    return None


def _place(event: EventRecord | None) -> str:
    if event is None:
        return "not recorded"
    if event.sublayer is not None:
        return sublayer_name(event.sublayer)
    if event.parameter is not None:
        return f"the {event.measured} of {event.parameter}"
    if event.kind == "not finite":
        return "the norm of the whole gradient" if event.measured == "gradient norm" else f"the {event.measured}"
    if event.since is None:
        return "not known: the sublayers had not been measured before"
    return "no single sublayer: look at the embedding and the head"


def _advice(run: Run, what: EventKind, event: EventRecord | None) -> Iterator[Advice]:
    """What to try, from what the run's settings and the guard say."""
    train = run.config.train
    if train is None:
        return
    model = run.model_config
    if what == "collapsed":
        yield from against_collapse(model, train)
    else:
        yield lower_rate(train)
        yield from longer_warmup(train)
    if train.clip > 1:
        yield Advice("--clip 1", f"the gradient is clipped to a norm of 1 instead of {train.clip:g}.")
    if what == "diverged" and event is not None:
        yield from _by_measure(model.scheme, model.scheme_options, event)
    if what == "not finite" and train.precision != "float32":
        yield Advice("--precision float32", f"numbers have more digits than in {train.precision}.")


def _by_measure(name: str, options: dict[str, Any], event: EventRecord) -> Iterator[Advice]:
    """What helps against the change that the guard named."""
    if name not in SCHEMES:
        return
    capped = "max_angle" in {field.name for field in fields(scheme(name, **options))}
    if capped and event.measured == "angle" and (event.now or 0.0) > max(event.before or 0.0, 0.5):
        yield Advice("--set max_angle=0.5", "no sublayer can then turn the stream by more than half a radian.")
    if not capped and event.measured == "norm factor":
        yield Advice(
            "--scheme proj-spheretnorm", f"the norm of the stream is constant there; with {name} it is not bounded."
        )
