"""`metrics.jsonl`, one line per step: its writer, its readers, and TensorBoard beside it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from spheret.observe.records import Event, EventKind, Start, SublayerObservation
from spheret.runs.layout import METRICS
from spheret.support import files
from spheret.support.documents import Count, Lines, Number, Positive, Record
from spheret.support.errors import silence_threads

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
    # in the first line after a start, if it was another before
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


def read_metrics(path: Path, start: int = 0) -> Iterator[tuple[MetricsRecord, int]]:
    """Every record after the byte `start`, with the byte at which its line ends; nothing if there is no file.

    A last line that a kill cut short is left out. Any other line that is not a record is an error.
    """
    try:
        yield from LINES.read(path, start)
    except FileNotFoundError:
        return


def consecutive(path: Path, last_step: int) -> Iterator[tuple[MetricsRecord, int]]:
    """What `read_metrics` yields, after a check that no step is missing: 1, 2, ... at least up to `last_step`.

    last_step: the step of a checkpoint. Every line up to it was on the disk before the checkpoint.
    """
    step = 0
    for record, end in read_metrics(path):
        if record.step != step + 1:
            raise ValueError(_gap(path, step, record.step))
        step = record.step
        yield record, end
    if step < last_step:
        raise ValueError(_gap(path, step, last_step + 1))


def _gap(path: Path, before: int, after: int) -> str:
    """The sentence for lines that are missing, or out of order, between two steps."""
    return f"{path} has a gap, from step {before} to step {after}: {LINES.remedy}."


def whole_metrics(path: Path, last_step: int) -> list[MetricsRecord]:
    """Every record of a file. A gap before the last line, or before `last_step`, is an error."""
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
        self._file: IO[bytes] = os.fdopen(handle, "ab", buffering=0)
        self._file.truncate(keep)

    def append(self, record: MetricsRecord) -> None:
        if record.evaluated and record.radius is None:
            # written as null
            record = msgspec.structs.replace(record, radius=math.nan)
        line = LINES.encode(record)
        end = self._file.seek(0, os.SEEK_END)
        try:
            files.write_all(self._file, line)
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Put every line on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


# how often in turn a follower may find a file that it cannot read
PATIENCE = 3


class Follower:
    """How far a run is that is being trained: its step, validation loss and divergence, read only from new lines."""

    def __init__(self, name: str, path: Path, steps: int) -> None:
        self.name, self.path, self.steps = name, path, steps
        self._failures = 0
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self.step, self.val_step = 0, 0
        self.val_loss: float | None = None
        self.diverged: int | None = None

    def update(self) -> None:
        """Read the new lines. A run that continues first removes those after its checkpoint, and writes others."""
        metrics = self.path / METRICS
        try:
            if metrics.exists() and metrics.stat().st_size < self._offset:
                self._reset()
            self._read(metrics)
            self._failures = 0
        # what was read before may be no longer there: begin again, and say so only if that does not help
        except ValueError:
            self._reset()
            self._failures += 1
            if self._failures > PATIENCE:
                raise ValueError(
                    f"{metrics} has a damaged line: delete {self.path} to train that run again, or give another "
                    "--out."
                ) from None

    def _read(self, metrics: Path) -> None:
        for record, end in read_metrics(metrics, self._offset):
            if record.step != self.step + 1:
                raise ValueError(_gap(metrics, self.step, record.step))
            self._offset, self.step = end, record.step
            if self.diverged is None and (record.stopped or record.diverged):
                self.diverged = record.step
            if record.val_loss is not None:
                self.val_loss, self.val_step = record.val_loss, record.step


# of a sublayer, in TensorBoard
_DRAWN = ("angle_mean", "alpha", "norm", "cosine", "common_output", "grad_norm")


def is_event_file(name: str) -> bool:
    """Whether a file of TensorBoard has this name."""
    return name.startswith("events.out.tfevents.")


class Tracker:
    """TensorBoard, where it is installed. A failure is printed once; it ends the tracker and never the run."""

    def __init__(self, path: Path, wanted: bool, last_step: int) -> None:
        self._writer: Any = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter

                # its thread hands the error of a full disk to the next call too
                silence_threads("tensorboard")
                self._writer = SummaryWriter(str(path), purge_step=last_step + 1)
            except ImportError:
                pass
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        print(f"TensorBoard is off, the run continues: {error}", file=sys.stderr)

    def log(self, record: MetricsRecord) -> None:
        if self._writer is None:
            return
        try:
            for name in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "radius"):
                self._draw(name, getattr(record, name), record.step)
            for sublayer in record.sublayers or ():
                for name in _DRAWN:
                    self._draw(f"{name}/{sublayer.sublayer:03d}", getattr(sublayer, name), record.step)
        except Exception as error:
            self._give_up(error)

    def _draw(self, name: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
                self._writer.close()
            except Exception as error:
                self._give_up(error)
