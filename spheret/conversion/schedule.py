"""The way from the exact start to the scheme: t from 0 to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from spheret.conversion.attach import positions
from spheret.support.errors import need

if TYPE_CHECKING:
    from transformers import TrainerCallback


def anneal(model: nn.Module, t: float) -> None:
    """Move a converted model to position t: 0 computes what the original computes, 1 is the scheme.

    The model may be wrapped, e.g. by DDP, PEFT or torch.compile.
    """
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= 1:
        raise ValueError(f"t must be a number from 0, the original, to 1, the scheme, got {t!r}.")
    for position in _positions(model):
        position.anneal(float(t))


def position(model: nn.Module) -> float:
    """The position t of a converted model, read anew at every place."""
    found = _positions(model)
    for place in found:
        place.read_way()
    return float(found[0].t)


def _positions(model: nn.Module) -> list[Any]:
    found = positions(model)
    if not found:
        raise ValueError(f"this {type(model).__name__} is not converted: call spheret.convert(model) first.")
    return found


class Annealing:
    """Moves t linearly from 0 to 1 over `steps` calls of `step`, after `wait` calls at 0.

    A model that is on its way, e.g. one that was loaded, goes on from its own t, and one that is at 1 stays there.
    Call `step` after the optimiser's.
    """

    def __init__(self, model: nn.Module, steps: int, wait: int = 0):
        for name, value, least in (("steps", steps, 1), ("wait", wait, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
        self.model, self.steps, self.wait = model, steps, wait
        t = position(model)
        self.done = wait + round(t * steps) if t > 0 else 0

    @property
    def t(self) -> float:
        return min(max((self.done - self.wait) / self.steps, 0.0), 1.0)

    def set(self, done: int) -> None:
        """Go to where `done` steps lead, e.g. when training resumes."""
        self.done = done
        anneal(self.model, self.t)

    def step(self) -> None:
        before = self.t
        self.done += 1
        if self.t != before:
            anneal(self.model, self.t)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.set(state["done"])


def trainer_callback(steps: int, wait: int = 0) -> TrainerCallback:
    """A transformers TrainerCallback that anneals the Trainer's model over `steps` optimiser steps.

    It goes by the Trainer's own count of steps, so a resumed training goes on where it was. A model whose t is not
    that of the count, e.g. one that was annealed before, goes on from its own t.
    """
    transformers = need("transformers", "hub")

    class AnnealingCallback(transformers.TrainerCallback):  # type: ignore[name-defined]
        """Moves the position t of a converted model."""

        schedule: Annealing | None = None
        # how far the model was when the Trainer's count was 0
        ahead = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            schedule = self.schedule = Annealing(model, steps, wait)
            own, t = schedule.done, schedule.t
            schedule.done = state.global_step
            # the count alone knows how long t = 0 and t = 1 have lasted
            self.ahead = 0 if schedule.t == t else own - state.global_step
            schedule.set(state.global_step + self.ahead)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert self.schedule is not None
            self.schedule.set(state.global_step + self.ahead)

    callback: TrainerCallback = AnnealingCallback()
    return callback
