"""`metrics.jsonl`, one line per step: its writer, its readers, and TensorBoard beside it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from spheret.runs.layout import METRICS
from spheret.support import files
from spheret.support.background import silence_threads

# fields that the clock decides; all others are bit-identical when a run is repeated
TIMING = ("seconds", "tokens_per_second")

_NUMBERS = ("loss", "val_loss", "lr", "grad_norm", "spikes", "seconds", "tokens_per_second", "radius")


def read_metrics(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Every record after the byte `start`, with the offset at which its line ends.

    A last line that a kill cut short is left out. Any other line that is not a record is an error.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    end = start
    for number, line in enumerate(lines[:-1], start=1):
        end += len(line) + 1
        where = f"line {number} of {path}" + (f" after byte {start:,}" if start else "")
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{where} is damaged: resume the run from a checkpoint before it, or remove the line."
            ) from None
        if not isinstance(step, int):
            raise ValueError(f"{where} has the step {step!r}, which is no number: remove the line.")
        yield record, end


def checked_metrics(path: Path) -> list[dict[str, Any]]:
    """Every record of a file, after a check that the steps rise and that the values are what a trainer writes."""
    records = [record for record, _ in read_metrics(path)]
    previous_step = 0
    for record in records:
        problem = _problem(record)
        if record["step"] <= previous_step:
            problem = f"comes after step {previous_step}"
        if problem is not None:
            raise ValueError(
                f"step {record['step']} of {path} {problem}: the file is damaged, resume the run from a checkpoint "
                f"before that step."
            )
        previous_step = record["step"]
    return records


def _problem(record: dict[str, Any]) -> str | None:
    """Returns what the trainer would not have written in this record, or None. null stands for NaN and infinity."""
    for key in _NUMBERS:
        if not _is_number(record.get(key)):
            return f"has {key} {record[key]!r}, which is not a finite number"
    sublayers, documents = record.get("sublayers") or [], record.get("val_documents") or []
    if not isinstance(sublayers, list) or not all(
        isinstance(sublayer, dict) and all(map(_is_number, sublayer.values())) for sublayer in sublayers
    ):
        return "has sublayers that are not a table of numbers"
    if not isinstance(documents, list) or not all(
        isinstance(document, list) and len(document) == 3 and None not in document and all(map(_is_number, document))
        for document in documents
    ):
        return "has val_documents that are not lists of a document number, its tokens and its loss"
    return None


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


class Log:
    """The writer. A line is whole or absent: one that a kill cut short is removed when the log is opened again."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after the line of `last_step`; lines beyond it are removed."""
        keep = 0
        for record, end in read_metrics(path) if last_step else ():
            keep = end
            # lines beyond may be damaged
            if record["step"] >= last_step:
                break
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._file.truncate(keep)

    def append(self, record: dict[str, Any]) -> None:
        try:
            text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
        line = text.encode() + b"\n"
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


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Follower:
    """How far a run is that is being trained: its step, validation loss and divergence, read from new lines alone."""

    def __init__(self, name: str, path: Path, steps: int) -> None:
        self.name, self.path, self.steps = name, path, steps
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self.step, self.val_step = 0, 0
        self.val_loss: float | None = None
        self.stopped: str | None = None
        self.diverged: int | None = None

    def update(self) -> None:
        metrics = self.path / METRICS
        # a run that continues first removes the lines after its checkpoint
        if metrics.exists() and metrics.stat().st_size < self._offset:
            self._reset()
        try:
            for record, end in read_metrics(metrics, self._offset):
                self._offset, self.step, self.stopped = end, record["step"], record.get("stopped")
                if self.diverged is None and (self.stopped or record.get("diverged")):
                    self.diverged = record["step"]
                if record.get("val_loss") is not None:
                    self.val_loss, self.val_step = record["val_loss"], record["step"]
        except ValueError:
            raise ValueError(
                f"{metrics} has a damaged line: delete {self.path} to train that run again, or give another --out."
            ) from None

    @property
    def done(self) -> bool:
        return self.stopped is not None or self.step >= self.steps

    @property
    def steps_left(self) -> int:
        return 0 if self.done else self.steps - self.step


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

    def log(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            step = record["step"]
            for name in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "radius"):
                if record.get(name) is not None:
                    self._writer.add_scalar(name, record[name], step)
            for sublayer in record.get("sublayers", ()):
                for name in ("angle_mean", "alpha", "norm", "cosine", "grad_norm"):
                    if sublayer.get(name) is not None:
                        self._writer.add_scalar(f"{name}/{sublayer['sublayer']:03d}", sublayer[name], step)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
                self._writer.close()
            except Exception as error:
                self._give_up(error)
