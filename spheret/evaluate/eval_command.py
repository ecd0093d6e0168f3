"""`spheret eval`: evaluate a run's model zero-shot by lm_eval, and write eval.json and eval_samples.jsonl."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from spheret import __version__
from spheret.evaluate.eval_json import EVALS, SAMPLES, EvalRecord, SampleRecord, TaskRecord
from spheret.evaluate.results import average, summary
from spheret.evaluate.tasks import ACCURACIES, check_data, load_tasks, parse_tasks
from spheret.evaluate.tasks import prefetch as fetch
from spheret.runs.layout import EVAL, EVAL_SAMPLES
from spheret.support.cache import cache_directory
from spheret.support.errors import need
from spheret.support.files import write_atomically
from spheret.support.ranges import check_counts
from spheret.support.tables import print_whole

# results of two commands may share an eval.json only if these are equal
SETTINGS = ("run", "step", "limit", "precision", "versions")


def eval_command(
    run: str = "",
    /,
    tasks: str = "paper",
    limit: int | None = None,
    batch_size: str = "auto",
    data: Path | None = None,
    prefetch: Path | None = None,
    step: int | None = None,
    device: str | None = None,
    precision: str = "float32",
) -> int:
    """Evaluate a run's model zero-shot with lm_eval. Writes eval.json and eval_samples.jsonl into the run directory.

    For examples in the prompts and tasks of your own, give an export to lm_eval's own command line (`--model hf`).

    Args:
        run: the run directory.
        tasks: "paper" for the paper's eleven tasks, or names of lm_eval's tasks separated by commas.
        limit: evaluate only the first LIMIT documents of each task.
        batch_size: requests per batch, or auto.
        data: a directory of local rows that --prefetch wrote. Without it the rows come from the Hugging Face hub.
        prefetch: fetch the rows of the tasks into this directory, and evaluate nothing.
        step: the checkpoint's step; the newest by default.
        device: cpu, cuda, ...; by default cuda if there is a GPU, else cpu.
        precision: float32, bf16 or float64, of weights and arithmetic.
    """
    names = parse_tasks(tasks)
    if prefetch is not None:
        for name in names:
            print(f"{name}: {fetch(prefetch, [name])[name]:,} rows")
        print(f"evaluate with: spheret eval RUN --data {prefetch}")
        return 0
    if not run:
        raise ValueError("no run is given: name a run directory, or fetch the data of the tasks with --prefetch DIR.")
    check_counts(limit=limit)
    check_counts(0, step=step)
    need("lm_eval", "eval")
    hashes = {} if data is None else check_data(data, names)
    from spheret.evaluate.lm import SpheretLM
    from spheret.runs.run import open_run

    opened = open_run(run)
    model, checkpoint = opened.load(step)
    tokenizer = opened.tokenizer()
    lm = SpheretLM(model=model, tokenizer=tokenizer, batch_size=batch_size, device=device, precision=precision)
    start = time.perf_counter()
    answers = answer(lm, names, limit, data)
    entries, lines = {}, []
    for name in answers["samples"]:
        rows = answers["samples"][name]
        counts = {"requests": lm.requested[name], "truncated": lm.truncated[name]}
        entries[name] = _entry(name, answers, rows, hashes.get(name), counts)
        lines += [_line(name, row) for row in rows]
    results = EvalRecord(
        run=opened.name,
        step=checkpoint.step,
        limit=limit,
        precision=precision,
        device=str(lm.device),
        batch_size=lm.batch_size or "auto",
        seconds=round(time.perf_counter() - start, 3),
        versions={"spheret": __version__, **{name: version(name) for name in ("lm_eval", "datasets", "torch")}},
        tasks=entries,
    )
    _show(_write(opened.path, results, lines))
    return 0


def answer(lm: Any, names: list[str], limit: int | None, data: Path | None) -> dict[str, Any]:
    """lm_eval's results of one of its models on these tasks, with a sample per document."""
    # lm_eval reports every step and every default below this level
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluator = need("lm_eval.evaluator", "eval")
    bars = need("datasets", "eval").utils.logging
    bars.disable_progress_bar()
    cache_directory().mkdir(parents=True, exist_ok=True)
    # without a terminal, lm_eval's progress bars would fill the log
    silence = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with silence, tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            loaded = load_tasks(names, data, Path(scratch))
            for task in loaded["tasks"].values():
                # a task without a number of examples has none
                task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
                task.set_fewshot_seed(seed=1234)
            return evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    finally:
        bars.enable_progress_bar()


def _entry(
    name: str, answers: dict[str, Any], rows: list[dict[str, Any]], data_sha256: str | None, counts: dict[str, int]
) -> TaskRecord:
    identity = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
    metrics = rows[0]["metrics"]
    return TaskRecord(
        **counts,
        documents=len(rows),
        version=answers["versions"].get(name),
        hash=hashlib.sha256(identity.encode()).hexdigest(),
        data_sha256=data_sha256,
        metrics={metric: summary(metric, [row[metric] for row in rows]) for metric in metrics},
    )


def _line(name: str, row: dict[str, Any]) -> SampleRecord:
    return SampleRecord(
        task=name,
        document=row["doc_id"],
        hash=row["doc_hash"],
        metrics={metric: row[metric] for metric in row["metrics"]},
        responses=row["filtered_resps"],
    )


def _write(path: Path, results: EvalRecord, lines: list[SampleRecord]) -> EvalRecord:
    """Write both files and return eval.json. The tasks of an earlier command under the same settings are kept."""
    tasks, kept = _earlier(path, results)
    results = msgspec.structs.replace(results, tasks=tasks | results.tasks)
    write_atomically(path / EVAL_SAMPLES, b"".join(SAMPLES.encode(line) for line in [*kept, *lines]))
    EVALS.write(path / EVAL, results)
    return results


def _earlier(path: Path, results: EvalRecord) -> tuple[dict[str, TaskRecord], list[SampleRecord]]:
    """The tasks of an earlier command under the same settings, without this command's tasks, and their lines."""
    try:
        before = EVALS.read(path / EVAL)
        lines = [line for line, _ in SAMPLES.read(path / EVAL_SAMPLES)]
    except FileNotFoundError:
        return {}, []
    except ValueError as error:
        print(f"{error} Its earlier tasks are left out.", file=sys.stderr)
        return {}, []
    if any(getattr(before, key) != getattr(results, key) for key in SETTINGS):
        return {}, []
    tasks = {name: task for name, task in before.tasks.items() if name not in results.tasks}
    return tasks, [line for line in lines if line.task in tasks]


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"


def _show(results: EvalRecord) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{results.run}, step {results.step}")
    for column in ("task", "metric", "value", "stderr", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for name, task in results.tasks.items():
        for metric, cell in task.metrics.items():
            factor = 100 if metric in ACCURACIES else 1
            error = "" if cell.stderr is None else _number(factor * cell.stderr)
            value = "not finite" if cell.value is None else _number(factor * cell.value)
            table.add_row(name, metric, value, error, f"{task.documents:,}")
    console = Console()
    print_whole(console, table)
    if (mean := average(results)) is not None:
        error = "" if mean.stderr is None else f" +- {mean.stderr:.2f}"
        console.print(f"average zero-shot accuracy {mean.value:.2f}{error}")
    if truncated := results.count("truncated"):
        console.print(
            f"{truncated:,} of {results.count('requests'):,} requests were longer than the context: their left end "
            "was cut off."
        )
