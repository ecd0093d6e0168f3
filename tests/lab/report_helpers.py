"""Run directories in the format of the trainer, with numbers from a formula, for every case that a test needs."""

import csv
import io
import json
import math
import re
from pathlib import Path

import msgspec
import numpy as np
from paper_configs import paper_config

from spheret.connections import Spherical, scheme
from spheret.evaluate.results import is_accuracy, summary
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.lab.report import report_files, run_findings
from spheret.lab.rows import RESULTS, Key, row_of_run, write_rows
from spheret.lab.runs import RunGroup, read_groups
from spheret.lab.statistics import mean_and_deviation
from spheret.paper.runs import PaperRun
from spheret.runs.layout import EVAL, EVAL_SAMPLES
from spheret.runs.run import open_run
from spheret.runs.run_sample import RunSample

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
    sample: str | None = None,
) -> Path:
    """Write a run directory and return its path.

    quality: subtracted from every loss. until: the last step. diverged: the step at which the run stopped.
    diverged_finite: the step at which its loss was found to be far too high; it went on.
    sample: the text of sample.json.
    """
    rng = np.random.default_rng([seed, *scheme_name.encode()])
    path.mkdir(parents=True)
    config = {
        "format": "spheret-run",
        "version": 3,
        "model": {
            "layers": layers, "heads": 2, "width": 32, "block": 64, "vocab": 320, "bias": True, "dropout": 0.0,
            "scheme": scheme_name, "scheme_options": options or {}, "activation": "gelu", "head_bias": "unigram",
            "recompute": False, **(model or {}),
        },
        "train": {
            "steps": steps, "batch_size": 8, "tokens_per_update": 512, "lr": 3e-3,
            "min_lr": 3e-4, "warmup": min(6, steps),
            "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0, "seed": seed,
            "precision": "float32", "checkpoint_every": 50, "keep": 2, "compile": False, "init_from": None,
            **(train or {}),
        },
        "evaluation": {
            "eval_every": eval_every, "eval_windows": 64, "certify_every": 0, "on_divergence": "alarm",
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
            line["diverged"] = "the loss 50 is above the unigram entropy; sublayer 3 moved most"
        if alarm is not None and step == last:
            line["alarm"] = alarm
        lines.append(line)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if sample is not None:
        RunSample(sample, "", 1337, 0.8, 128, last).write(path)
    return path


def write_costs(folder: Path, seconds: dict[str, float]) -> None:
    """Write results.jsonl of the runs in a folder, as a race does, with the seconds of a step of some schemes."""
    rows = []
    for config in sorted(folder.glob("*/config.json")):
        settings = json.loads(config.read_text())
        name, train = settings["model"]["scheme"], settings["train"]
        row = row_of_run(open_run(config.parent), Key("race", name, train["lr"], train["seed"]))
        assert row is not None
        rows.append(msgspec.structs.replace(row, step_seconds=seconds.get(name)))
    write_rows(folder / RESULTS, rows)


def read_group(paths: list[Path]) -> RunGroup:
    """The only group of some runs."""
    (group,) = read_groups(paths)
    return group


def write_tables(runs: list[Path], out: Path) -> None:
    """Write a report without its figures, which take most of the time."""
    out.mkdir(exist_ok=True)
    for name, data in report_files(run_findings(read_groups(runs)), []).items():
        (out / name).write_bytes(data)


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
        values = [float(i < right) if is_accuracy(metric) else -2.0 - 0.01 * i for i in range(10)]
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
        "tasks": tasks, "requests": 20 * len(tasks), "truncated": 0,
    }  # fmt: skip
    (run / EVAL).write_text(json.dumps(document))
    (run / EVAL_SAMPLES).write_text(
        "".join(
            json.dumps({"task": task, "document": i, "hash": f"h{i}", "metrics": metrics, "responses": []}) + "\n"
            for (task, i), metrics in merged.items()
        )
    )


def cells(directory):
    return list(csv.DictReader(io.StringIO((directory / "tables.csv").read_text())))


def cell(directory, table, row, column):
    return next(c for c in cells(directory) if (c["table"], c["row"], c["column"]) == (table, row, column))


# results.jsonl[RUN].step_seconds
STEP_COST = re.compile(r"results\.jsonl\[([^\]]+)\]\.step_seconds")
# RUN/config.json[SECTION.KEY]
SETTING = re.compile(r"([^\s,(]+)/config\.json\[(\w+)\.(\w+)\]")
# RUN[STEP].KEY and RUN[FIRST..LAST].KEY
REFERENCE = re.compile(r"([^\s,(]+)\[(\d+)(?:\.\.(\d+))?\]\.([\w.]+)")
# RUN.val_loss: that of the last line
LAST = re.compile(r"([^\s,(]+)\.val_loss")


def recompute(root, source):
    """Evaluate a source over metrics.jsonl. Of the report's code, only the statistics are used."""

    def lines_of(name):
        return [json.loads(text) for text in (root / name / "metrics.jsonl").read_text().splitlines()]

    def look_up(reference):
        name, first, last, key = reference.groups()
        lines = lines_of(name)
        if last is None:
            (line,) = [line for line in lines if line["step"] == int(first)]
            value = line[key] if "." not in key else [part[key.split(".")[1]] for part in line["sublayers"]]
        else:
            value = [line[key] for line in lines if int(first) <= line["step"] <= int(last)]
        return json.dumps(value)

    def step_seconds(reference):
        rows = map(json.loads, (root / "results.jsonl").read_text().splitlines())
        return str(next(row["step_seconds"] for row in rows if row["run"] == reference[1]))

    def flat(*values):
        return values[0] if isinstance(values[0], list) else list(values)

    functions = {
        "mean": lambda *v: math.fsum(flat(*v)) / len(flat(*v)), "sd": lambda *v: mean_and_deviation(flat(*v))[1],
        "exp": math.exp, "min": min, "max": max, "first": lambda v: v[0], "last": lambda v: v[-1], "count": len,
    }  # fmt: skip
    source = STEP_COST.sub(step_seconds, source)
    source = SETTING.sub(lambda r: str(json.loads((root / r[1] / "config.json").read_text())[r[2]][r[3]]), source)
    formula = REFERENCE.sub(look_up, source.partition(" \u00b1 ")[0])
    formula = LAST.sub(lambda r: str(lines_of(r[1])[-1]["val_loss"]), formula)
    return eval(formula, {"__builtins__": {}}, functions)
