"""What went wrong in a run that diverged or collapsed: the step, the sublayer, and what to try.

A pure function of a run directory. The guards of the trainer wrote what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spheret.analysis.remedies import Advice, against_collapse, longer_warmup, lower_rate
from spheret.connections import SCHEMES, scheme
from spheret.runs.metrics import MetricsRecord
from spheret.runs.run import Run

# what happened: how the words begin that tell it, and what the place is
WORDS = {
    "diverged": ("It diverged", "The sublayer that moved most"),
    "not finite": ("A value was not finite", "The first such value"),
    "collapsed": ("Its tokens collapsed into one direction", "Where they are closest"),
}
# what the guards write: a sublayer with its block, a sublayer by its number, or a value that is not finite
_SUBLAYER = re.compile(r"sublayer \d+ \((?:attention|MLP) of block \d+\)")
_NUMBERED = re.compile(r"after sublayer (\d+)")
_VALUE = re.compile(r"the (.+?) (?:is|are) not finite")
_TURNED = re.compile(r"turned the stream by (\S+) radians and now turns it by (\S+)")
NOWHERE = "no single sublayer: look at the embedding and the head"


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    what: "diverged", "not finite" or "collapsed".
    step: the step at which a guard saw it.
    place: the sublayer that moved most, or the first that was not finite, with its block.
    reason: the words of the guard.
    lowest: the step and the value of the lowest training loss until then; None if there was none.
    advice: what to try, the most promising first.
    """

    what: str
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
    for what, key in (("diverged", "diverged"), ("not finite", "stopped"), ("collapsed", "alarm")):
        line = next((line for line in lines if getattr(line, key)), None)
        if line is not None:
            step, reason = line.step, str(getattr(line, key)).rstrip(".")
            losses = [(each.loss, each.step) for each in lines if each.loss is not None]
            lowest = min((pair for pair in losses if pair[1] <= step), default=None)
            advice = tuple(_advice(run, what, reason))
            return Failure(what, step, _place(reason), reason, lowest and (lowest[1], lowest[0]), advice)
    return None


def _place(reason: str) -> str:
    if match := _SUBLAYER.search(reason):
        return match.group()
    if match := _NUMBERED.search(reason):
        number = int(match.group(1))
        return f"sublayer {number} ({'attention' if number % 2 else 'MLP'} of block {(number + 1) // 2})"
    if match := _VALUE.search(reason):
        return match.group(1)
    return "not known: the sublayers had not been measured before" if "no earlier record" in reason else NOWHERE


def _advice(run: Run, what: str, reason: str) -> Iterator[Advice]:
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
    if what != "collapsed":
        yield from _by_measure(model.scheme, model.scheme_options, reason)
    if what == "not finite" and train.precision != "float32":
        yield Advice("--precision float32", f"numbers have more digits than in {train.precision}.")


def _by_measure(name: str, options: dict[str, Any], reason: str) -> Iterator[Advice]:
    """What helps against the change that the guard named."""
    if name not in SCHEMES:
        return
    capped = "max_angle" in {field.name for field in fields(scheme(name, **options))}
    turned = _TURNED.search(reason)
    if capped and turned and float(turned.group(2)) > max(float(turned.group(1)), 0.5):
        yield Advice("--set max_angle=0.5", "no sublayer can then turn the stream by more than half a radian.")
    if not capped and "norm of the stream" in reason:
        yield Advice(
            "--scheme proj-spheretnorm", f"the norm of the stream is constant there; with {name} it is not bounded."
        )
