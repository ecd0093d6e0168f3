"""What eval.json, eval_samples.jsonl and the manifest of fetched rows hold."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from spheret.support.documents import Count, Document, Lines, NonNegative, Number, Positive, Record, Sha256, Text


class MetricRecord(Record):
    """A metric over all documents of a task, and its standard error."""

    value: Number
    stderr: Number


class TaskRecord(Record):
    """The results of one task."""

    requests: Count
    truncated: Count
    documents: Positive
    # lm_eval's version of the task
    version: float | str | None
    hash: Sha256
    # of the local rows; null for rows of the hub
    data_sha256: Sha256 | None
    metrics: dict[str, MetricRecord]


class EvalRecord(Record):
    """eval.json: the zero-shot results of one checkpoint. eval_fewshot.json: those with examples in the prompts."""

    run: str
    step: Count
    limit: Positive | None
    precision: Text
    device: Text
    batch_size: Positive | Literal["auto"]
    seconds: NonNegative
    versions: dict[str, str]
    tasks: dict[str, TaskRecord]
    requests: Count
    truncated: Count
    # examples before each question; unset in eval.json
    num_fewshot: Positive | UnsetType = UNSET
    format: str = "spheret-eval"
    version: int = 1


class SampleRecord(Record):
    """A line of eval_samples.jsonl: the metrics and the answers of one document. `results` checks the metrics."""

    task: Text
    document: Count
    hash: Text
    metrics: dict[str, Any]
    responses: Any


class RowsRecord(Record):
    """Where the rows of a task came from, and the file that holds them."""

    dataset: Text
    configuration: str | None
    split: Text
    rows: Positive
    sha256: Sha256


class RowsManifest(Record):
    """manifest.json of a directory of rows."""

    tasks: dict[str, RowsRecord]
    format: str = "spheret-eval-data"
    version: int = 1


AGAIN = "evaluate the run again"
EVALS = Document(EvalRecord, "eval", AGAIN)
SAMPLES = Lines(SampleRecord, AGAIN)
ROWS = Document(RowsManifest, "eval --prefetch", "fetch into a new directory")
