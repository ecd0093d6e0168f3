"""The sections that need the run directories: what was run, the training, and the stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spheret.lab.page.section import Section
from spheret.lab.runs import RATE_SETTINGS, Result, RunGroup
from spheret.lab.sections.charts import (
    LOSS,
    MOST_POINTS,
    Points,
    contestant_lines,
    later_range,
    line_styles,
    on_scale,
)
from spheret.runs.records import corpus_name
from spheret.support.charts import Chart, Line, Panel

SHARED_MACHINE = "as each run took them: runs that shared a machine slowed each other"
# name of the chart: key of a sublayer, caption, name of the axis, whether it is logarithmic
STREAM = {
    "angle": ("angle_mean", "Mean angle by which each sublayer turns the stream", "angle (radians)", False),
    "alpha": ("alpha", "Step size of each sublayer", "alpha (no unit)", False),
    "norm": ("norm", "Mean norm of the stream after each sublayer", "|h| (no unit, log scale)", True),
    "cosine": (
        "cosine",
        "Mean cosine between the states of different tokens, at 1 all are alike",
        "cosine (no unit)",
        False,
    ),
}


def groups_section(groups: Sequence[RunGroup]) -> Section:
    """What a reader must know first if not all runs can be compared."""
    text = (
        f"The runs form {len(groups)} groups: {'; '.join(group.name for group in groups)}. Losses on different data "
        "cannot be compared, and the paper compares schemes within one model size. So each group has its own "
        "sections, and every comparison is between runs of one group. The comparison with the paper, at the end, "
        "shows the runs of all groups."
    )
    return Section("groups", "The groups", [text])


def summary_section(group: RunGroup) -> Section:
    """What was run: the shared settings, the seeds, the settings that differ, and each alarm."""
    count = len(group.contestants)
    settings = [key for key in group.differing if not (group.tuned and key in RATE_SETTINGS)]
    seeds = sorted({run.seed for run in group.results})
    words = [
        f"{count} contestant{'s' * (count != 1)}, seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}. All "
        f"runs share: {_shared_settings(group)}.",
        f"A contestant is a scheme with its options{' and settings' * bool(settings)}.",
    ]
    if settings:
        words[-1] += (
            f" The runs differ in {', '.join(settings)}. A name leaves out the value that most of the runs have."
        )
    going = [f"{run.name} (step {run.step} of {run.run.steps})" for run in group.every if run.row is None]
    words += [f"Not finished: {', '.join(going)}."] if going else []
    # what failed stands in the verdict and in a section of its own
    words += [
        f"{run.label}, seed {run.seed}, raised an alarm at step {line.step}: {line.alarm.rstrip('.')}."
        for run in group.results
        for line in run.lines
        if line.alarm
    ]
    return Section("summary", "What was run", words)


def _shared_settings(group: RunGroup) -> str:
    model, data, train = group.config.model, group.config.data, group.results[0].run.settings.train
    texts = {
        "layers": f"{model.layers} layers",
        "width": f"width {model.width}",
        "steps": f"{train.steps:,} steps",
        "tokens_per_update": f"{train.tokens_per_update:,} tokens per step",
        "head_bias": f"head bias {model.head_bias}",
        "head": f"{model.head} head",
    }
    shared = [text for key, text in texts.items() if key not in group.differing]
    return ", ".join([f"corpus {corpus_name(group.config.as_dict())}", f"tokenizer {data.tokenizer.name}", *shared])


def stream_section(group: RunGroup) -> Section:
    """The curves of the training, and the stream of the first seed of each contestant at its last evaluation."""
    return Section("stream", "Training and the inside of the model", charts=run_charts(group))


def run_charts(group: RunGroup) -> list[Chart]:
    """Every chart that the runs have numbers for: curves by step and time, and the stream over depth."""
    steps = max((run.step for run in group.results), default=0)
    every = max(1, -(-steps // MOST_POINTS))
    of_steps, window = f", each point the mean of {every} steps" if every > 1 else "", max(1, steps // 50 // every)
    losses = _lines(group, lambda run: _averages(run, "loss", every))
    norms = _lines(group, lambda run: _averages(run, "grad_norm", every))
    by_time = _lines(group, _validation_by_seconds)
    side_by_side = all(run.step_seconds is not None for run in group.results)
    source = "steps x seconds per step, measured side by side" if side_by_side else SHARED_MACHINE
    found = [
        Chart(
            "training",
            "Training loss by step (loss)",
            [on_scale(group.answer, Panel(losses, "step", f"training {LOSS}{of_steps}", limits=later_range(losses)))],
            window=window,
        ),
        Chart(
            "time",
            "Validation loss by training time (val_loss; the axis names the source of the time)",
            [Panel(by_time, f"seconds of training, {source}", f"validation {LOSS}", limits=later_range(by_time))],
            window=1,
        ),
        Chart(
            "gradients",
            "Gradient norm by step (grad_norm)",
            [Panel(norms, "step", f"gradient norm{of_steps}", log=True)],
            window=window,
        ),
        *(_over_depth(group, name) for name in STREAM),
    ]
    return [chart for chart in found if chart.panels[0].lines]


def _lines(group: RunGroup, points: Callable[[Result], Points]) -> list[Line]:
    """A curve of every run that is shown, the best contestant first. What comes after a divergence is left out."""
    styles, lines = line_styles(group.answer), list[Line]()
    for label, runs in group.contestants.items():
        failed = any(run.diverged is not None for run in runs)
        lines += contestant_lines(label, styles[label], map(points, runs), failed)
    return lines


def _averages(run: Result, key: str, every: int) -> Points:
    """The means of a key over so many steps each, at the last step of each."""
    values = [
        (line.step, getattr(line, key))
        for line in run.lines
        if line.loss is not None and line.step <= run.healthy_steps
    ]
    known = [(step, float(value)) for step, value in values if value is not None]
    parts = [known[start : start + every] for start in range(0, len(known), every)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _validation_by_seconds(run: Result) -> Points:
    """The validation losses over the seconds of training: measured side by side, or as the run took them."""
    found = []
    for line in run.evaluations:
        seconds = line.seconds if run.step_seconds is None else line.step * run.step_seconds
        if seconds is not None and line.val_loss is not None and line.step <= run.healthy_steps:
            found.append((seconds, line.val_loss))
    return found


def _over_depth(group: RunGroup, name: str) -> Chart:
    """One line per contestant: a key of every sublayer at the last evaluation of its first seed."""
    key, caption, unit, log = STREAM[name]
    styles, lines = line_styles(group.answer), list[Line]()
    for label, runs in group.contestants.items():
        last = next((line.sublayers for line in reversed(runs[0].evaluations) if line.sublayers), [])
        values = [(place, getattr(each, key)) for place, each in enumerate(last, 1)]
        known = [(place, float(value)) for place, value in values if isinstance(value, (int, float))]
        if known:
            places, shown = zip(*known, strict=True)
            lines.append(Line(label, places, shown, styles[label], mark="o"))
    words = f"{caption} (sublayers.{key}, last evaluation, first seed)"
    return Chart(name, words, [Panel(lines, "sublayer", unit, log=log)])
