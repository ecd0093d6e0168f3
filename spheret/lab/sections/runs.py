"""The sections that need the run directories: what was run, its numbers, the stream, and where they are from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec

from spheret.connections import scheme
from spheret.lab.page.tables import Table, TableCell, ranked
from spheret.lab.rows import FINISHED, MOST_LAST
from spheret.lab.runs import RATE_SETTINGS, Result, RunGroup, SourcedNumber
from spheret.lab.sections.section import Section, format_loss, format_perplexity, number_cell, perplexity
from spheret.runs.layout import CONFIG, METRICS
from spheret.runs.records import corpus_name


def _tuning_in_words(group: RunGroup) -> list[str]:
    """How the learning rates were chosen, what that does to the losses, and what comes next."""
    grids = {tuple(sorted(rates)) for rates in group.by_rate.values()}
    grid = ", ".join(f"{rate:g}" for rate in group.rates)
    rates = f"at {len(group.rates)} learning rates ({grid})" if len(grids) == 1 else f"at some of the rates {grid}"
    optimistic = "equally for all" if len(grids) == 1 else "more so for those that were trained at more rates"
    return [
        f"Every contestant was trained {rates}. It is shown at its best rate, the one with the lowest validation "
        f"loss. The same validation loss is shown, so it is slightly optimistic, {optimistic}.",
        "To go on, run spheret study: it brackets the best rate of each contestant, and compares the contestants "
        "with fresh seeds at their best rates.",
    ]


def _shared_settings(group: RunGroup) -> str:
    model, data, train = group.config.model, group.config.data, group.results[0].run.settings.train
    texts = {
        "layers": f"{model.layers} layers",
        "width": f"width {model.width}",
        "steps": f"{train.steps:,} steps",
        "tokens_per_update": f"{train.tokens_per_update:,} tokens per step",
        "head_bias": f"head bias {model.head_bias}",
        **({} if model.head == "tied" else {"head": f"{model.head} head"}),
    }
    shared = [text for key, text in texts.items() if key not in group.differing]
    return ", ".join([f"corpus {corpus_name(group.config.as_dict())}", f"tokenizer {data.tokenizer.name}", *shared])


def _describe_seeds(group: RunGroup) -> str:
    seeds = ", ".join(map(str, group.seeds))
    if group.one_seed:
        opening = "One seed" if len(group.seeds) == 1 else "One seed per contestant, not the same for all"
        return (
            f"{opening} ({seeds}). It can show a collapse, a divergence or a large gap. It cannot tell which of two "
            "close losses would be lower with another seed."
        )
    return f"{len(group.seeds)} seeds ({seeds}). The tables show means and standard deviations over seeds."


def groups_section(groups: Sequence[RunGroup]) -> Section:
    """What a reader must know first if not all runs can be compared."""
    return Section(
        "groups",
        "The groups",
        [
            f"The runs form {len(groups)} groups: {'; '.join(group.name for group in groups)}. Losses on different "
            f"data cannot be compared, and the paper compares schemes within one model size. So each group has its "
            f"own sections, and every comparison is between runs of one group. The comparison with the paper, at the "
            f"end, shows the runs of all groups."
        ],
    )


def summary_section(group: RunGroup) -> Section:
    count = len(group.contestants)
    opening = f"{count} contestant{'s' * (count != 1)}. All runs share: {_shared_settings(group)}."
    tuning: list[str] = []
    definition = "A scheme is a way to join the branches of a network to its residual stream."
    settings = [key for key in group.differing if not (group.tuned and key in RATE_SETTINGS)]
    definition += f" A contestant is a scheme with its options{' and settings' * bool(settings)}."
    if settings:
        definition += (
            f" The runs differ in {', '.join(settings)}. A name leaves out the value that most of the runs have."
        )
    if group.tuned:
        tuning = _tuning_in_words(group)
    # what failed or is not finished stands in the verdict, in the column of states and in a section of its own
    alarms = [
        f"{run.label}, seed {run.seed}, raised an alarm at step {step}: {text.rstrip('.')}."
        for run in group.results
        for step, text in run.alarms
    ]
    paragraphs = [opening, definition, *tuning, _describe_seeds(group), *alarms]
    table = _differences_table(group)
    return Section("summary", "What was run", paragraphs, [] if table is None else [table])


def _differences_table(group: RunGroup) -> Table | None:
    """What sets the contestants apart: settings, and options of the schemes with their defaults."""
    if len(group.contestants) < 2:
        return None
    rows: dict[str, dict[str, str]] = {}
    for label, (first, *_) in group.contestants.items():
        config = first.run.config
        built = scheme(config.model.scheme, **config.model.scheme_options)
        options = {option.name: getattr(built, option.name) for option in fields(built) if option.name != "name"}
        settings = {**config.settings("model"), **config.settings("train")}
        # where rates are tuned, min_lr is the same part of every lr
        differing = [key for key in group.differing if not (group.tuned and key == "min_lr")]
        rows[label] = {key: _as_text(settings.get(key)) for key in differing}
        rows[label] |= {name: _as_text(value) for name, value in options.items() if name not in rows[label]}
    # an option that some schemes lack is shown if those that have it differ
    keys = [key for key in dict.fromkeys(key for row in rows.values() for key in row)
            if len({row[key] for row in rows.values() if key in row}) > 1]  # fmt: skip
    if not keys:
        return None
    cells = [
        [TableCell(label, href=_file_link(group, group.contestants[label][0], CONFIG))]
        + [TableCell(row.get(key, "-")) for key in keys]
        for label, row in rows.items()
    ]
    notes = [
        "Settings and options of the schemes that are not the same for all, defaults included. A dash: the scheme "
        "has no such option. All else is the same and stands in the table of settings."
    ]
    return Table("contestants", "What differs between the contestants", ["contestant", *keys], cells, notes)


def _file_link(group: RunGroup, result: Result, name: str) -> str:
    place = group.places.get(result.name)
    return "" if place is None else place.folder + name


def _log_link(group: RunGroup, result: Result) -> str:
    """The log beside the run, which stays if a training fails, or else its metrics."""
    place = group.places.get(result.name)
    return "" if place is None else place.log or place.folder + METRICS


def results_section(group: RunGroup) -> Section:
    columns = [
        "contestant",
        *(["lr"] if group.tuned else []),
        "train loss",
        "val loss",
        "perplexity",
        "spikes",
        "seconds",
        "tokens/s",
        *(["ms per step"] if group.side_by_side else []),
        "seeds",
        "state",
    ]
    rows, unranked = [], []
    for label, runs in group.contestants.items():
        diverged = any(run.diverged is not None for run in runs)
        if any(run.row is None or run.row.state != FINISHED for run in runs):
            unranked.append(label)
        with_losses = [] if diverged else runs
        missing = "diverged" if diverged else "-"
        rows.append(
            [
                TableCell(label),
                *([TableCell(f"{runs[0].rate:g}", runs[0].rate, runs[0].rate_source)] if group.tuned else []),
                number_cell([run.train_loss for run in with_losses], format_loss, missing),
                number_cell([run.val_loss for run in with_losses], format_loss, missing),
                number_cell([perplexity(run.val_loss) for run in with_losses], format_perplexity, missing),
                number_cell([run.at_last_step("spikes") for run in runs], lambda x: f"{x:g}"),
                number_cell([run.at_last_step("seconds") for run in runs], lambda x: f"{x:.1f}"),
                number_cell([run.tokens_per_second for run in runs], lambda x: f"{x:,.0f}"),
                *([number_cell([runs[0].milliseconds_per_step], lambda x: f"{x:.1f}")] if group.side_by_side else []),
                TableCell("one seed" if len(runs) == 1 else f"{len(runs)} seeds"),
                TableCell("; ".join(dict.fromkeys(run.state for run in runs))),
            ]
        )
    notes = [
        f"Losses are in nats per token. Train loss is the mean over the last tenth of the steps, at most "
        f"{MOST_LAST} of them. Val loss is that of the last evaluation. Perplexity is exp(val loss).",
        "Bold is the lowest and underlined the second lowest among finished runs. This is a ranking, not a verdict.",
        "Spikes counts the steps whose loss was far above the recent losses.",
        "Seconds and tokens/s were taken while each run trained. They also depend on what shared the machine with "
        "it, such as other runs of a race.",
    ]
    notes.append(
        "Ms per step compares the contestants: after the race, their steps were timed in turn in one process."
        if group.side_by_side
        else "Ms per step is not shown: it was not measured side by side, or the machine was busy then."
    )
    table = Table("results", f"Loss and perplexity{', one seed' * group.one_seed}", columns, rows, notes)
    table = ranked(table, ("train loss", "val loss", "perplexity"), excluded=unranked)
    return Section("results", "Loss and perplexity", (), [table], ["training", "time"])


def _format_with(specification: str, value: float) -> str:
    return format(value, specification)


def _over_sublayers(result: Result, function: str, key: str) -> SourcedNumber | None:
    """A function of one key of all sublayers at the last evaluation."""
    line = result.validation
    if line is None or not line.sublayers:
        return None
    values = [getattr(sublayer, key) for sublayer in line.sublayers]
    if any(value is None for value in values):
        return None
    value = float(SUBLAYER_FUNCTIONS[function](values))
    return SourcedNumber(value, f"{function}({result.name}[{line.step}].sublayers.{key})")


SUBLAYER_FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
# column: (function over sublayers, key, format)
_STREAM: dict[str, tuple[str, str, str]] = {
    "mean angle": ("mean", "angle_mean", ".3f"),
    "largest angle": ("max", "angle_max", ".3f"),
    "smallest alpha": ("min", "alpha", ".3f"),
    "largest alpha": ("max", "alpha", ".3f"),
    "first |h|": ("first", "norm", ".2f"),
    "last |h|": ("last", "norm", ".2f"),
    "norm drift": ("max", "drift", ".1e"),
    "last cosine": ("last", "cosine", ".3f"),
}


def stream_section(group: RunGroup) -> Section:
    rows = []
    for label, runs in group.contestants.items():
        row = [TableCell(label)]
        for function, key, specification in _STREAM.values():
            row.append(number_cell([_over_sublayers(runs[0], function, key)], partial(_format_with, specification)))
        line = runs[0].validation
        if line is None or line.on_bound is None:
            row.append(TableCell("-"))
        else:
            source = f"count({runs[0].name}[{line.step}].on_bound)"
            row.append(TableCell(str(len(line.on_bound)), float(len(line.on_bound)), source))
        rows.append(row)
    notes = [
        "All values are from the last evaluation of the first seed. First and last are the first and the last "
        "sublayer; mean, smallest and largest are over all sublayers.",
        "Angle is how far a sublayer turns the stream, in radians. Alpha is the step size of a sublayer. |h| is the "
        "mean norm of the stream after a sublayer.",
        "Norm drift is the largest relative change of |h| since the stream's entry.",
        "Cosine is the mean cosine between the states of different tokens. At 1 all tokens have the same direction: "
        "the stream has collapsed.",
        "At a bound is the number of learned scalars that lie at an end of their interval.",
    ]
    table = Table("stream", "The stream", ["contestant", *_STREAM, "at a bound"], rows, notes)
    return Section(
        "stream",
        "Inside the model",
        (),
        [table.without_empty_columns],
        ["gradients", "angle", "alpha", "norm", "cosine"],
    )


def provenance_section(group: RunGroup) -> Section:
    every = group.every
    rate = ["lr"] if group.tuned else []
    columns = ["run", "contestant", *rate, "seed", "train loss", "val loss", "perplexity", "state"]
    rows = [
        [
            TableCell(result.name, href=_file_link(group, result, "")),
            TableCell(result.label),
            *([TableCell(f"{result.rate:g}", result.rate, result.rate_source)] if group.tuned else []),
            TableCell(str(result.seed)),
            number_cell([result.train_loss], format_loss),
            number_cell([result.val_loss], format_loss),
            number_cell([perplexity(result.val_loss)], format_perplexity),
            TableCell(result.state, href=_log_link(group, result)),
        ]
        for result in every
    ]
    keys = ["commit", "spheret", "torch", "python", "processor", "gpu", "threads", "started", "command"]
    environments = [result.run.config.environment for result in every]
    environment_rows = [
        [
            TableCell(result.name, href=_file_link(group, result, CONFIG)),
            *(TableCell(_as_text(getattr(environment, key))) for key in keys),
        ]
        for result, environment in zip(every, environments, strict=True)
    ]
    paragraphs = [
        "Point at a number to see its source. tables.csv lists the same sources. RUN[STEP].KEY is the value of KEY "
        "in the line of that step in RUN/metrics.jsonl. RUN[FIRST..LAST].KEY are the values in all lines from FIRST "
        "to LAST."
    ]
    if group.places:
        paragraphs.append(
            "A run leads to its directory, and its state to its metrics, or to the log of a training that failed. "
            "In the second table a run leads to its config."
        )
    machines = {tuple(_as_text(getattr(e, key)) for key in ("processor", "gpu", "threads")) for e in environments}
    if len(machines) > 1:
        paragraphs.append(
            "The runs did not all have the same processor, GPU and number of threads: do not compare their times."
        )
    tables = [
        Table("runs", "Every run", columns, rows, folded=True),
        Table("environments", "How each run was made", ["run", *keys], environment_rows, folded=True),
        _settings_table(group),
    ]
    return Section("provenance", "Provenance", paragraphs, tables)


def _settings_table(group: RunGroup) -> Table:
    config = group.config
    described = msgspec.to_builtins(config.data)
    data = {f"data.{key}": value for key, value in described.items() if key not in ("path", "tokenizer")}
    data["data.tokenizer"] = {key: described["tokenizer"][key] for key in ("name", "vocab_size", "sha256")}
    model = {
        f"model.{key}": value
        for key, value in config.settings("model").items()
        if key not in ("scheme", "scheme_options")
    }
    train = {f"train.{key}": value for key, value in config.settings("train").items() if key != "seed"}
    rows = [
        [TableCell(key), TableCell("differs" if key.partition(".")[2] in group.differing else _as_text(value))]
        for key, value in sorted({**data, **model, **train}.items())
    ]
    return Table("settings", "Settings of all runs", ["setting", "value"], rows, folded=True)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_as_text(value[key])}" for key in sorted(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_as_text, value))
    return "none" if value is None else str(value)
