"""`convert` and `revert`: put the residual stream of anyone's model on a sphere, in place, and take it off again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from spheret.bounds import inverse_softplus
from spheret.conversion import attach as attaching
from spheret.conversion.checks import Start, check_model, spherical_scheme
from spheret.conversion.fit import Observations, fitted_alpha, fitted_radius
from spheret.conversion.inputs import call
from spheret.conversion.inputs import example_inputs as made_inputs
from spheret.conversion.plan import ConversionError, ConversionPlan, make_plan
from spheret.conversion.report import ConversionReport, ConvertedSublayer
from spheret.conversion.schedule import anneal
from spheret.conversion.steps import Step
from spheret.conversion.trace import trace_call
from spheret.conversion.verify import Comparison, outputs
from spheret.retractions import Retraction

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
    inputs = made_inputs(model) if example_inputs is None else example_inputs
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        plan, comparison = _planned(model, inputs, example_inputs is None)
        try:
            stacks = attaching.attach(model, plan, chosen)
            observations = _verified(model, inputs, comparison, batches)
            _set(stacks, observations, start, "radius" not in options)
            _set_leaves(model, observations, start)
            anneal(model, 0.0 if start == "exact" else 1.0)
            named = _plain_options(options)
            if hasattr(getattr(model, "config", None), "to_dict"):
                setattr(model.config, attaching.NAME, {"scheme": scheme, "start": start, "options": named})
        except BaseException:
            attaching.detach(model)
            raise
    finally:
        for module, mode in training.items():
            module.training = mode
    attaching.follow_hosts(model)
    examples = "the example alone" if batches is None else "the given batches"
    examples = "random inputs: give batches" if batches is None and example_inputs is None else examples
    return model, _report(model, scheme, start, plan, stacks, observations, comparison.difference, examples)


def revert(model: Model) -> Model:
    """Take a conversion back, in place: hooks, step sizes and config entry go, and the weights were never touched.

    Args:
        model: a model that `convert` has converted.
    """
    if not attaching.steps(model):
        raise ValueError(f"this {type(model).__name__} is not converted, so there is nothing to revert.")
    attaching.detach(model)
    return model


def _planned(model: nn.Module, inputs: Any, made: bool) -> tuple[ConversionPlan, Comparison]:
    """The plan of the model, and what it computes before the conversion."""
    try:
        trace, output = trace_call(model, lambda: call(model, inputs), keeps_values=True)
    except Exception as error:
        whose = "the inputs that convert made up; give example_inputs" if made else "the given example_inputs"
        raise ConversionError(
            f"the trial forward pass of {type(model).__name__} failed with {whose}. {_failure(model, error)}"
        ) from error
    plan = make_plan(model, trace)
    if not plan.chains:
        looked_at = "".join(f" {where}: {why}." for where, why in plan.left[:1])
        raise ConversionError(
            f"{type(model).__name__} has no residual sum h + f of a stream and a module's output: nothing to "
            f"convert.{looked_at}"
        )
    return plan, Comparison(model, trace, plan, outputs(output))


def _failure(model: nn.Module, error: Exception) -> str:
    """For people: the innermost module of the model that was running, and the error."""
    own = {name: module for name, module in model.named_modules() if name and attaching.NAME not in name.split(".")}
    names = {id(module): name for name, module in own.items()}
    inner, trace = "the model's own code", error.__traceback__
    while trace is not None:
        inner = names.get(id(trace.tb_frame.f_locals.get("self")), inner)
        trace = trace.tb_next
    return f"In {inner}: {type(error).__name__}: {str(error).rstrip('.')}."


def _verified(model: nn.Module, inputs: Any, comparison: Comparison, batches: Iterable[Any] | None) -> Observations:
    """Run the model at t = 0 on the example and the batches, and compare the example with the original."""
    anneal(model, 0.0)
    observations = Observations()
    try:
        with attaching.watched(model, observations.add), comparison.watching(), torch.no_grad():
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
        with attaching.watched(model, observations.add), torch.no_grad():
            for batch in batches:
                call(model, batch)
        if not observations.sums:
            raise ConversionError("batches is empty: give at least one batch, or leave it out.")
    return observations


@torch.no_grad()
def _set(stacks: dict[str, list[Step]], observations: Observations, start: Start, fit_radius: bool) -> None:
    """Set radii, units and lengths from what was observed."""
    if start == "plain":
        return
    for steps in stacks.values():
        enter, dim = steps[0].entry_norm, steps[0].connection.dim
        assert enter is not None
        observed = radius = enter.radius_value()
        if fit_radius:
            radius = fitted_radius([observations.of(step) for step in steps], dim)
            nn.init.constant_(enter.gamma, inverse_softplus(radius))
        for step in steps:
            sums = observations.of(step)
            alpha = step.connection.alpha
            assert alpha is not None
            step.unit.fill_(fitted_alpha(sums, radius, observed) / float(alpha))
            step.length.fill_(math.exp(sums.mean(sums.log_length)) / radius)


@torch.no_grad()
def _set_leaves(model: nn.Module, observations: Observations, start: Start) -> None:
    """Set the lengths where the streams leave: those after the last step of each."""
    if start == "plain":
        return
    last: dict[int, Step] = {}
    for position in attaching.positions(model):
        if isinstance(position, Step):
            last[id(position.channel)] = position
    for position in attaching.positions(model):
        if not isinstance(position, Step):
            step = last[id(position.channel)]
            sums = observations.of(step)
            position.length.fill_(math.exp(sums.mean(sums.log_next_length)) / float(step.radius))


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as JSON can hold them."""
    return {name: value.name if isinstance(value, Retraction) else value for name, value in options.items()}


def _report(
    model: nn.Module,
    scheme: str,
    start: Start,
    plan: ConversionPlan,
    stacks: dict[str, list[Step]],
    observations: Observations,
    difference: float,
    examples: str,
) -> ConversionReport:
    rows = []
    for stack, sums_of_stack in plan.stacks().items():
        for number, (residual, step) in enumerate(zip(sums_of_stack, stacks[stack], strict=True), start=1):
            sums = observations.of(step)
            rows.append(
                ConvertedSublayer(
                    name=residual.name,
                    readers=tuple(reader.module for reader in residual.readers),
                    kind=residual.kind,
                    stack=stack,
                    sublayer=number,
                    alpha=float(step.alpha.detach()),
                    radius=float(step.radius.detach()),
                    mean_angle=sums.mean(sums.angle),
                    rows=sums.rows,
                    beyond_half_turn=sums.beyond_half_turn,
                    beyond_reach=sums.beyond_reach,
                )
            )
    added = sum(p.numel() for step in attaching.steps(model) for p in step.parameters())
    return ConversionReport(
        type(model).__name__, scheme, start, tuple(rows), tuple(plan.left), difference, examples, added
    )
