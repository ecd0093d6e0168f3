"""What a report says, section by section: words, tables, names of figures. How it looks is the page's business."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spheret.report.results import WINDOW, Number, Result, Study
from spheret.report.statistics import mean_and_deviation
from spheret.report.tables import Cell, Table, ranked
from spheret.report.verdicts import EVALUATION_NOISE, FALSE_WINNER, pairs


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and figures; a folded one is opened by its reader."""

    name: str
    title: str
    paragraphs: Sequence[str] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)
    figures: Sequence[str] = field(default_factory=tuple)
    folded: bool = False


def loss(value: float) -> str:
    return f"{value:.3f}"


def perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def exponential(number: Number | None) -> Number | None:
    """A perplexity from its loss; a loss beyond all reason has none that a float can hold."""
    if number is None or number.value > 700:
        return None
    return Number(math.exp(number.value), f"exp({number.source})")


def cell(numbers: Sequence[Number | None], form: Callable[[float], str], missing: str = "-") -> Cell:
    """One number, or the mean and standard deviation of one a seed."""
    found = [number for number in numbers if number is not None]
    if not found or len(found) < len(numbers):
        return Cell(missing)
    if len(found) == 1:
        return Cell(form(found[0].value), found[0].value, found[0].source)
    mean, deviation = mean_and_deviation([number.value for number in found])
    sources = ", ".join(number.source for number in found)
    return Cell(f"{form(mean)} \u00b1 {form(deviation)}", mean, f"mean({sources}) \u00b1 sd({sources})")


def _setting(study: Study) -> str:
    model, train, data = (study.config[key] for key in ("model", "train", "data"))
    corpus = data.get("corpus")
    name = corpus.get("name") if isinstance(corpus, dict) else corpus
    words = {
        "layers": f"{model['layers']} layers",
        "width": f"width {model['width']}",
        "steps": f"{train['steps']:,} steps",
        "tokens_per_update": f"{train.get('tokens_per_update', 0):,} tokens a step",
        "head_bias": f"head bias {model['head_bias']}",
    }
    shared = [text for key, text in words.items() if key not in study.differing]
    tokenizer = (data.get("tokenizer") or {}).get("name")
    return ", ".join([f"{name} as {tokenizer}", *shared])


def _seeds(study: Study) -> str:
    seeds = study.seeds
    if study.one_seed:
        which = "One seed" if len(seeds) == 1 else "One seed a contestant, not the same for all"
        return (
            f"{which} ({', '.join(map(str, seeds))}). Another seed would change every number by an unknown amount, "
            f"so no pair gets a winner; intervals are labelled {EVALUATION_NOISE!r}."
        )
    return f"{len(seeds)} seeds ({', '.join(map(str, seeds))}): means and standard deviations over seeds."


def _states(study: Study) -> list[str]:
    """What a reader must know before the numbers: who diverged, who collapsed, who is not done."""
    said = []
    for result in study.results:
        who = f"{result.label}, seed {result.seed}"
        if result.stopped is not None:
            said.append(f"{who}, diverged at step {result.step}: {result.stopped}.")
        elif not result.lines:
            said.append(f"{who}, has made no step yet.")
        elif not result.finished:
            said.append(
                f"{who}, is not finished: step {result.step} of {result.run.steps} (still going, or interrupted). "
                f"Its numbers are of that step, unranked and uncompared."
            )
        said += [f"{who}, alarm at step {step}: {text}." for step, text in result.alarms]
    return [text.replace("..", ".") for text in said]


def summary(study: Study) -> Section:
    count = len(study.contestants)
    opening = f"{count} contestant{'s' * (count != 1)} on {_setting(study)}."
    if study.differing:
        opening += f" The runs differ in {', '.join(study.differing)}: their names say how."
    return Section("summary", "What was run", [opening, _seeds(study), *_states(study)])


def results(study: Study) -> Section:
    columns = ["scheme", "train loss", "val loss", "perplexity", "spikes", "seconds", "tokens/s", "seeds", "state"]
    rows, unranked = [], []
    for label, runs in study.contestants.items():
        diverged = [run for run in runs if run.stopped is not None]
        if any(not run.finished for run in runs):
            unranked.append(label)
        shown = [] if diverged else runs
        state = "; ".join(dict.fromkeys(run.state for run in runs))
        missing = "diverged" if diverged else "-"
        rows.append(
            [
                Cell(label),
                cell([run.train_loss for run in shown], loss, missing),
                cell([run.val_loss for run in shown], loss, missing),
                cell([exponential(run.val_loss) for run in shown], perplexity, missing),
                cell([run.at_last_step("spikes") for run in runs], lambda x: f"{x:g}"),
                cell([run.at_last_step("seconds") for run in runs], lambda x: f"{x:.1f}"),
                cell([run.tokens_per_second for run in runs], lambda x: f"{x:,.0f}"),
                Cell("one seed" if len(runs) == 1 else f"{len(runs)} seeds"),
                Cell(state),
            ]
        )
    fewest = min((len(run.steps) for run in study.results if run.finished), default=WINDOW)
    over = (
        f"the last {WINDOW} steps" if fewest >= WINDOW else f"the last {WINDOW} steps, or all where there are fewer"
    )
    notes = [
        f"Losses in nats a token. Train: mean over {over}. Val: the last evaluation. Perplexity: exp(val loss).",
        "Bold is the lowest, underlined the second lowest, among finished runs. That is no verdict: see the pairs.",
        "Seconds and tokens/s depend on what else the machine did.",
    ]
    table = Table("results", f"Loss and perplexity{', one seed' * study.one_seed}", columns, rows, notes)
    table = ranked(table, ("train loss", "val loss", "perplexity"), excluded=unranked)
    return Section("results", "Loss and perplexity", (), [table], ["validation", "training", "time"])


def verdicts(study: Study) -> Section:
    found = pairs(study)
    if not found:
        return Section("pairs", "Pairs", ["One contestant: there is no pair to compare."])
    rows = []
    for pair in found:
        i = pair.interval
        interval = Cell("-")
        if i is not None:
            text = "none: one document" if math.isinf(i.high) else f"{i.low:+.4f} to {i.high:+.4f}"
            interval = Cell(text, source=pair.source)
        difference = Cell("-") if i is None else Cell(f"{i.estimate:+.4f}", i.estimate, f"estimate of {pair.source}")
        rows.append(
            [
                Cell(f"{pair.first} - {pair.second}"),
                difference,
                interval,
                Cell(pair.noise or "-"),
                Cell(pair.verdict),
            ]
        )
    notes = [
        "Difference: validation loss of the first minus the second (below 0 the first is better), in nats a token, "
        "paired over the same validation documents or seeds.",
        f"{EVALUATION_NOISE.capitalize()}: the interval says how the difference may change with other documents of "
        "the same kind. What another seed would change is not in it.",
        f"A winner needs several seeds, and a p-value below {FALSE_WINNER} after Holm's correction for all "
        f"{len(found)} pairs.",
    ]
    columns = ["pair", "difference", "95% interval", "interval holds", "verdict"]
    table = Table("pairs", "A verdict for each pair", columns, rows, notes)
    return Section("pairs", "Pairs", (), [table], ["differences"])


def _formatted(form: str, value: float) -> str:
    return format(value, form)


def _of_layers(result: Result, function: str, key: str) -> Number | None:
    """A function of one key of all sublayers at the last evaluation."""
    line = result.validation
    values = [layer.get(key) for layer in (line or {}).get("sublayers") or []]
    if line is None or not values or any(value is None for value in values):
        return None
    return Number(float(LAYERS[function](values)), f"{function}({result.name}[{line['step']}].sublayers.{key})")


LAYERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
# column: (function over sublayers, key, how it is written)
_STREAM: dict[str, tuple[str, str, str]] = {
    "mean angle": ("mean", "angle_mean", ".3f"),
    "largest angle": ("max", "angle_max", ".3f"),
    "alpha from": ("min", "alpha", ".3f"),
    "alpha to": ("max", "alpha", ".3f"),
    "|h| first": ("first", "norm", ".2f"),
    "|h| last": ("last", "norm", ".2f"),
    "norm drift": ("max", "drift", ".1e"),
    "cosine last": ("last", "cosine", ".3f"),
}


def stream(study: Study) -> Section:
    rows = []
    for label, runs in study.contestants.items():
        row = [Cell(label)]
        for function, key, form in _STREAM.values():
            row.append(cell([_of_layers(runs[0], function, key)], partial(_formatted, form)))
        line = runs[0].validation or {}
        bound = line.get("on_bound")
        source = f"count({runs[0].name}[{line.get('step')}].on_bound)"
        row.append(Cell("-") if bound is None else Cell(str(len(bound)), float(len(bound)), source))
        rows.append(row)
    notes = [
        "At the last evaluation, first seed. Angles in radians; norm drift is the largest relative change of |h| "
        "from where the stream entered; cosine is the mean between states of different tokens after the last "
        "sublayer (1: all tokens alike, a collapse); on a bound counts scalars on the edge of their interval."
    ]
    table = Table("stream", "The stream", ["scheme", *_STREAM, "on a bound"], rows, notes)
    return Section("stream", "Inside", (), [table], ["gradients", "angle", "alpha", "norm", "cosine"])


def receipts(study: Study) -> Section:
    runs = []
    for result in study.results:
        runs.append(
            [
                Cell(result.name),
                Cell(result.label),
                Cell(str(result.seed)),
                cell([result.train_loss], loss),
                cell([result.val_loss], loss),
                cell([exponential(result.val_loss)], perplexity),
                Cell(result.state),
            ]
        )
    losses = Table(
        "runs", "Every run", ["run", "scheme", "seed", "train loss", "val loss", "perplexity", "state"], runs
    )
    keys = ["commit", "spheret", "torch", "python", "processor", "gpu", "threads", "started", "command"]
    made = [
        [Cell(r.name), *(Cell(_said(r.run.config["environment"].get(key))) for key in keys)] for r in study.results
    ]
    paragraphs = [
        "Each number's source is shown when you point at it, and stands in tables.csv: RUN[STEP].KEY is that key of "
        "that step's line in RUN/metrics.jsonl, RUN[FIRST..LAST].KEY all lines between."
    ]
    environments = [result.run.config["environment"] for result in study.results]
    if len({tuple(_said(e.get(key)) for key in ("processor", "gpu", "threads")) for e in environments}) > 1:
        paragraphs.append(
            "Not all runs had the same processor, GPU and number of threads: do not compare their times."
        )
    return Section(
        "receipts",
        "Receipts",
        paragraphs,
        [losses, Table("made", "How each run was made", ["run", *keys], made), _settings_table(study)],
    )


def _settings_table(study: Study) -> Table:
    config = study.config
    data = {f"data.{key}": value for key, value in config["data"].items() if key not in ("path", "tokenizer")}
    tokenizer = config["data"].get("tokenizer") or {}
    data["data.tokenizer"] = {
        key: tokenizer.get(key) for key in ("name", "vocab_size", "sha256") if tokenizer.get(key)
    }
    model = {
        f"model.{key}": value for key, value in config["model"].items() if key not in ("scheme", "scheme_options")
    }
    train = {f"train.{key}": value for key, value in config["train"].items() if key != "seed"}
    rows = [
        [Cell(key), Cell("differs" if key.partition(".")[2] in study.differing else _said(value))]
        for key, value in sorted({**data, **model, **train}.items())
    ]
    return Table("settings", "What all runs share", ["setting", "value"], rows)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_said(value[key])}" for key in sorted(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return "none" if value is None else str(value)
