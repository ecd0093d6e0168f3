"""What eval.json and eval_samples.jsonl hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

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
    """eval.json: the zero-shot results of one checkpoint."""

    run: str
    step: Count
    limit: Positive | None
    precision: Text
    device: Text
    batch_size: Positive | Literal["auto"]
    seconds: NonNegative
    versions: dict[str, str]
    tasks: dict[str, TaskRecord]
    format: str = "spheret-eval"
    version: int = 1

    def count(self, what: Literal["requests", "truncated"]) -> int:
        """The requests of all tasks, or how many of them were cut on the left to fit the context."""
        return sum(getattr(task, what) for task in self.tasks.values())


# a metric at one document. Metrics per word or byte are a log-likelihood with the number of words or bytes
Value = float | tuple[float, Annotated[float, Meta(gt=0)]] | None


class SampleRecord(Record):
    """A line of eval_samples.jsonl: the metrics and the answers of one document."""

    task: Text
    document: Count
    hash: Text
    metrics: dict[str, Value]
    responses: Any


AGAIN = "evaluate the run again"
EVALS = Document(EvalRecord, "eval", AGAIN)
SAMPLES = Lines(SampleRecord, AGAIN)
