"""What is inside trained models: a row per run in inside.jsonl, and the figure and the claims that follow from them.

    python docs/results/inside.py runs/length        # run directories, or directories of runs; then make results

It takes the finished runs of `spheret study length` and `length-deep` with fresh seeds, the default head, and Pre-LN
or the projection. What `spheret inspect` sees in the last checkpoint becomes the row. A run that has a row is not
seen again, so that longer ones can be added as they finish.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from spheret.connections import SCHEMES
from spheret.lab.endpoints import PairedComparison
from spheret.lab.rows import FINAL
from spheret.lab.runs import find_runs
from spheret.lab.sections.charts import contestant_lines
from spheret.lab.stages import SEEDS
from spheret.lab.statistics import over_seeds
from spheret.observe.inspect.command import Subject
from spheret.observe.records import SublayerObservation
from spheret.runs.run import Run, open_run
from spheret.support.charts import Chart, Panel, scheme_styles
from spheret.support.documents import Lines, Positive, Record
from spheret.support.files import write_atomically

ROWS = Path(__file__).parent / "inside.jsonl"
PROJ, PRE = "proj-spheretnorm", "pre-ln"
# of the validation split, as many tokens as four updates
WINDOWS = 32
# the least value on a logarithmic axis: some sublayers are worth nothing
LEAST = 1e-5
# what a row keeps of each sublayer, with the name of its axis and whether that is logarithmic
MEASURES = {
    "removal": ("loss rise without it", True),
    "angle_mean": ("angle (radians)", False),
    "norm": ("norm of the stream", True),
    "effective_rank": ("effective rank", False),
    "sink": ("attention to the first token", False),
    "massive": ("largest / median activation", True),
}


class InsideRow(Record):
    """One trained model. sublayers: each measure by sublayer; null where it has none, as an MLP has no attention.

    spikes: updates with a loss or gradient far above the ones before, as the trainer counts them.
    """

    run: str
    scheme: str
    layers: Positive
    steps: Positive
    seed: int
    rate: float
    loss: float
    spikes: int
    commit: str | None
    sublayers: dict[str, list[float | None]]


LINES = Lines(InsideRow, "delete the line and run docs/results/inside.py again")
Measured = Callable[[InsideRow], float]


def read_rows() -> list[InsideRow]:
    """All rows, ordered by depth, length, scheme and seed."""
    rows = [row for row, _ in LINES.read(ROWS)] if ROWS.exists() else []
    return sorted(rows, key=lambda row: (row.layers, row.steps, row.scheme, row.seed))


def is_asked(run: Run) -> bool:
    """Whether a run is one that the rows are made of, and is done."""
    config, train = run.config.model, run.config.train
    if train is None or config.scheme not in (PROJ, PRE) or config.scheme_options:
        return False
    lines = run.metrics() if config.head == "shifted" and train.seed >= SEEDS[FINAL] else []
    return bool(lines) and lines[-1].step == run.steps


def look(run: Run) -> InsideRow:
    """The row of a run."""
    found, train, last = Subject(run, None, WINDOWS, None, "cpu").inspect(), run.settings.train, run.metrics()[-1]
    assert {each.name for each in fields(SublayerObservation)} >= set(MEASURES)
    return InsideRow(
        run=run.name,
        scheme=run.config.model.scheme,
        layers=run.config.model.layers,
        steps=train.steps,
        seed=train.seed,
        rate=train.lr,
        loss=found.loss,
        spikes=last.spikes or 0,
        commit=run.config.environment.commit,
        sublayers={name: [getattr(each, name) for each in found.sublayers] for name in MEASURES},
    )


def main(paths: Sequence[str]) -> None:
    torch.set_num_threads(1)
    rows = {row.run: row for row in read_rows()}
    for path in find_runs(paths):
        run = open_run(path)
        if run.name not in rows and is_asked(run):
            rows[run.name] = look(run)
            print(f"{run.name}: loss {rows[run.name].loss:.3f}", flush=True)
            write_atomically(ROWS, b"".join(LINES.encode(rows[name]) for name in sorted(rows)))


def longest(rows: Sequence[InsideRow]) -> dict[int, list[InsideRow]]:
    """By depth, the rows of the longest training of which both schemes have two seeds in common."""
    found: dict[int, list[InsideRow]] = {}
    for layers, steps in sorted({(row.layers, row.steps) for row in rows}):
        group = [row for row in rows if (row.layers, row.steps) == (layers, steps)]
        if len(_by_seed(group, lambda row: row.loss)) > 1:
            found[layers] = group
    return found


def _by_seed(rows: Sequence[InsideRow], measured: Measured) -> list[float]:
    """The projection minus Pre-LN, for every seed that both have."""
    one, other = ({r.seed: measured(r) for r in rows if r.scheme == name} for name in (PROJ, PRE))
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def paired(rows: Sequence[InsideRow], measured: Measured) -> list[PairedComparison]:
    """The projection minus Pre-LN at each depth, paired by seed."""
    found = []
    for layers, group in longest(rows).items():
        values = _by_seed(group, measured)
        where, interval = f"{layers} layers, {group[0].steps:,} updates", over_seeds(values)
        count = len(values)
        found.append(PairedComparison(PROJ, PRE, where, interval, interval.p, None, count, count, "", False))
    return found


def _known(row: InsideRow, measure: str) -> list[float]:
    return [value for value in row.sublayers[measure] if value is not None]


def deep_removal(row: InsideRow) -> float:
    """By how much the loss rises without a sublayer of the deeper half, on average."""
    values = _known(row, "removal")[row.layers :]
    return math.fsum(values) / len(values)


def deep_share(row: InsideRow) -> float:
    """The share of the deeper half in what all sublayers are worth."""
    return deep_removal(row) * row.layers / math.fsum(_known(row, "removal"))


def mean_sink(row: InsideRow) -> float:
    values = _known(row, "sink")
    return math.fsum(values) / len(values)


def massive(row: InsideRow) -> float:
    """The base-10 logarithm of the largest activation over the median one, on average over the deeper half.

    In the first sublayers the stream of Pre-LN is as short as the embeddings, which is a different matter.
    """
    values = _known(row, "massive")[row.layers :]
    return math.fsum(map(math.log10, values)) / len(values)


def chart(rows: Sequence[InsideRow]) -> Chart | None:
    """Every measure by sublayer in the deepest of the longest models: means over the seeds with their range."""
    groups = longest(rows)
    if not groups:
        return None
    layers, group = max(groups.items())
    styles = scheme_styles({PROJ: PROJ, PRE: PRE}, SCHEMES)
    panels = []
    for measure, (words, log) in MEASURES.items():
        lines = []
        for scheme, style in styles.items():
            values = [row.sublayers[measure] for row in group if row.scheme == scheme]
            known = [[(n, v) for n, v in enumerate(each, start=1) if v is not None] for each in values]
            points = [[(n, max(v, LEAST) if log else v) for n, v in each] for each in known]
            lines += contestant_lines(scheme, style, points, failed=False)
        panels.append(Panel(lines, "sublayer", words, log=log))
    seeds = len({row.seed for row in group})
    caption = (
        f"{layers} layers of width 64 after {group[0].steps:,} updates: means of {seeds} seeds and their range. "
        f"Rises below {LEAST:g} are shown there"
    )
    return Chart("inside", caption, panels)


if __name__ == "__main__":
    main(sys.argv[1:])
