"""`spheret eval`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spheret import __version__
from spheret.evaluate import eval_json
from spheret.evaluate.tasks import TASKS, check_data, load, names_of, unknown_task
from spheret.evaluate.tasks import prefetch as fetch
from spheret.runs.layout import EVAL, EVAL_SAMPLES
from spheret.support.cache import cache_directory
from spheret.support.errors import need
from spheret.support.files import dump, write_atomically

# what must be equal for results of different commands to stand in one file
SETTINGS = ("run", "step", "limit", "dtype", "versions")


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
    dtype: str = "float32",
) -> int:
    """Evaluate a run's model zero-shot through lm_eval, and write eval.json and eval_samples.jsonl beside it.

    Args:
        run: the run directory.
        tasks: "paper" for its eleven, or names of lm_eval's tasks separated by commas.
        limit: only so many documents of each task.
        batch_size: requests in a batch, or auto.
        data: a directory of local rows, as --prefetch writes it; without it the Hugging Face hub is asked.
        prefetch: fetch the rows of the tasks into this directory, and evaluate nothing.
        step: which checkpoint; the newest by default.
        device: cpu, cuda, ...; by default cuda where there is one.
        dtype: float32, bfloat16, float16 or float64.
    """
    try:
        if prefetch is not None:
            return _prefetch(prefetch, tasks)
        if not run:
            raise ValueError("which run? Give a run directory, or --prefetch DIR to fetch the data of the tasks.")
        found = evaluate(run, tasks, limit, batch_size, data, step, device, dtype)
    except KeyboardInterrupt:
        print("stopped: nothing was written.", file=sys.stderr)
        return 130
    _show(found)
    return 0


def _prefetch(directory: Path, asked: str) -> int:
    for name in names_of(asked):
        for task, rows in fetch(directory, [name]).items():
            print(f"{task}: {rows:,} rows")
    print(f"evaluate with: spheret eval RUN --data {directory}")
    return 0


def evaluate(
    run: str | Path,
    asked: str = "paper",
    limit: int | None = None,
    batch_size: int | str = "auto",
    data: Path | None = None,
    step: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """What `spheret eval` writes into eval.json, after it has written it."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 document, got {limit}.")
    need("lm_eval", "eval")
    names = names_of(asked)
    hashes = {} if data is None else check_data(data, _known(names))
    from spheret.evaluate.lm import SpheretLM
    from spheret.runs.run import open_run

    opened = open_run(run)
    checkpoint = opened.checkpoint(step)
    lm = SpheretLM(
        model=opened.model(checkpoint.step),
        tokenizer=opened.tokenizer(),
        batch_size=batch_size,
        device=device,
        dtype=dtype,
    )
    begun = time.perf_counter()
    answers = answer(lm, names, limit, data)
    entries, lines = {}, []
    for name in answers["samples"]:
        rows = answers["samples"][name]
        counts = {"requests": lm.asked[name], "truncated": lm.truncated[name]}
        entries[name] = counts | _entry(name, answers, rows, hashes.get(name))
        lines += [_line(name, row) for row in rows]
    found = {
        "format": eval_json.FORMAT,
        "version": eval_json.VERSION,
        "run": opened.name,
        "step": checkpoint.step,
        "limit": limit,
        "dtype": dtype,
        "device": str(lm.device),
        "batch_size": lm.batch_size or "auto",
        "seconds": round(time.perf_counter() - begun, 3),
        "versions": {"spheret": __version__, **{name: version(name) for name in ("lm_eval", "datasets", "torch")}},
        "tasks": entries,
    }
    _write(opened.path, found, lines)
    return found


def _known(names: Sequence[str]) -> Sequence[str]:
    """The names, where all of them are tasks that local rows can serve."""
    for name in names:
        if name not in TASKS:
            raise unknown_task(name, TASKS)
    return names


def answer(lm: Any, names: list[str], limit: int | None, data: Path | None) -> dict[str, Any]:
    """lm_eval's own results of any model of its on these tasks, zero-shot, with what every document gave."""
    # it reports every step and every default at these levels
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluator = need("lm_eval.evaluator", "eval")
    bars = need("datasets", "eval").utils.logging
    bars.disable_progress_bar()
    cache_directory().mkdir(parents=True, exist_ok=True)
    # and its bars are lines without end where there is no terminal
    silence = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with silence, tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            loaded = load(names, data, Path(scratch))
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=1234)
            return evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    finally:
        bars.enable_progress_bar()


def _entry(name: str, answers: dict[str, Any], rows: list[dict[str, Any]], data: str | None) -> dict[str, Any]:
    identity = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
    metrics = rows[0]["metrics"]
    return {
        "documents": len(rows),
        "version": answers["versions"].get(name),
        "hash": hashlib.sha256(identity.encode()).hexdigest(),
        "data_sha256": data,
        "metrics": {metric: eval_json.summary(metric, [row[metric] for row in rows]) for metric in metrics},
    }


def _line(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": name,
        "document": row["doc_id"],
        "hash": row["doc_hash"],
        "metrics": {metric: row[metric] for metric in row["metrics"]},
        "responses": row["filtered_resps"],
    }


def _write(path: Path, found: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Both files; tasks that an earlier command did under the same settings stay, and are taken into `found`."""
    try:
        before = eval_json.read(path)
        kept = (path / EVAL_SAMPLES).read_bytes().splitlines()
    except (OSError, ValueError):
        before, kept = {}, []
    fresh = [json.dumps(line, sort_keys=True, ensure_ascii=False).encode() for line in lines]
    if before and all(before[key] == found[key] for key in SETTINGS):
        fresh = [line for line in kept if json.loads(line)["task"] not in found["tasks"]] + fresh
        found["tasks"] = before["tasks"] | found["tasks"]
    for count in ("requests", "truncated"):
        found[count] = sum(task.get(count, 0) for task in found["tasks"].values())
    write_atomically(path / EVAL_SAMPLES, b"".join(line + b"\n" for line in fresh))
    write_atomically(path / EVAL, dump(found))


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{found['run']}, step {found['step']}")
    for column, side in (
        ("task", "left"),
        ("metric", "left"),
        ("value", "right"),
        ("stderr", "right"),
        ("documents", "right"),
    ):
        shown.add_column(column, justify=side)  # type: ignore[arg-type]
    for name, task in found["tasks"].items():
        for metric, cell in task["metrics"].items():
            factor = 100 if eval_json.is_accuracy(metric) else 1
            error = "" if cell["stderr"] is None else _number(factor * cell["stderr"])
            shown.add_row(name, metric, _number(factor * cell["value"]), error, f"{task['documents']:,}")
    console = Console()
    console.print(shown)
    if (mean := eval_json.average(found)) is not None:
        error = "" if mean["stderr"] is None else f" +- {mean['stderr']:.2f}"
        console.print(f"average zero-shot accuracy {mean['value']:.2f}{error}")
    if found["truncated"]:
        console.print(
            f"{found['truncated']:,} of {found['requests']:,} requests were longer than the context and cut."
        )
