"""Run directories in the format of the trainer, with numbers from a formula, for every case that a test needs."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
from paper_configs import paper_config

from spheret.connections import Spherical, scheme
from spheret.evaluate.results import summary
from spheret.evaluate.tasks import ACCURACIES, PAPER_COLUMNS
from spheret.lab.page.page import page
from spheret.lab.page.section import to_markdown
from spheret.lab.report import run_findings, sections_of
from spheret.lab.runs import RunGroup, read_groups
from spheret.model.gpt import GPTConfig
from spheret.paper.runs import PaperRun
from spheret.runs.layout import EVAL, EVAL_SAMPLES

DOCUMENTS = [700, 1200, 300, 2500, 900, 640]


def write_run(
    path: Path,
    scheme_name: str = "pre-ln",
    seed: int = 1337,
    steps: int = 60,
    layers: int = 2,
    quality: float = 0.0,
    options: dict | None = None,
    until: int | None = None,
    diverged: int | None = None,
    diverged_finite: int | None = None,
    alarm: str | None = None,
    data: str = "a" * 64,
    corpus: str = "sotu",
    train: dict | None = None,
    model: dict | None = None,
    environment: dict | None = None,
    eval_every: int = 20,
) -> Path:
    """Write a run directory and return its path.

    quality: subtracted from every loss. until: the last step. diverged: the step at which the run stopped.
    diverged_finite: the step at which its loss was found to be far too high; it went on.
    """
    rng = np.random.default_rng([seed, *scheme_name.encode()])
    path.mkdir(parents=True)
    config = {
        "format": "spheret-run",
        "version": 3,
        "model": {
            **GPTConfig().as_dict(), "layers": layers, "heads": 2, "width": 32, "block": 64, "vocab": 320,
            "scheme": scheme_name, "scheme_options": options or {}, "head_bias": "unigram", **(model or {}),
        },
        "train": {
            "steps": steps, "batch_size": 8, "tokens_per_update": 512, "lr": 3e-3,
            "min_lr": 3e-4, "warmup": min(6, steps),
            "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0, "seed": seed,
            "precision": "float32", "checkpoint_every": 50, "keep": 2, "compile": False, "init_from": None,
            "optimizer": "adamw", "matrix_lr": None, "embedding_lr": None, "lr_schedule": "cosine",
            "decay_steps": 0, "parametrization": "standard", "base_width": None, "base_layers": None,
            "base_heads": None,
            **(train or {}),
        },
        "evaluation": {
            "eval_every": eval_every, "eval_windows": 64, "on_divergence": "alarm",
        },
        "data": {
            "path": "data", "manifest_sha256": data,
            "tokenizer": {"name": "bytes", "vocab_size": 257, "end_of_text": 256, "file": None, "sha256": "b" * 64},
            "corpus": {"name": corpus, "revision": "0.1.2", "licence": "MIT", "documents_sha256": "c" * 64},
            "tokens": {"train": 11_634_963, "val": 551_037},
            "val_fraction": 0.05, "unigram_entropy": 3.15,
        },
        "environment": {
            "spheret": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "device": "cpu", "processor": "a processor",
            "gpu": None, "threads": 1, "commit": "c0ffee", "command": f"spheret train --scheme {scheme_name}",
            "started": "2026-11-16T00:00:00+00:00", **(environment or {}),
        },
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    spherical = isinstance(scheme(scheme_name, **(options or {})), Spherical)
    last = steps if until is None else until
    lines, spikes = [], 0
    for step in range(1, last + 1):
        loss = 2.4 - quality + 3 * math.exp(-step / 15) + rng.normal(0, 0.05)
        spikes += bool(rng.uniform() < 0.02)
        line = {
            "step": step, "loss": loss, "lr": 3e-3, "grad_norm": 1 + rng.exponential(), "spikes": spikes,
            "tokens_per_second": 8000.0 + rng.normal(), "seconds": 0.064 * step,
        }  # fmt: skip
        if step == diverged:
            lines.append({"step": step, "loss": None, "stopped": "the loss is nan, layer 3 first"})
            break
        if step % eval_every == 0 or step == steps:
            val = 2.45 - quality + 3 * math.exp(-step / 15)
            sums = [n * (val + rng.normal(0, 0.03)) for n in DOCUMENTS]
            line |= {
                "val_loss": math.fsum(sums) / sum(DOCUMENTS),
                "radius": 5.65 if spherical else None,
                "on_bound": ["blocks.0.attention_connection.norm.a"] if spherical else [],
                "sublayers": [
                    {
                        "sublayer": l, "angle_mean": 0.3 / l, "angle_max": 0.5 / l,
                        "alpha": l**-0.5 if spherical else None, "cosine": 0.1 * l,
                        "norm": 5.65 if spherical else 2.0 * l, "drift": 1e-7 if spherical else 0.5,
                        "grad_norm": 0.1,
                    }
                    for l in range(1, 2 * layers + 1)
                ],
            }  # fmt: skip
            if step == steps:
                line["val_documents"] = [[i, n, s] for i, (n, s) in enumerate(zip(DOCUMENTS, sums, strict=True))]
        if diverged_finite is not None and step >= diverged_finite:
            line |= {key: 50.0 for key in ("loss", "val_loss") if key in line}
        if step == diverged_finite:
            sentence = "the loss 50 is above the unigram entropy; sublayer 3 moved most"
            line["events"] = [{"kind": "diverged", "step": step, "where": "sublayer 3", "sentence": sentence}]
        if alarm is not None and step == last:
            line["events"] = [{"kind": "collapsed", "step": step, "where": "sublayer 1", "sentence": alarm}]
        lines.append(line)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_group(paths: list[Path]) -> RunGroup:
    """The only group of some runs."""
    (group,) = read_groups(paths)
    return group


def write_tables(runs: list[Path], out: Path) -> None:
    """Write a report without its figures, which take most of the time."""
    out.mkdir(exist_ok=True)
    sections = sections_of(run_findings(read_groups(runs)))
    (out / "tables.md").write_text(to_markdown(table for section in sections for table in section.tables))
    (out / "report.html").write_text(page("runs", sections))


def write_paper_run(path: Path, recipe: PaperRun, quality: float = 0.0, **train) -> Path:
    """A run with the paper's config, except for the settings in `train`. Only its last 60 steps have evaluations."""
    config = paper_config(recipe)
    config["train"] |= train
    steps = 60
    write_run(path, recipe.scheme, config["train"]["seed"], steps, quality=quality, options=recipe.scheme_options)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, **config}))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    before = config["train"]["steps"] - steps
    rest = '"loss":5.0,"lr":0.001,"grad_norm":1.0,"spikes":0,"tokens_per_second":100.0,"seconds":1.0'
    text = "".join(f'{{"step":{step},{rest}}}\n' for step in range(1, before + 1))
    for line in lines:
        line["step"] += before
    (path / "metrics.jsonl").write_text(text + "".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_evaluation(run: Path, right: int, step: int = 60, limit: int | None = None) -> None:
    """Write the files of spheret eval: `right` of ten documents have the right answer in every task."""
    lines, tasks = [], {}
    for _, task, metric in PAPER_COLUMNS:
        values = [float(i < right) if metric in ACCURACIES else -2.0 - 0.01 * i for i in range(10)]
        if metric == "word_perplexity":
            values = [[10 * value, 10] for value in values]
        counts = {"requests": 20, "truncated": 0, "documents": 10}
        entry = tasks.setdefault(task, {**counts, "version": 1, "hash": "a" * 64, "data_sha256": None, "metrics": {}})
        entry["metrics"][metric] = msgspec.to_builtins(summary(metric, values))
        lines += [(task, i, metric, value) for i, value in enumerate(values)]
    merged = {}
    for task, document, metric, value in lines:
        merged.setdefault((task, document), {})[metric] = value
    document = {
        "format": "spheret-eval", "version": 1, "run": run.name, "step": step, "limit": limit,
        "precision": "float32", "device": "cpu", "batch_size": "auto", "seconds": 1.5, "versions": {},
        "tasks": tasks,
    }  # fmt: skip
    (run / EVAL).write_text(json.dumps(document))
    (run / EVAL_SAMPLES).write_text(
        "".join(
            json.dumps({"task": task, "document": i, "hash": f"h{i}", "metrics": metrics, "responses": []}) + "\n"
            for (task, i), metrics in merged.items()
        )
    )


class PageCells(HTMLParser):
    """The cells of all tables of a page, with their rows, columns, numbers and sources."""

    def __init__(self, text):
        super().__init__()
        self.cells, self._table, self._row, self._into = [], "", "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "table":
            self._table = given["id"].removeprefix("table-")
        elif tag == "tr":
            self._row = ""
        elif tag == "th":
            self._into = "row" if given["scope"] == "row" else None
        elif tag == "td":
            self._into = "text"
            number = {"value": given.get("data-value", ""), "source": given.get("data-source", "")}
            self.cells.append(
                {"table": self._table, "row": self._row, "column": given["data-label"], "text": "", **number}
            )

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._into = None

    def handle_data(self, data):
        if self._into == "row":
            self._row += data
        elif self._into == "text":
            self.cells[-1]["text"] += data


def cells(directory):
    return PageCells((directory / "report.html").read_text()).cells


def cell(directory, table, row, column):
    return next(c for c in cells(directory) if (c["table"], c["row"], c["column"]) == (table, row, column))
