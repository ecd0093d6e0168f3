"""`spheret inspect`."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec import UNSET, UnsetType

from spheret.analysis import figures
from spheret.analysis.achievement import inactive_sentence
from spheret.analysis.dynamics import dynamics, gradients
from spheret.analysis.failure import failure_of
from spheret.analysis.inputs import float64_device, open_data, validation_windows
from spheret.analysis.inspect_json import (
    INSPECTIONS,
    InspectedRun,
    InspectedSublayer,
    InspectRecord,
    TrainingGradients,
    inspected_sublayers,
)
from spheret.analysis.saved_models import boundary, inspect_saved, open_run_or_model, output_directory
from spheret.analysis.sublayers import check_finite
from spheret.data import Data, refuse_output_among_text
from spheret.model.gpt import GPT
from spheret.model.monitor import expected_start, own_logit_and_loss
from spheret.optim.parametrization import parametrize
from spheret.runs.layout import INSPECT, INSPECT_FIGURE
from spheret.runs.metrics import StartRecord
from spheret.runs.run import Run, manifest_sha256
from spheret.support import files
from spheret.support.documents import known
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts
from spheret.support.tables import print_in_parts, terminal

# key in a sublayer's record: its column in the table
QUANTITIES = {
    "norm": "|h|",
    "massive": "max/median",
    "sink": "sink",
    "angle": "angle",
    "update_cosine": "cos updates",
    "token_cosine": "cos tokens",
    "effective_rank": "rank",
    "removal": "loss rise",
    "gradient": "|gradient|",
    "initial_gradient": "untrained",
}
# key in a sublayer's record: title of its panel, its vertical axis, what to look for, and whether it is logarithmic
PANELS = {
    "norm": (
        "How long the stream's vectors are", "|h|",
        "growth over depth, which makes late sublayers count for less, as in Pre-LN. On the sphere it is flat.",
        True,
    ),
    "angle": (
        "How far each sublayer turns the stream", "angle (radians)",
        "late sublayers near 0, which change little, and single ones that turn far more than the others.", False,
    ),
    "update_cosine": (
        "Does an update continue the last one?", "cosine",
        "0 is a new direction. Near 1 a sublayer repeats the one before, below 0 it undoes it.", False,
    ),
    "token_cosine": (
        "Are the tokens still different?", "mean cosine between tokens",
        "a rise to 1: there the states of all tokens have collapsed into one.", False,
    ),
    "effective_rank": (
        "How many directions the tokens use", "effective rank",
        "a fall towards 1, which is collapse too.", False,
    ),
    "massive": (
        "Largest activation over the median one", "max / median",
        "values in the hundreds: a few massive activations then carry the stream.", True,
    ),
    "sink": (
        "How much attention the first token gets", "share of attention",
        "values near 1: these heads rest on the first token and read little else.", False,
    ),
    "removal": (
        "How much the loss needs each sublayer", "rise of the loss without it (nats)",
        "sublayers near 0, which the model does not need, and single ones on which all depends.", False,
    ),
    "gradient": (
        "How strongly each sublayer learns", "gradient norm",
        "a slope over depth: one end of the model then learns faster than the other.", True,
    ),
    "initial_gradient": (
        "The same gradient before training", "gradient norm",
        "a steep slope: gradients vanish or explode with depth from the start.", True,
    ),
}  # fmt: skip
MEANINGS = """\
max/median: largest activation over the median activation.
sink: attention to the first token.
cos updates: cosine between an update and the previous one.
cos tokens: mean cosine between tokens; 1 means that they have collapsed into one.
rank: effective rank of the tokens' states.
loss rise: how much the loss rises when the sublayer is removed.
|gradient|: norm of the gradient of the sublayer's weights; untrained: the same before training."""


def inspect_run(
    run: Run,
    step: int | None = None,
    windows: int = 8,
    data: str | None = None,
    device: str = "cpu",
    quiet: bool = True,
) -> InspectedRun:
    """The dynamics of a run's checkpoint, with its gradients before training and during training."""
    place = float64_device(device)
    model, saved = run.load(step, place)
    checkpoint_step = saved.step
    check_finite(model, f"checkpoint step-{checkpoint_step} of {run.path}")
    source = open_data(run, data)
    time = max(1, min(model.config.block, source.tokens("val") - 1))
    x, y = (ids.to(place) for ids in validation_windows(source, model.config.block, windows * time))
    sublayers = 2 * model.config.layers
    with Meter(f"inspect {run.name}", quiet) as meter:
        measured = dynamics(model, x, y, meter.counter(sublayers, "sublayers"))
    untrained = initial(run, source)
    before: list[float] | list[None] = [None] * sublayers
    start: StartRecord | UnsetType = UNSET
    if untrained is not None:
        before = gradients(untrained.to(place), x, y)["weights"]
        own, loss = own_logit_and_loss(untrained, x, y)
        expected = expected_start(untrained, run.config.data.unigram_entropy)
        start = StartRecord(own_logit=own, loss=loss, expected=expected)
    training = [
        TrainingGradients(step=line.step, gradients=[record.grad_norm for record in line.sublayers])
        for line in run.metrics()
        if line.sublayers is not None
    ]
    return InspectedRun(
        run=run.name,
        scheme=model.config.scheme,
        checkpoint=checkpoint_step,
        windows=windows,
        loss=measured.loss,
        entry_norm=measured.entry_norm,
        sublayers=inspected_sublayers(measured, before),
        inactive=measured.inactive,
        angular_distance=measured.angular_distance,
        training=training,
        own_logit=own_logit_and_loss(model, x, y)[0],
        start=start,
    )


def head_sentence(own_logit: float, start: StartRecord | None) -> str:
    """How much the head prefers the current token, now and before training."""
    text = f"the logit of the current token is {own_logit:.2f} above the mean logit"
    if start is None or start.loss is None:
        return f"{text}."
    return (
        f"{text}; before training it was {start.own_logit:.2f}, and the loss {start.loss:.3f} was "
        f"{start.loss - start.expected:.3f} above that of a model that knows nothing."
    )


def initial(run: Run, data: Data) -> GPT | None:
    """The run's model before its first step, drawn again from its seed; None if it started from other weights."""
    config, train = run.model_config, run.config.train
    if train is None or train.init_from is not None:
        return None
    # the head's bias comes from token frequencies, so other data would give another model
    if config.head_bias == "unigram" and manifest_sha256(data) != run.config.data.manifest_sha256:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(train.seed)
        model = GPT(config, data.counts() if config.head_bias == "unigram" else None)
        parametrize(model, run.settings.train.optimizer_settings())
        model.at_update(1)
        return model.eval()


def inspect_command(
    run: str,
    other: str | None = None,
    /,
    step: int | None = None,
    windows: int = 8,
    data: str | None = None,
    device: str = "cpu",
    out: str | None = None,
) -> int:
    """Print and plot the dynamics of a model's stream, or of two models side by side.

    Args:
        run: a run directory, into which inspect.json and inspect.png are written, or a saved transformers decoder.
        other: a second run or saved model to compare with the first.
        step: the step of a run's checkpoint; by default the newest.
        windows: how many windows of the validation split are examined.
        data: other data: a prepared directory, the name of a corpus, or text; for a saved model the default is sotu.
        device: cpu or cuda; cpu is the default because norms, ranks and angles are taken in float64.
        out: another directory to write to; for a saved model the default is runs/inspect-NAME.
    """
    check_counts(windows=windows)
    check_counts(0, step=step)
    if out:
        files.check_output_directory("--out", Path(out).expanduser())
    opened = [open_run_or_model(path) for path in (run, other) if path is not None]
    if step is not None and not any(isinstance(one, Run) for one in opened):
        raise ValueError(f"--step is a checkpoint of a run, and {run} holds one model: leave --step out.")
    directory = output_directory("inspect", opened[0], out)
    files.check_results("--out" if out else "the output", directory, INSPECT, INSPECT_FIGURE)
    if data is not None:
        refuse_output_among_text(data, directory)
    with boundary("cannot be inspected", *opened):
        records = [
            inspect_run(one, step, windows, data, device, quiet=False)
            if isinstance(one, Run)
            else inspect_saved(one, windows, data, device, quiet=False)
            for one in opened
        ]
        document = InspectRecord(runs=records)
        drawing = figure(records)
    directory.mkdir(parents=True, exist_ok=True)
    INSPECTIONS.write(directory / INSPECT, document)
    files.write_figure(directory / INSPECT_FIGURE, drawing)
    show(records)
    print(MEANINGS)
    for label, record in zip(labels(records), records, strict=True):
        if record.inactive:
            print(f"{label}: {inactive_sentence(record.inactive, len(record.sublayers))}")
        own_logit = known(record.own_logit)
        if own_logit is not None:
            print(f"{label}: {head_sentence(own_logit, known(record.start))}")
    for label, one in zip(labels(records), opened, strict=True):
        failure = failure_of(one) if isinstance(one, Run) else None
        if failure is not None:
            print(f"{label}: {failure.sentence}\n{failure.what_to_try}")
    print(f"Wrote {directory / INSPECT} and {INSPECT_FIGURE}.")
    return 0


def labels(records: list[InspectedRun]) -> list[str]:
    """A label per run: its name, numbered where two runs have the same name."""
    names = [record.run for record in records]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, start=1)]


def show(records: list[InspectedRun]) -> None:
    """Print one row per sublayer; with two runs each cell holds both values."""
    titles = [
        f"{label}, {record.scheme}, {_origin(record)}: loss {record.loss:.4f}"
        for label, record in zip(labels(records), records, strict=True)
    ]
    lists, table = [record.sublayers for record in records], list[list[str]]()
    for index in range(max(map(len, lists))):
        rows = [sublayers[index] if index < len(sublayers) else None for sublayers in lists]
        cells = [_cell([_text(row, key) for row in rows]) for key in QUANTITIES]
        table.append([str(index + 1), _cell([row.branch for row in rows if row is not None]), *cells])
    columns = ["sublayer", "branch", *QUANTITIES.values()]
    print_in_parts(terminal(), " | ".join(titles), columns, table, first=2, left=("branch",))


def _origin(record: InspectedRun) -> str:
    return str(known(record.model)) if record.checkpoint is None else f"step {record.checkpoint}"


def _cell(texts: list[str]) -> str:
    """The texts of both models, or one if it says the same: the kind of a branch, or that there is nothing."""
    same = len(set(texts)) == 1 and not any(character.isdigit() for character in texts[0])
    return texts[0] if same else " | ".join(texts)


def _text(sublayer: InspectedSublayer | None, key: str) -> str:
    value = None if sublayer is None else getattr(sublayer, key)
    return "-" if value is None else f"{value:.3g}"


def figure(records: list[InspectedRun]) -> bytes:
    """One panel per quantity with one line per run, and gradients of the first and last sublayer during training."""
    named = dict(zip(labels(records), records, strict=True))
    panels = [
        figures.Panel(
            title, "sublayer", y, look_for, {name: _series(r.sublayers, key) for name, r in named.items()}, log
        )
        for key, (title, y, look_for, log) in PANELS.items()
    ]
    panels.append(
        figures.Panel(
            "Gradient: first sublayer over the last", "step", "ratio of gradient norms",
            "a line near 1. Far from 1 one end of the model learned much faster during training.",
            {name: _gradient_ratios(record) for name, record in named.items()}, log=True,
        )
    )  # fmt: skip
    distances = {name: [row[-1] for row in record.angular_distance] for name, record in named.items()}
    panels.append(
        figures.Panel(
            "How far each state is from the last one", "sublayers so far", "angle / pi",
            "a flat end: the last sublayers change little of what the head reads.",
            {name: (list(range(len(values))), values) for name, values in distances.items()},
        )
    )  # fmt: skip
    title = f"Inside {' and '.join(named)}, sublayer by sublayer"
    return figures.lines(title, panels, {name: record.scheme for name, record in named.items()})


def _gradient_ratios(record: InspectedRun) -> figures.Series:
    ends = [(line.step, line.gradients[0], line.gradients[-1]) for line in record.training]
    # metrics.jsonl has null in place of NaN and infinity
    known_ends = [(step, first, last) for step, first, last in ends if first is not None and last is not None]
    return [step for step, _, _ in known_ends], [first / max(last, 1e-30) for _, first, last in known_ends]


def _series(sublayers: list[InspectedSublayer], key: str) -> figures.Series:
    measured = [(record.sublayer, getattr(record, key)) for record in sublayers]
    return [number for number, value in measured if value is not None], [v for _, v in measured if v is not None]
