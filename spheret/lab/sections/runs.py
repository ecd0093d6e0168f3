"""The sections that need the run directories: what was run, and the paper's tables with the runs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spheret.evaluate.results import average, read
from spheret.evaluate.results import number as paper_number
from spheret.evaluate.tasks import PAPER_COLUMNS, Column
from spheret.lab.page.section import Section, Table, TableCell
from spheret.lab.runs import RATE_SETTINGS, Result, RunGroup
from spheret.lab.statistics import mean_and_deviation
from spheret.paper.assumptions import READINGS
from spheret.paper.departures import departures, recipe_of
from spheret.paper.numbers import (
    AVERAGE_ACCURACIES,
    CORPORA,
    FOOTNOTES,
    LOSSES,
    ROWS,
    SIZES,
    SOURCE,
    ZERO_SHOT,
    format_average,
)
from spheret.paper.runs import PaperRun
from spheret.runs.layout import EVAL
from spheret.runs.records import corpus_name

NOT_RUN = "not run"
# the mark of a number whose run departs from the recipe
DEPARTS = "*"
MARKS = (
    '"Limit N" means that only the first N documents of each task were evaluated, "step N" that the checkpoint of '
    "step N was, which is not the last."
)


def format_loss(value: float) -> str:
    return f"{value:.3f}"


def format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def number_cell(numbers: Sequence[TableCell | None], format_number: Callable[[float], str]) -> TableCell:
    """A cell from one number per seed: the number itself, or the mean and standard deviation of several."""
    values = [number.value for number in numbers if number is not None and number.value is not None]
    if not values or len(values) < len(numbers):
        return TableCell(NOT_RUN)
    mean, deviation = mean_and_deviation(values)
    sources = ", ".join(number.source for number in numbers if number is not None)
    if len(values) == 1:
        return TableCell(format_number(mean), mean, sources)
    text = f"{format_number(mean)} \u00b1 {format_number(deviation)}"
    return TableCell(text, mean, f"mean({sources}) \u00b1 sd({sources})")


def zero_shot_number(result: Result, column: Column) -> TableCell:
    """One metric of a run's eval.json, accuracies in percent as in the paper, if it was measured."""
    value = paper_number(read(result.run.path), column).value if _is_evaluated(result) else None
    return TableCell("", value, f"{result.name}/{EVAL} tasks.{column.task}.metrics.{column.metric}")


def average_accuracy(result: Result) -> TableCell:
    """The mean of the ten accuracies of a run's eval.json in percent, if all of them were measured."""
    mean = average(read(result.run.path)) if _is_evaluated(result) else None
    return TableCell("", None if mean is None else mean.value, f"{result.name}/{EVAL} mean of the ten accuracies")


def evaluation_marks(result: Result) -> list[str]:
    """What makes an evaluation less than the paper's: a limit of documents, or a step that is not the last."""
    if not _is_evaluated(result):
        return []
    evaluation = read(result.run.path)
    marks = [] if evaluation.limit is None else [f"limit {evaluation.limit}"]
    return [*marks, *([] if evaluation.step == result.run.steps else [f"step {evaluation.step}"])]


def _is_evaluated(result: Result) -> bool:
    return (result.run.path / EVAL).exists()


@dataclass(frozen=True)
class Candidate:
    """The runs of one contestant that belong beside a cell of the paper's tables, with all their departures."""

    runs: Sequence[Result]
    departures: list[str]

    @property
    def order(self) -> tuple[int, str, float]:
        """By name and rate among those that depart alike: by the order of the group the best loss would be picked."""
        return len(self.departures), self.runs[0].label, self.runs[0].rate


class RunsBesideThePaper:
    """The finished runs that belong beside the paper's tables, by the run of the paper that they repeat.

    If several contestants belong to one cell, the one that departs least from the recipe is shown.
    """

    def __init__(self, groups: Sequence[RunGroup]) -> None:
        self.shown: dict[PaperRun, Candidate] = {}
        for group in groups:
            for runs in (runs for rates in group.by_rate.values() for runs in rates.values()):
                recipe = recipe_of(runs[0].run.config.as_dict())
                if recipe is not None and all(run.number("val_loss") for run in runs):
                    found = [text for run in runs for text in departures(run.run.config.as_dict(), recipe)]
                    candidate = Candidate(runs, list(dict.fromkeys(found)))
                    before = self.shown.setdefault(recipe, candidate)
                    self.shown[recipe] = min(before, candidate, key=lambda each: each.order)

    def rows(self, corpus: str, sizes: Sequence[str] = SIZES) -> list[tuple[str, str | None]]:
        """The rows of a table: the paper's, and below each the other readings that were run."""
        read = {(run.scheme, run.reading) for run in self.shown if run.dataset == corpus and run.size in sizes}
        return [
            (row, reading)
            for row, scheme in ROWS.items()
            for reading in (None, *READINGS)
            if reading is None or (scheme, reading) in read
        ]

    def cell(
        self,
        place: tuple[str, str | None, str, str],
        number: Callable[[Result], TableCell | None],
        format_number: Callable[[float], str],
        marks: Callable[[Result], list[str]] = lambda run: [],
    ) -> TableCell:
        """The number of the runs at (row, reading, corpus, size), followed by what sets it apart from the paper's."""
        row, reading, corpus, size = place
        shown = self.shown.get(PaperRun(corpus, size, ROWS[row], reading=reading))
        if shown is None:
            return TableCell(NOT_RUN)
        cell = number_cell([number(run) for run in shown.runs], format_number)
        if cell.value is None:
            return cell
        words = list(dict.fromkeys(mark for run in shown.runs for mark in marks(run)))
        text = cell.text + (f" ({', '.join(words)})" if words else "") + (f" {DEPARTS}" if shown.departures else "")
        return replace(cell, text=text)

    def notes(self, corpora: Sequence[str], sizes: Sequence[str]) -> list[str]:
        """What a reader of a table must know about the runs in it."""
        rows, notes = {scheme: row for row, scheme in ROWS.items()}, []
        for recipe, shown in self.shown.items():
            place = f"{_row_name(rows[recipe.scheme], recipe.reading)}, {CORPORA[recipe.dataset]} {recipe.size}"
            if shown.departures and recipe.dataset in corpora and recipe.size in sizes:
                notes.append(
                    f"{DEPARTS} The run of {place}, has settings that differ from the paper's: "
                    f"{'; '.join(shown.departures)}."
                )
        return notes


def _row_name(row: str, reading: str | None) -> str:
    return row if reading is None else f"{row}, {reading}"


def _paper_cell(text: str, table: str) -> TableCell:
    return TableCell(text, float(text), f"{SOURCE}, {table}")


def _loss_table(corpus: str, here: RunsBesideThePaper) -> Table:
    columns, rows = ["scheme"], []
    for size in SIZES:
        columns += [f"{size} {kind}, {origin}" for kind in ("train", "val") for origin in ("paper", "here")]
    for row, reading in here.rows(corpus):
        cells = [TableCell(_row_name(row, reading))]
        for size in SIZES:
            paper, place = LOSSES[row, corpus, size], (row, reading, corpus, size)
            cells += [
                _paper_cell(paper.train, "table of losses"),
                here.cell(place, partial(Result.number, key="train_loss"), format_loss),
                _paper_cell(paper.val, "table of losses"),
                here.cell(place, partial(Result.number, key="val_loss"), format_loss),
            ]
        rows.append(cells)
    notes = here.notes([corpus], SIZES)
    return Table(f"paper-loss-{corpus}", f"Loss on {CORPORA[corpus]}", columns, rows, notes)


def _zero_shot_table(corpus: str, here: RunsBesideThePaper) -> Table:
    columns, rows = ["scheme"], []
    for heading in (*(column.heading for column in PAPER_COLUMNS), "average acc"):
        columns += [f"{heading}, {origin}" for origin in ("paper", "here")]
    for row, reading in here.rows(corpus, ["L"]):
        cells, place = [TableCell(_row_name(row, reading))], (row, reading, corpus, "L")
        for column, text in zip(PAPER_COLUMNS, ZERO_SHOT[corpus][row], strict=True):
            ours = partial(zero_shot_number, column=column)
            cells += [
                _paper_cell(text, "zero-shot table"),
                here.cell(place, ours, format_perplexity, evaluation_marks),
            ]
        average = AVERAGE_ACCURACIES[corpus][row]
        source = f"mean of the ten accuracies of {SOURCE}, zero-shot table"
        cells += [
            TableCell(format_average(average), float(average), source),
            here.cell(place, average_accuracy, format_perplexity, evaluation_marks),
        ]
        rows.append(cells)
    marked = any("(" in cell.text for cells in rows for cell in cells[1:])
    notes = [
        "Average acc is the mean of the ten accuracies. The paper's own is computed from its table.",
        *([MARKS] if marked else []),
        *here.notes([corpus], ["L"]),
    ]
    return Table(f"paper-zero-shot-{corpus}", f"Zero-shot, L, trained on {CORPORA[corpus]}", columns, rows, notes)


def paper_section(groups: Sequence[RunGroup]) -> Section:
    """The paper's tables with the runs of all groups beside them."""
    here = RunsBesideThePaper(groups)
    tables = [
        *(_loss_table(corpus, here) for corpus in CORPORA),
        *(_zero_shot_table(corpus, here) for corpus in CORPORA),
    ]
    paragraphs = [
        f'Columns "paper" are the numbers of {SOURCE}. Columns "here" are the runs of this report with the same '
        f"scheme, size and corpus. S, M and L are the model sizes of the paper. A number with {DEPARTS} is from a "
        f"run that departs from the paper's recipe. The notes below its table name every setting that differs."
    ]
    readings = [name for name in READINGS if any(run.reading == name for run in here.shown)]
    paragraphs += [
        f"Rows that end in {name} follow a different reading of the paper. {READINGS[name].question} "
        f"{READINGS[name].other} The other rows: {READINGS[name].answer}"
        for name in readings
    ]
    if not here.shown:
        paragraphs.append(
            f'No run of this report has a scheme, size and corpus of the paper, so every cell "here" is "{NOT_RUN}".'
        )
    return Section("paper", "Comparison with the paper", [*paragraphs, *FOOTNOTES], tables, folded=not here.shown)


def summary_section(group: RunGroup) -> Section:
    """What was run: the shared settings, the seeds, the settings that differ, and each alarm."""
    count = len(group.contestants)
    settings = [key for key in group.differing if key not in RATE_SETTINGS]
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
    # what all runs share stands in the config of the first
    config, train = group.results[0].run.config, group.results[0].run.settings.train
    model, data = config.model, config.data
    texts = {
        "layers": f"{model.layers} layers",
        "width": f"width {model.width}",
        "steps": f"{train.steps:,} steps",
        "tokens_per_update": f"{train.tokens_per_update:,} tokens per step",
        "head_bias": f"head bias {model.head_bias}",
        "head": f"{model.head} head",
    }
    shared = [text for key, text in texts.items() if key not in group.differing]
    return ", ".join([f"corpus {corpus_name(config.as_dict())}", f"tokenizer {data.tokenizer.name}", *shared])
