"""The zero-shot metrics of runs, and the paper's tables with the runs of this report beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spheret.evaluate.eval_json import MetricRecord
from spheret.evaluate.results import EvalCell, average, read, table
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.lab.page.section import Section, Table, TableCell
from spheret.lab.runs import Result, RunGroup, SourcedNumber
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


def perplexity(loss: SourcedNumber | None) -> SourcedNumber | None:
    """exp(loss), or None if there is no loss or the result would overflow a float."""
    if loss is None or loss.value > 700:
        return None
    return SourcedNumber(math.exp(loss.value), f"exp({loss.source})")


def number_cell(
    numbers: Sequence[SourcedNumber | None], format_number: Callable[[float], str], missing: str = "-"
) -> TableCell:
    """A cell from one number per seed: the number itself, or the mean and standard deviation of several.

    The cell shows `missing` if a number is missing.
    """
    present = [number for number in numbers if number is not None]
    if not present or len(present) < len(numbers):
        return TableCell(missing)
    if len(present) == 1:
        return TableCell(format_number(present[0].value), present[0].value, present[0].source)
    mean, deviation = mean_and_deviation([number.value for number in present])
    sources = ", ".join(number.source for number in present)
    text = f"{format_number(mean)} \u00b1 {format_number(deviation)}"
    return TableCell(text, mean, f"mean({sources}) \u00b1 sd({sources})")


def zero_shot_number(result: Result, task: str, metric: str) -> SourcedNumber | None:
    """One metric of a run's eval.json, accuracies in percent as in the paper; None if it was not measured."""
    if not _is_evaluated(result):
        return None
    for cell in table([result.run.path])[0].cells:
        if (cell.column.task, cell.column.metric) == (task, metric) and cell.value is not None:
            return SourcedNumber(cell.value, f"{result.name}/{EVAL} tasks.{task}.metrics.{metric}")
    return None


def average_accuracy(result: Result) -> SourcedNumber | None:
    """The mean of the ten accuracies of a run's eval.json in percent; None if one of them was not measured."""
    mean = average(read(result.run.path)) if _is_evaluated(result) else None
    if mean is None or mean.value is None:
        return None
    return SourcedNumber(mean.value, f"{result.name}/{EVAL} mean of the ten accuracies")


def evaluation_marks(result: Result) -> list[str]:
    """What makes an evaluation less than the paper's: a limit of documents, or a step that is not the last."""
    if not _is_evaluated(result):
        return []
    evaluation = read(result.run.path)
    marks = [] if evaluation.limit is None else [f"limit {evaluation.limit}"]
    return [*marks, *([] if evaluation.step == result.run.steps else [f"step {evaluation.step}"])]


def zero_shot_section(group: RunGroup) -> Section | None:
    """The zero-shot metrics of every evaluated run."""
    evaluated = [result for result in group.results if _is_evaluated(result)]
    if not evaluated:
        return None
    return Section("zero-shot", "Zero-shot", tables=[_metrics_table(evaluated)], folded=True)


def _is_evaluated(result: Result) -> bool:
    return (result.run.path / EVAL).exists()


def _metrics_table(evaluated: list[Result]) -> Table:
    evaluations = table([result.run.path for result in evaluated])
    headings = [f"{column.name} {column.metric}" for column in PAPER_COLUMNS]
    rows = []
    for result, evaluation in zip(evaluated, evaluations, strict=True):
        file = f"{result.name}/{EVAL}"
        cells = [_metric_cell(cell, file, cell.column.task, cell.column.metric) for cell in evaluation.cells]
        rows.append([TableCell(result.name), *cells, _metric_cell(evaluation.average, file, "all", "accuracies")])
    notes = [
        "Accuracies are in percent. Each number is followed by its standard error. The average is over the ten "
        "accuracies."
    ]
    for result in evaluated:
        marks = evaluation_marks(result)
        if marks:
            notes.append(f"{result.name} was evaluated with {', '.join(marks)}. {MARKS}")
    return Table("zero-shot", "Zero-shot metrics", ["run", *headings, "average accuracy"], rows, notes)


def _metric_cell(cell: EvalCell | MetricRecord | None, file: str, task: str, metric: str) -> TableCell:
    if cell is None or cell.value is None:
        return TableCell("not run")
    error = "" if cell.stderr is None else f" \u00b1 {cell.stderr:.2f}"
    return TableCell(f"{cell.value:.2f}{error}", cell.value, f"{file} tasks.{task}.metrics.{metric}")


@dataclass(frozen=True)
class Candidate:
    """The runs of one contestant that belong beside a cell of the paper's tables, with all their departures."""

    runs: Sequence[Result]
    departures: list[str]

    @property
    def names(self) -> str:
        return ", ".join(run.name for run in self.runs)


class RunsBesideThePaper:
    """The finished runs that belong beside the paper's tables, by the run of the paper that they repeat.

    If several contestants belong to one cell, the one that departs least from the recipe is shown.
    """

    def __init__(self, groups: Sequence[RunGroup]) -> None:
        self.candidates: dict[PaperRun, list[Candidate]] = {}
        for group in groups:
            for runs in (runs for rates in group.by_rate.values() for runs in rates.values()):
                recipe = recipe_of(runs[0].run.config.as_dict())
                if recipe is not None and all(run.number("val_loss") for run in runs):
                    found = [text for run in runs for text in departures(run.run.config.as_dict(), recipe)]
                    candidate = Candidate(runs, list(dict.fromkeys(found)))
                    self.candidates.setdefault(recipe, []).append(candidate)
        for candidates in self.candidates.values():
            # by name and rate among equals: by the order of the group the best loss would be picked
            candidates.sort(key=lambda each: (len(each.departures), each.runs[0].label, each.runs[0].rate))

    def rows(self, corpus: str, sizes: Sequence[str] = SIZES) -> list[tuple[str, str | None]]:
        """The rows of a table: the paper's, and below each the other readings that were run."""
        read = {(run.scheme, run.reading) for run in self.candidates if run.dataset == corpus and run.size in sizes}
        return [
            (row, reading)
            for row, scheme in ROWS.items()
            for reading in (None, *READINGS)
            if reading is None or (scheme, reading) in read
        ]

    def _shown(self, row: str, reading: str | None, corpus: str, size: str) -> Candidate | None:
        candidates = self.candidates.get(PaperRun(corpus, size, ROWS[row], reading=reading))
        return candidates[0] if candidates else None

    def cell(
        self,
        place: tuple[str, str | None, str, str],
        number: Callable[[Result], SourcedNumber | None],
        format_number: Callable[[float], str],
        marks: Callable[[Result], list[str]] = lambda run: [],
    ) -> TableCell:
        """The number of the runs at (row, reading, corpus, size), followed by what sets it apart from the paper's."""
        shown = self._shown(*place)
        if shown is None:
            return TableCell(NOT_RUN)
        cell = number_cell([number(run) for run in shown.runs], format_number, NOT_RUN)
        if cell.value is None:
            return cell
        words = list(dict.fromkeys(mark for run in shown.runs for mark in marks(run)))
        text = cell.text + (f" ({', '.join(words)})" if words else "") + (f" {DEPARTS}" if shown.departures else "")
        return replace(cell, text=text)

    def notes(self, corpora: Sequence[str], sizes: Sequence[str]) -> list[str]:
        """What a reader of a table must know about the runs in it."""
        rows, notes = {scheme: row for row, scheme in ROWS.items()}, []
        for recipe, (shown, *others) in self.candidates.items():
            if recipe.dataset not in corpora or recipe.size not in sizes:
                continue
            place = f"{_row_name(rows[recipe.scheme], recipe.reading)}, {CORPORA[recipe.dataset]} {recipe.size}"
            if shown.departures:
                notes.append(
                    f"{DEPARTS} The run of {place}, has settings that differ from the paper's: "
                    f"{'; '.join(shown.departures)}."
                )
            if others:
                notes.append(
                    f"{place}, shows {shown.names}, which departs least from the recipe, and not "
                    f"{', '.join(other.names for other in others)}."
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


def _perplexity(run: Result) -> SourcedNumber | None:
    return perplexity(run.number("val_loss"))


def _perplexity_table(here: RunsBesideThePaper) -> Table:
    columns, rows = ["scheme"], []
    for name in CORPORA.values():
        columns += [f"{name} {size}, {origin}" for size in SIZES for origin in ("paper", "here")]
    # a reading that was run on one corpus has a row here too
    present = {place for corpus in CORPORA for place in here.rows(corpus)}
    order = [(row, reading) for row in ROWS for reading in (None, *READINGS) if (row, reading) in present]
    for row, reading in order:
        cells = [TableCell(_row_name(row, reading))]
        for corpus in CORPORA:
            for size in SIZES:
                cells += [
                    _paper_cell(LOSSES[row, corpus, size].perplexity, "table of perplexities"),
                    here.cell((row, reading, corpus, size), _perplexity, format_perplexity),
                ]
        rows.append(cells)
    notes = here.notes(list(CORPORA), SIZES)
    return Table("paper-perplexity", "Validation perplexity", columns, rows, notes)


def _zero_shot_table(corpus: str, here: RunsBesideThePaper) -> Table:
    columns, rows = ["scheme"], []
    for heading in (*(column.heading for column in PAPER_COLUMNS), "average acc"):
        columns += [f"{heading}, {origin}" for origin in ("paper", "here")]
    for row, reading in here.rows(corpus, ["L"]):
        cells, place = [TableCell(_row_name(row, reading))], (row, reading, corpus, "L")
        for column, text in zip(PAPER_COLUMNS, ZERO_SHOT[corpus][row], strict=True):
            number = partial(zero_shot_number, task=column.task, metric=column.metric)
            cells += [
                _paper_cell(text, "zero-shot table"),
                here.cell(place, number, format_perplexity, evaluation_marks),
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
        _perplexity_table(here),
        *(_zero_shot_table(corpus, here) for corpus in CORPORA),
    ]
    paragraphs = [
        f'Columns "paper" are the numbers of {SOURCE}. Columns "here" are the runs of this report with the same '
        f"scheme, size and corpus. S, M and L are the model sizes of the paper. A number with {DEPARTS} is from a "
        f"run that departs from the paper's recipe. The notes below its table name every setting that differs."
    ]
    readings = [name for name in READINGS if any(run.reading == name for run in here.candidates)]
    paragraphs += [
        f"Rows that end in {name} follow another reading of the paper. {READINGS[name].question} "
        f"{READINGS[name].other} The other rows: {READINGS[name].answer}"
        for name in readings
    ]
    if not here.candidates:
        paragraphs.append(
            f'No run of this report has a scheme, size and corpus of the paper, so every cell "here" is "{NOT_RUN}".'
        )
    return Section(
        "paper", "Comparison with the paper", [*paragraphs, *FOOTNOTES], tables, folded=not here.candidates
    )
