"""The section that shows the paper's tables with the runs of this report beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.model.gpt import PRESETS
from spheret.report.paper_numbers import CORPORA, FOOTNOTES, LOSSES, ROWS, SIZES, SOURCE, ZERO_SHOT
from spheret.report.results import Number, Result, Study
from spheret.report.sections import Section, format_loss, format_perplexity, number_cell, perplexity
from spheret.report.tables import Table, TableCell
from spheret.report.zero_shot import zero_shot_number
from spheret.runs.recipes import LEARNING_RATES, PAPER

NOT_RUN = "not run"
# one cell of the paper's tables: row, corpus, size
PaperCell = tuple[str, str, str]


def corpus_of(result: Result) -> str | None:
    corpus = result.run.config.data.corpus
    return None if corpus is None else corpus.name


def size_of(result: Result) -> str | None:
    """S, M or L if the model has that shape, else None."""
    model = result.run.config.model
    shape = model.layers, model.heads, model.width
    return next((size for size, preset in PRESETS.items() if preset == shape), None)


def different_settings(result: Result) -> list[str]:
    """The settings of a run that differ from the paper's, each as "KEY VALUE instead of VALUE"."""
    config = result.run.config
    settings = config.settings("model") | config.settings("train")
    size = size_of(result)
    shared = {**PAPER["model"], **PAPER["train"]}
    paper = {key: shared[key] for key in ("steps", "tokens_per_update", "block", "vocab", "precision", "head_bias")}
    paper |= {"lr": LEARNING_RATES[size]} if size else {}
    return [
        f"{key} {settings.get(key)} instead of {value}" for key, value in paper.items() if settings.get(key) != value
    ]


def runs_by_paper_cell(study: Study) -> dict[PaperCell, list[Result]]:
    """The finished runs that belong beside a cell of the paper's tables.

    A scheme with options is not a scheme of the paper. If several contestants belong to one cell, the first is taken.
    """
    rows = {scheme: row for row, scheme in ROWS.items()}
    by_cell: dict[PaperCell, list[Result]] = {}
    for runs in study.contestants.values():
        first = runs[0]
        corpus, size, row = corpus_of(first), size_of(first), rows.get(first.scheme)
        # the paper itself uses exact_clamp, so a scheme with this option is still the paper's
        plain = set(first.run.config.model.scheme_options) <= {"exact_clamp"}
        if row and plain and corpus in CORPORA and size and all(run.finished for run in runs):
            by_cell.setdefault((row, str(corpus), size), runs)
    return by_cell


def _run_cell(
    runs: Sequence[Result] | None, number: Callable[[Result], Number | None], format_number: Callable[[float], str]
) -> TableCell:
    return TableCell(NOT_RUN) if runs is None else number_cell([number(run) for run in runs], format_number, NOT_RUN)


def _paper_cell(text: str, table: str) -> TableCell:
    return TableCell(text, float(text), f"{SOURCE}, {table}")


def _loss_table(corpus: str, by_cell: dict[PaperCell, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for size in SIZES:
        columns += [f"{size} {kind}, {origin}" for kind in ("train", "val") for origin in ("paper", "here")]
    for row in ROWS:
        cells = [TableCell(row)]
        for size in SIZES:
            paper, runs = LOSSES[row, corpus, size], by_cell.get((row, corpus, size))
            cells += [
                _paper_cell(paper.train, "table of losses"),
                _run_cell(runs, lambda run: run.train_loss, format_loss),
                _paper_cell(paper.val, "table of losses"),
                _run_cell(runs, lambda run: run.val_loss, format_loss),
            ]
        rows.append(cells)
    return Table(f"paper-loss-{corpus}", f"Loss on {CORPORA[corpus]}", columns, rows)


def _perplexity_table(by_cell: dict[PaperCell, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for name in CORPORA.values():
        columns += [f"{name} {size}, {origin}" for size in SIZES for origin in ("paper", "here")]
    for row in ROWS:
        cells = [TableCell(row)]
        for corpus in CORPORA:
            for size in SIZES:
                cells += [
                    _paper_cell(LOSSES[row, corpus, size].perplexity, "table of perplexities"),
                    _run_cell(
                        by_cell.get((row, corpus, size)), lambda run: perplexity(run.val_loss), format_perplexity
                    ),
                ]
        rows.append(cells)
    return Table("paper-perplexity", "Validation perplexity", columns, rows)


def _zero_shot_table(corpus: str, by_cell: dict[PaperCell, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for column in PAPER_COLUMNS:
        columns += [f"{column.heading}, {origin}" for origin in ("paper", "here")]
    for row, texts in ZERO_SHOT[corpus].items():
        cells = [TableCell(row)]
        runs = by_cell.get((row, corpus, "L"))
        for column, text in zip(PAPER_COLUMNS, texts, strict=True):
            cells += [
                _paper_cell(text, "zero-shot table"),
                _run_cell(runs, partial(zero_shot_number, task=column.task, metric=column.metric), format_perplexity),
            ]
        rows.append(cells)
    return Table(f"paper-zero-shot-{corpus}", f"Zero-shot, L, trained on {CORPORA[corpus]}", columns, rows)


def paper_section(study: Study) -> Section:
    by_cell = runs_by_paper_cell(study)
    tables = [
        *(_loss_table(corpus, by_cell) for corpus in CORPORA),
        _perplexity_table(by_cell),
        *(_zero_shot_table(corpus, by_cell) for corpus in CORPORA),
    ]
    paragraphs = [
        f'Columns "paper" are the numbers of {SOURCE}. Columns "here" are the runs of this report with the same '
        f"scheme, size and corpus. S, M and L are the model sizes of the paper."
    ]
    if not by_cell:
        paragraphs.append(
            f'No run of this report has a scheme, size and corpus of the paper, so every cell "here" is "{NOT_RUN}".'
        )
    for (row, corpus, size), runs in by_cell.items():
        settings = different_settings(runs[0])
        if settings:
            paragraphs.append(
                f"The run of {row}, {CORPORA[corpus]} {size}, has settings that differ from the paper's: "
                f"{'; '.join(settings)}."
            )
    return Section("paper", "Comparison with the paper", [*paragraphs, *FOOTNOTES], tables, folded=True)
