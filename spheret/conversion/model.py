"""`convert` puts the residual stream of a model on a sphere, `anneal` leads to the scheme, `revert` undoes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from spheret.conversion import attach as attaching
from spheret.conversion.checks import (
    Comparison,
    Start,
    check_gains,
    check_model,
    copied_outputs,
    skips_layers,
    spherical_scheme,
)
from spheret.conversion.plan import ConversionError, ConversionPlan, make_plan
from spheret.conversion.report import ConversionReport, Observations
from spheret.conversion.steps import ReadPoint
from spheret.conversion.trace import call, random_inputs, trace_call, undisturbed
from spheret.retractions import Retraction
from spheret.support.errors import need
from spheret.support.ranges import check_count

if TYPE_CHECKING:
    from transformers import TrainerCallback

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    scheme: str = "proj-spheretnorm",
    start: Start = "exact",
    *,
    example_inputs: Any = None,
    batches: Iterable[Any] | None = None,
    **options: Any,
) -> tuple[Model, ConversionReport]:
    """Put the residual stream of a model on a sphere, in place. Returns the model and a report.

    It raises ConversionError, and leaves the model as it was, if the model has a residual of an unknown kind.

    Args:
        model: any module with residual sums h + f: a transformers, torch or timm model, or one of your own.
        scheme: the name of a spherical scheme of SCHEMES.
        start: "exact" computes what the original computes, and `conversion.anneal` leads from there to the scheme;
            "calibrated" is the scheme with radius and step sizes fitted to the original; "plain" is the scheme as it
            is.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments for the trial forward pass.
            Random ones are made for transformers, torch and timm models.
        batches: inputs like `example_inputs`, on which radius and step sizes are fitted; by default the example
            alone.
        options: the options of the scheme.
    """
    chosen = spherical_scheme(scheme, start, options)
    check_model(model)
    inputs = random_inputs(model) if example_inputs is None else example_inputs
    if inputs is None:
        raise ConversionError(
            f"{type(model).__name__} does not say what it takes, and convert needs one trial forward pass: give "
            "example_inputs, a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    training = {module: module.training for module in model.modules()}
    size = sum(p.numel() for p in model.parameters())
    try:
        model.eval()
        plan, comparison = _planned(model, inputs, example_inputs is None)
        try:
            stacks = attaching.attach(model, plan, chosen)
            observations = _verified(model, inputs, comparison, batches)
            if start != "plain":
                observations.fit(model, stacks, fit_radius="radius" not in options)
            anneal(model, 0.0 if start == "exact" else 1.0)
            # as JSON can hold them
            named = {name: value.name if isinstance(value, Retraction) else value for name, value in options.items()}
            if hasattr(getattr(model, "config", None), "to_dict"):
                setattr(model.config, attaching.NAME, {"scheme": scheme, "start": start, "options": named})
        except BaseException:
            attaching.detach(model)
            raise
    finally:
        for module, mode in training.items():
            module.training = mode
    attaching.follow_hosts(model)
    examples = "only the example" if batches is None else "the given batches"
    examples = "random inputs: give batches" if batches is None and example_inputs is None else examples
    return model, ConversionReport(
        model=type(model).__name__,
        scheme=scheme,
        start=start,
        converted=tuple(observations.sublayers(plan, stacks)),
        left=tuple(plan.left),
        difference=comparison.difference,
        examples=examples,
        added_parameters=sum(p.numel() for p in model.parameters()) - size,
    )


def revert(model: Model) -> Model:
    """Take a conversion back, in place: hooks, step sizes and config entry go, and the weights were never touched.

    Args:
        model: a model that `convert` has converted.
    """
    if not attaching.steps(model):
        raise ValueError(f"this {type(model).__name__} is not converted, so there is nothing to revert.")
    attaching.detach(model)
    return model


def anneal(model: nn.Module, t: float) -> None:
    """Move a converted model to position t: 0 computes what the original computes, 1 is the scheme.

    The model may be wrapped, e.g. by DDP, PEFT or torch.compile.
    """
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= 1:
        raise ValueError(f"t must be a number from 0, the original, to 1, the scheme, got {t!r}.")
    for point in _points(model):
        point.anneal(float(t))


def position(model: nn.Module) -> float:
    """The position t of a converted model, read anew at every point of its streams."""
    points = _points(model)
    for point in points:
        point.read_t()
    return float(points[0].t)


def _points(model: nn.Module) -> list[ReadPoint]:
    points = attaching.read_points(model)
    if not points:
        raise ValueError(f"this {type(model).__name__} is not converted: call spheret.convert(model) first.")
    return points


def _planned(model: nn.Module, inputs: Any, made: bool) -> tuple[ConversionPlan, Comparison]:
    """The plan of the model, and what it computes before the conversion. made: whether the inputs are random."""
    try:
        trace, output = trace_call(model, lambda: call(model, inputs), keeps_values=True)
    except Exception as error:
        whose = "the inputs that convert made up; give example_inputs" if made else "the given example_inputs"
        raise ConversionError(
            f"the trial forward pass of {type(model).__name__} failed with {whose}. {_failure(model, error)}"
        ) from error
    plan = make_plan(model, trace)
    check_gains(model, plan)
    plan.skips = skips_layers(model, inputs, plan)
    if not plan.chains:
        looked_at = "".join(f" {where}: {why}." for where, why in plan.left[:1])
        raise ConversionError(
            f"{type(model).__name__} has no residual sum h + f of a stream and a module's output: nothing to "
            f"convert.{looked_at}"
        )
    return plan, Comparison(model, trace, plan, copied_outputs(output))


def _failure(model: nn.Module, error: Exception) -> str:
    """For people: the innermost module of the model that was running, and the error."""
    own = {name: module for name, module in model.named_modules() if name and attaching.NAME not in name.split(".")}
    names = {id(module): name for name, module in own.items()}
    inner, trace = "the model's own code", error.__traceback__
    while trace is not None:
        inner = names.get(id(trace.tb_frame.f_locals.get("self")), inner)
        trace = trace.tb_next
    return f"In {inner}: {type(error).__name__}: {str(error).rstrip('.')}."


@torch.no_grad()
def _verified(model: nn.Module, inputs: Any, comparison: Comparison, batches: Iterable[Any] | None) -> Observations:
    """Compare the converted model with the original on the example, and observe its sublayers on the batches."""
    anneal(model, 0.0)
    observations = Observations()
    try:
        watched = attaching.watched(model, observations.add)
        with undisturbed(model), attaching.checking(model), watched, comparison.watching():
            output = call(model, inputs)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"the converted {type(model).__name__} fails on the inputs that the original takes, so its residual sums "
            f"are of an unknown kind. It was reverted. {_failure(model, error)}"
        ) from error
    comparison.check_outputs(output)
    if batches is not None:
        # the example only checks; the batches count
        observations.sums.clear()
        with attaching.watched(model, observations.add):
            for batch in batches:
                with undisturbed(model):
                    call(model, batch)
        if not observations.sums:
            raise ConversionError("batches is empty: give at least one batch, or leave it out.")
    return observations


class Annealing:
    """Moves t linearly from 0 to 1 over `steps` calls of `step`.

    A model that is on its way, e.g. one that was loaded, resumes from its own t, and one that is at 1 stays there.
    Call `step` after the optimiser's.
    """

    def __init__(self, model: nn.Module, steps: int):
        self.model, self.steps = model, check_count("steps", steps)
        self.done = round(position(model) * steps)

    @property
    def t(self) -> float:
        return min(max(self.done / self.steps, 0.0), 1.0)

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


def trainer_callback(steps: int) -> TrainerCallback:
    """A TrainerCallback of transformers that anneals the model over `steps` optimiser steps, as `Annealing`."""
    transformers = need("transformers", "hub")

    class AnnealingCallback(transformers.TrainerCallback):  # type: ignore[name-defined]
        """Moves the position t of a converted model."""

        schedule: Annealing

        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            self.schedule = Annealing(model, steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.schedule.step()

    callback: TrainerCallback = AnnealingCallback()
    return callback
