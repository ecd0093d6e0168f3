"""The paper's tables with this report's runs beside them: same rows, "paper" and "here"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from spheret.model.gpt import PRESETS
from spheret.report import published
from spheret.report.extras import zero_shot_number
from spheret.report.results import Number, Result, Study
from spheret.report.sections import Section, cell, exponential, loss, perplexity
from spheret.report.tables import Cell, Table
from spheret.runs.recipes import LEARNING_RATES, PAPER

NOT_RUN = "not run"
# a cell of the paper: row, corpus, size
Key = tuple[str, str, str]


def corpus_of(result: Result) -> str | None:
    corpus = result.run.config["data"].get("corpus")
    return corpus.get("name") if isinstance(corpus, dict) else corpus


def size_of(result: Result) -> str | None:
    """S, M or L where the model has that shape."""
    model = result.run.config["model"]
    shape = model["layers"], model["heads"], model["width"]
    return next((size for size, preset in PRESETS.items() if preset == shape), None)


def departures(result: Result) -> list[str]:
    """In what a run of the paper's size and corpus is not the paper's."""
    config = result.run.config
    have = {**config["model"], **config["train"]}
    size = size_of(result)
    shared = {**PAPER["model"], **PAPER["train"]}
    paper = {key: shared[key] for key in ("steps", "tokens_per_update", "block", "vocab", "precision", "head_bias")}
    paper |= {"lr": LEARNING_RATES[size]} if size else {}
    return [f"{key} {have.get(key)} for {value}" for key, value in paper.items() if have.get(key) != value]


def matches(study: Study) -> dict[Key, list[Result]]:
    """Which runs are of a cell of the paper's tables; options of a scheme make it another one."""
    rows = {scheme: row for row, scheme in published.ROWS.items()}
    found: dict[Key, list[Result]] = {}
    for runs in study.contestants.values():
        first = runs[0]
        corpus, size, row = corpus_of(first), size_of(first), rows.get(first.scheme)
        # the paper's own clamp leaves a scheme the paper's
        plain = set(first.run.config["model"].get("scheme_options") or ()) <= {"exact_clamp"}
        if row and plain and corpus in published.CORPORA and size and all(run.finished for run in runs):
            # of several contestants that fit, the first
            found.setdefault((row, str(corpus), size), runs)
    return found


def _here(
    runs: Sequence[Result] | None, number: Callable[[Result], Number | None], form: Callable[[float], str]
) -> Cell:
    return Cell(NOT_RUN) if runs is None else cell([number(run) for run in runs], form, NOT_RUN)


def _there(text: str, what: str) -> Cell:
    return Cell(text, float(text), f"{published.SOURCE}, {what}")


def _loss_table(corpus: str, found: dict[Key, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for size in published.SIZES:
        columns += [f"{size} {kind}, {where}" for kind in ("train", "val") for where in ("paper", "here")]
    for row in published.ROWS:
        cells = [Cell(row)]
        for size in published.SIZES:
            paper, runs = published.LOSSES[row, corpus, size], found.get((row, corpus, size))
            cells += [
                _there(paper.train, "table of losses"),
                _here(runs, lambda run: run.train_loss, loss),
                _there(paper.val, "table of losses"),
                _here(runs, lambda run: run.val_loss, loss),
            ]
        rows.append(cells)
    return Table(f"paper-loss-{corpus}", f"Loss on {published.CORPORA[corpus]}", columns, rows)


def _perplexity_table(found: dict[Key, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for name in published.CORPORA.values():
        columns += [f"{name} {size}, {where}" for size in published.SIZES for where in ("paper", "here")]
    for row in published.ROWS:
        cells = [Cell(row)]
        for corpus in published.CORPORA:
            for size in published.SIZES:
                runs = found.get((row, corpus, size))
                cells += [
                    _there(published.LOSSES[row, corpus, size].perplexity, "table of perplexities"),
                    _here(runs, lambda run: exponential(run.val_loss), perplexity),
                ]
        rows.append(cells)
    return Table("paper-perplexity", "Validation perplexity", columns, rows)


def _zero_shot_table(corpus: str, found: dict[Key, list[Result]]) -> Table:
    columns, rows = ["scheme"], []
    for metric in published.METRICS:
        columns += [f"{metric.heading}, {where}" for where in ("paper", "here")]
    for row, texts in published.ZERO_SHOT[corpus].items():
        cells = [Cell(row)]
        for metric, text in zip(published.METRICS, texts, strict=True):
            runs = found.get((row, corpus, "L"))
            cells += [
                _there(text, "zero-shot table"),
                _here(runs, partial(zero_shot_number, task=metric.task, metric=metric.metric), perplexity),
            ]
        rows.append(cells)
    return Table(f"paper-zero-shot-{corpus}", f"Zero-shot, L, trained on {published.CORPORA[corpus]}", columns, rows)


def beside_the_paper(study: Study) -> Section:
    found = matches(study)
    corpora = published.CORPORA
    tables = [
        *(_loss_table(corpus, found) for corpus in corpora),
        _perplexity_table(found),
        *(_zero_shot_table(corpus, found) for corpus in corpora),
    ]
    paragraphs = [
        f"The numbers of {published.SOURCE}, and the runs of this report that have the same size and corpus."
    ]
    if not found:
        paragraphs.append("None of these runs is such a one: every cell of here is not run.")
    for (row, corpus, size), runs in found.items():
        said = departures(runs[0])
        if said:
            paragraphs.append(f"{row}, {corpora[corpus]} {size}, here is not the paper's recipe: {'; '.join(said)}.")
    paragraphs += published.FOOTNOTES
    return Section("paper", "Beside the paper", paragraphs, tables, folded=True)
