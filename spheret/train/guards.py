"""Guards of `spheret train`: a warning before the first update, and the first sublayer that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spheret.analysis.remedies import Advice
from spheret.model.gpt import GPT
from spheret.model.monitor import HIGH_OWN_LOGIT, keeps_its_norm
from spheret.model.probes import Sublayer, probe, sublayer_name
from spheret.runs.metrics import EventRecord, NotFinite, StartRecord
from spheret.support.sharding import local
from spheret.train.distributed import World
from spheret.watching.losses import LossGuard
from spheret.watching.observations import Finding

# nats; of bytes of English they are worth 2.5
HIGH_FREQUENCIES = 0.5


class NonFinite(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. The event and the message say where it began."""

    def __init__(self, event: EventRecord) -> None:
        super().__init__(_not_finite_sentence(event))
        self.event = event


def _not_finite_sentence(event: EventRecord) -> str:
    if event.measured == "gradient norm":
        return "run again, every sublayer's output and gradient is finite: the norm of the whole gradient overflowed"
    if event.measured == "loss":
        return "the loss is not finite, though every sublayer's output is"
    if event.measured == "weights":
        return f"the weights {event.parameter} are not finite"
    if event.sublayer is None:
        return f"the gradient of {event.parameter} is not finite"
    at = "at" if event.measured == "gradient" else "of"
    return f"the {event.measured} {at} {sublayer_name(event.sublayer)} is not finite"


def collapse_sentence(guard: LossGuard, finding: Finding, advice: Iterable[Advice]) -> str:
    """What the alarm says, with the flags that may help."""
    sentence = guard.collapse_sentence(finding, sublayer_name)
    return f"{sentence}; what helps, the most promising first: {_flags(advice)}"


def _flags(advice: Iterable[Advice]) -> str:
    return ", ".join(each.flags for each in advice)


def start_warning(model: GPT, start: StartRecord, entropy: float | None, advice: Sequence[Advice]) -> str | None:
    """What to know before the first update about a stream of constant norm: docs/collapse.md.

    entropy: that of the token frequencies, if it is known.
    """
    own, loss, reasons = start.own_logit, start.loss, []
    if not keeps_its_norm(model) or own is None or loss is None:
        return None
    if model.config.head == "tied" and own >= HIGH_OWN_LOGIT:
        reasons.append(
            f"the model starts by predicting the current token, because its head is the transposed embedding: the "
            f"token's own logit is {own:.1f} above the mean, and the loss {loss:.2f} is {loss - start.expected:.2f} "
            f"above that of a model that knows nothing"
        )
    if entropy is not None and start.expected - entropy >= HIGH_FREQUENCIES:
        reasons.append(
            f"the stream has to carry the token frequencies, which are worth {start.expected - entropy:.2f} nats, "
            "because the head has no bias that starts at them"
        )
    if not reasons:
        return None
    return (
        f"{'; and '.join(reasons)}. Training then moves all tokens in one direction first, and a stream of constant "
        f"norm may stay collapsed there. What helps, the most promising first: {_flags(advice)}. docs/collapse.md "
        "explains it"
    )


def _finite(x: Tensor) -> bool:
    return bool(local(x).isfinite().all())


def _bad_weights(model: torch.nn.Module, world: World) -> EventRecord | None:
    bad = next((name for name, p in model.named_parameters() if not _finite(p.detach())), None)
    name = next((name for name in world.gather(bad) if name), None)
    return None if name is None else EventRecord(kind="not finite", parameter=name, measured="weights")


def find_non_finite(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: Callable[[], AbstractContextManager[Any]],
    world: World,
) -> EventRecord:
    """Run the batches of an update again and find the first value that is not finite, in the order of computing."""
    bad_weights = _bad_weights(model, world)
    if bad_weights is not None:
        return bad_weights
    for x, y in batches:
        problems: list[EventRecord] = []

        def check(measured: NotFinite, value: Tensor, number: int, problems: list[EventRecord] = problems) -> None:
            if not _finite(value):
                problems.append(EventRecord(kind="not finite", sublayer=number, measured=measured))

        def watch(sublayer: Sublayer, check: Callable[[NotFinite, Tensor, int], None] = check) -> None:
            number = sublayer.number
            check("branch", sublayer.f, number)
            check("output", sublayer.out, number)
            for x in tree_leaves(sublayer.next_state):
                if x.requires_grad:
                    x.register_hook(lambda gradient: check("gradient", gradient, number))

        model.zero_grad(set_to_none=True)
        with probe(model, watch):
            with precision():
                loss = model(x, y)
            if not problems and not _finite(loss):
                problems.append(EventRecord(kind="not finite", measured="loss"))
            if not world.any(bool(problems)):
                loss.backward()
        if not problems:
            grads = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            bad = next((name for name, grad in grads if not _finite(grad)), None)
            if bad is not None:
                problems.append(EventRecord(kind="not finite", parameter=bad, measured="gradient"))
        # the first process that has a problem reports it
        first = next((each[0] for each in world.gather(problems) if each), None)
        if first is not None:
            return first
    return EventRecord(kind="not finite", measured="gradient norm")


def finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def check_weights(model: torch.nn.Module, world: World) -> None:
    """Raise if a weight is NaN or infinite: such a model is never saved."""
    bad = _bad_weights(model, world)
    if bad is not None:
        raise NonFinite(bad)
