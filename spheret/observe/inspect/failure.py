"""What went wrong in a run that diverged or collapsed, and what to try. The trainer's judge wrote the events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spheret.connections import SCHEMES, scheme
from spheret.observe.records import Event, EventKind
from spheret.observe.remedies import Advice, against_collapse, longer_warmup, lower_rate
from spheret.runs.metrics import MetricsRecord
from spheret.runs.run import Run

# the worst first
WORDS: dict[EventKind, str] = {
    "diverged": "It diverged",
    "not finite": "A value was not finite",
    "collapsed": "Its tokens collapsed into one direction",
}


@dataclass(frozen=True)
class Failure:
    """How a run failed: the event, the step and value of the lowest training loss until then, and what to try."""

    event: Event
    lowest: tuple[int, float] | None
    advice: tuple[Advice, ...]

    @property
    def sentence(self) -> str:
        text = f"{WORDS[self.event.kind]} at step {self.event.step}: {self.event.sentence.rstrip('.')}."
        if self.lowest is not None:
            text += f" The loss was lowest at step {self.lowest[0]}: {self.lowest[1]:.3f}."
        return text

    @property
    def what_to_try(self) -> str:
        numbered = (f"({number}) {each.flags}: {each.why}" for number, each in enumerate(self.advice, start=1))
        return " ".join(["What to try, in this order:", *numbered])


def failure_of(run: Run, lines: Sequence[MetricsRecord] | None = None) -> Failure | None:
    """How the run failed; None if it did not. lines: its metrics, if they were read before."""
    lines = run.metrics() if lines is None else lines
    for kind in WORDS:
        event = next((event for line in lines if (event := line.event(kind)) is not None), None)
        if event is not None:
            losses = [(each.loss, each.step) for each in lines if each.loss is not None and each.step <= event.step]
            lowest = min(losses, default=None)
            return Failure(event, lowest and (lowest[1], lowest[0]), tuple(_advice(run, event)))
    return None


def _advice(run: Run, event: Event) -> Iterator[Advice]:
    """What to try, from the run's settings and the event."""
    train = run.config.train
    if train is None:
        return
    model = run.model_config
    if event.kind == "collapsed":
        yield from against_collapse(model, train)
    else:
        yield lower_rate(train)
        yield from longer_warmup(train)
    if train.clip > 1:
        yield Advice("--set train.clip=1", f"the gradient is clipped to a norm of 1 instead of {train.clip:g}.")
    if event.kind == "diverged":
        yield from _by_measure(model.scheme, model.scheme_options, event)
    if event.kind == "not finite" and train.precision != "float32":
        yield Advice("--precision float32", f"numbers have more digits than in {train.precision}.")


def _by_measure(name: str, options: dict[str, Any], event: Event) -> Iterator[Advice]:
    """What helps against the change that the event names."""
    if name not in SCHEMES:
        return
    capped = "max_angle" in {field.name for field in fields(scheme(name, **options))}
    if capped and event.measured == "angle" and (event.now or 0.0) > max(event.before or 0.0, 0.5):
        yield Advice("--set max_angle=0.5", "no sublayer can then turn the stream by more than half a radian.")
    if not capped and event.measured == "norm factor":
        yield Advice(
            "--scheme proj-spheretnorm", f"the norm of the stream is constant there; with {name} it is not bounded."
        )
