"""`metrics.jsonl`, one line per step: its writer and its readers."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from spheret.observe.records import Event, EventKind, Start, SublayerObservation
from spheret.support import files
from spheret.support.documents import Count, Lines, Number, Positive, Record

# fields that the clock decides; all others are bit-identical when a run is repeated
TIMING = ("seconds", "tokens_per_second")


class MetricsRecord(Record, omit_defaults=True):
    """One line: an update, or the guard that stopped the run before one. Keys that do not apply are absent.

    Read from a file, every number is finite or None.
    """

    step: Positive
    loss: Number
    lr: Number = None
    grad_norm: Number = None
    spikes: Count | None = None
    tokens_per_second: Number = None
    seconds: Number = None
    # at an evaluation. A stream without a radius has null
    val_loss: Number = None
    radius: Number = None
    on_bound: list[str] | None = None
    sublayers: list[SublayerObservation] | None = None
    # at the last evaluation: number, tokens and summed loss of each document
    val_documents: list[tuple[Count, Positive, float]] | None = None
    # in the first line after a start, if it was different before
    backend: str | None = None
    # in the first line of a run
    start: Start | None = None
    # why the run was stopped
    stopped: str | None = None
    # alarms: a collapse, a divergence, or the first value that was not finite
    events: list[Event] | None = None

    def event(self, kind: EventKind) -> Event | None:
        """The event of a kind, if it was recorded on this line."""
        return next((event for event in self.events or () if event.kind == kind), None)

    @property
    def alarm(self) -> str | None:
        """What was said of a collapse, if there was one."""
        event = self.event("collapsed")
        return None if event is None else event.sentence

    @property
    def diverged(self) -> str | None:
        """What was said of a divergence at the step at which it was found."""
        event = self.event("diverged")
        return None if event is None else event.sentence

    @property
    def evaluated(self) -> bool:
        """Whether the run was evaluated at this step. Its `val_loss` may be None all the same: it was not finite."""
        return self.sublayers is not None

    def __post_init__(self) -> None:
        required: tuple[str, ...] = _UPDATE if self.stopped is None else ()
        if any(getattr(self, key) is not None for key in ("val_loss", "radius", *_EVALUATION)):
            required += _EVALUATION
        for key in required:
            if getattr(self, key) is None:
                raise ValueError(f"{key} is missing")
        if self.sublayers is not None:
            numbers = [sublayer.sublayer for sublayer in self.sublayers]
            if not numbers or numbers != list(range(1, len(numbers) + 1)):
                raise ValueError("sublayers must be numbered from 1 on")


_UPDATE = ("lr", "grad_norm", "spikes", "tokens_per_second", "seconds")
_EVALUATION = ("on_bound", "sublayers")

LINES = Lines(MetricsRecord, "copy the file back, or start the run again with --force", appended=True)


def consecutive(path: Path, last_step: int) -> Iterator[tuple[MetricsRecord, int]]:
    """Every record of steps 1, 2, ..., with the byte at which its line ends; nothing if there is no file.

    A last line that a kill cut short is left out. A gap, or any other line that is not a record, is an error.
    last_step: the step of a checkpoint. Every line up to it was on the disk before the checkpoint.
    """
    step = 0
    with contextlib.suppress(FileNotFoundError):
        for record, end in LINES.read(path):
            if record.step != step + 1:
                raise ValueError(_gap(path, step, record.step))
            step = record.step
            yield record, end
    if step < last_step:
        raise ValueError(_gap(path, step, last_step + 1))


def _gap(path: Path, before: int, after: int) -> str:
    """The sentence for lines that are missing, or out of order, between two steps."""
    return f"{path} has a gap, from step {before} to step {after}: {LINES.remedy}."


def whole_metrics(path: Path, last_step: int = 0) -> list[MetricsRecord]:
    """The records that `consecutive` yields."""
    return [record for record, _ in consecutive(path, last_step)]


class Log:
    """The writer. A line is whole or absent: one that a kill cut short is removed when the log is opened again."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after the line of `last_step`; lines beyond it are removed. A gap is an error."""
        keep = 0
        for record, end in consecutive(path, last_step) if last_step else ():
            keep = end
            # lines beyond may be damaged
            if record.step >= last_step:
                break
        try:
            handle = files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except files.NotRegular as error:
            raise ValueError(f"{error}: {LINES.remedy}.") from None
        self._path, self._file = path, os.fdopen(handle, "ab", buffering=0)
        self._file.truncate(keep)

    def append(self, record: MetricsRecord) -> None:
        if record.evaluated and record.radius is None:
            # written as null
            record = msgspec.structs.replace(record, radius=math.nan)
        line = LINES.encode(record)
        end = self._file.seek(0, os.SEEK_END)
        try:
            with files.naming(self._path):
                files.write_all(self._file, line)
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Put every line on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
