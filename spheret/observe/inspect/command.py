"""`spheret inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spheret.connections import Scheme
from spheret.conversion import position, steps
from spheret.data import Data, refuse_output_among_text
from spheret.model.gpt import GPT
from spheret.observe.advice import own_logit_and_loss
from spheret.observe.inspect.opening import (
    boundary,
    float64_device,
    longest_window,
    open_data,
    open_model,
    open_run_or_model,
    open_text,
    validation_windows,
    with_first_tokens,
)
from spheret.observe.inspect.tables import bound_sentences, print_jacobians, print_sublayers, sentences
from spheret.observe.inspection import Inspection, Tick, inspect
from spheret.observe.jacobians import measure_jacobians
from spheret.observe.records import Event, EventKind
from spheret.observe.updates import float64_twin
from spheret.runs.layout import INSPECT
from spheret.runs.run import Run
from spheret.support import files
from spheret.support.documents import Document, Record
from spheret.support.machine import few_threads
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts

if TYPE_CHECKING:
    # importing the hub imports transformers, which takes seconds: a run does not need it
    from spheret.hub.open import SavedModel

# the Jacobians are taken at so many tokens of the first window, in which of other people's models there are fewer:
# their branches run once per token and direction
TOKENS, FEW = 8, 32


class InspectRecord(Record):
    """inspect.json: one model, or two."""

    runs: list[Inspection]
    format: str = "spheret-inspect"
    version: int = 2


INSPECTIONS = Document(InspectRecord, "inspect", "inspect the run again")


class Subject:
    """A model with the text that it is inspected on.

    Args:
        opened: a run or a saved model.
        step: the step of a run's checkpoint.
        windows: how many windows of text.
        data: other data than the run's.
        device: where the model goes.
    """

    def __init__(
        self, opened: Run | SavedModel, step: int | None, windows: int, data: str | None, device: str
    ) -> None:
        self.run = opened if isinstance(opened, Run) else None
        self.name, self.step, place = opened.name, step, float64_device(device)
        self.model: nn.Module
        self.data: Data
        if isinstance(opened, Run):
            self.model, saved = opened.load(step, place)
            self.step = saved.step
            check_finite(self.model, f"checkpoint step-{saved.step} of {opened.path}")
            self.data, block = open_data(opened, data), self.model.config.block
        else:
            self.model, self.data = open_model(opened, device), open_text(opened, data)
            block = longest_window(self.model)
        x, y = (ids.to(place) for ids in validation_windows(self.data, block, windows))
        self.x, self.y = (x, y) if isinstance(opened, Run) else with_first_tokens(opened, x, y)

    def inspect(self, quiet: bool = True) -> Inspection:
        """One observation of the model."""
        with Meter(f"inspect {self.name}", quiet) as meter:
            found = inspect(self.model, self.x, self.y, _counter(meter))
        found.name, found.checkpoint = self.name, self.step
        if self.run is None:
            if steps(self.model):
                config: Any = self.model.config
                found.scheme = f"{config.spheret['scheme']}, t = {position(self.model):g}"
            return found
        assert isinstance(self.model, GPT)
        found.scheme = self.model.config.scheme
        found.own_logit = own_logit_and_loss(self.model, self.x, self.y)[0]
        # of a run that began with weights of its own, at its first update
        first = next(iter(self.run.metrics()), None)
        found.start = None if first is None else first.start
        return found

    def print_jacobians(self, label: str) -> None:
        """Print the Jacobians at tokens that are spread over the first window, or why there are none."""
        tokens = self.x[:1] if self.run is not None else self.x[:1, :FEW]
        positions = torch.linspace(0, tokens.shape[1] - 1, TOKENS, device=tokens.device).long().unique()
        try:
            twin = float64_twin(self.model)
            with few_threads(_width(self.model)), Meter(f"Jacobians of {label}") as meter:
                kinds, measured, paper = measure_jacobians(twin, tokens, positions, _counter(meter))
        except ValueError as error:
            if self.run is not None:
                raise
            print(f"{label}: --jacobians: {error}")
            return
        origin = "" if self.step is None else f", step {self.step}"
        title = f"{label}{origin}: Jacobians at {len(positions)} tokens; each number is the worst token's"
        print_jacobians(title, kinds, measured, paper)
        for sentence in bound_sentences(measured, paper):
            print(f"{label}: {sentence}")


def _counter(meter: Meter) -> Tick:
    return lambda done, total: meter.show(f"{done} of {total} sublayers", done / total)


def _width(model: Any) -> int:
    return model.config.width if isinstance(model, GPT) else model.get_input_embeddings().embedding_dim


def check_finite(model: nn.Module, what: str) -> None:
    """Raise an error that names the first parameter with NaN or infinity. `what` names the model in the message."""
    for name, x in model.state_dict().items():
        if not x.isfinite().all():
            raise ValueError(
                f"{what} has NaN or infinity in {name}, so it cannot be inspected: take an earlier checkpoint."
            )


def inspect_command(
    run: str,
    other: str | None = None,
    /,
    step: int | None = None,
    windows: int = 8,
    data: str | None = None,
    device: str = "cpu",
    out: str | None = None,
    jacobians: bool = False,
) -> int:
    """Print the dynamics of a model's stream, or of two models side by side.

    Args:
        run: a run directory, into which inspect.json is written, or a saved transformers decoder.
        other: a second run or saved model to compare with the first.
        step: the step of a run's checkpoint; by default the newest.
        windows: how many windows of the validation split are examined.
        data: other data: a prepared directory, the name of a corpus, or text; for a saved model the default is sotu.
        device: cpu or cuda; cpu is the default because norms, ranks and angles are taken in float64.
        out: another directory to write to; for a saved model the default is runs/inspect-NAME.
        jacobians: also print the singular values of every sublayer's Jacobian at a few tokens, and the paper's
            bounds on them.
    """
    check_counts(windows=windows)
    check_counts(0, step=step)
    if out:
        files.check_output_directory("--out", Path(out).expanduser())
    opened = [open_run_or_model(path) for path in (run, other) if path is not None]
    runs = [one for one in opened if isinstance(one, Run)]
    if step is not None and not runs:
        raise ValueError(f"--step is a checkpoint of a run, and {run} holds one model: leave --step out.")
    for own in runs if jacobians else ():
        check_one_stream(own.model_config.build_scheme())
    directory = opened[0].path if isinstance(opened[0], Run) else Path("runs") / f"inspect-{opened[0].name}"
    directory = Path(out).expanduser() if out else directory
    files.check_results("--out" if out else "the output", directory, INSPECT)
    if data is not None:
        refuse_output_among_text(data, directory)
    with boundary(*opened):
        subjects = [Subject(one, step, windows, data, device) for one in opened]
        found = [subject.inspect(quiet=False) for subject in subjects]
        models = dict(zip(labels([each.name for each in found]), found, strict=True))
    directory.mkdir(parents=True, exist_ok=True)
    INSPECTIONS.write(directory / INSPECT, InspectRecord(runs=found))
    print_sublayers(models)
    for label, inspection in models.items():
        for sentence in sentences(inspection):
            print(f"{label}: {sentence}")
    for label, one in zip(models, opened, strict=True):
        event = failure_of(one) if isinstance(one, Run) else None
        if event is not None:
            print(f"{label}: {event.kind} at step {event.step}: {event.sentence}. What helps: {event.remedy}.")
    for label, subject in zip(models, subjects, strict=True) if jacobians else ():
        subject.print_jacobians(label)
    print(f"Wrote {directory / INSPECT}.")
    return 0


def failure_of(run: Run) -> Event | None:
    """The event of a run that diverged, met a value that is not finite, or collapsed: the first of the worst kind."""
    lines = run.metrics()
    kinds: tuple[EventKind, ...] = ("diverged", "not finite", "collapsed")
    events = (line.event(kind) for kind in kinds for line in lines)
    return next((event for event in events if event is not None), None)


def labels(names: list[str]) -> list[str]:
    """A label per model: its name, numbered where two have the same name."""
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, start=1)]


def check_one_stream(scheme: Scheme) -> None:
    """Raise an error unless the scheme has one stream, which a Jacobian needs."""
    if not scheme.one_stream:
        raise ValueError(
            f"--jacobians is for schemes with one stream, and {scheme.name} carries more than one: leave it out. "
            "spheret inspect measures the rest of any scheme."
        )
