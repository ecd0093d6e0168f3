"""`metrics.jsonl`, a line a step, and TensorBoard beside it, which can never stop a run."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import IO, Any

from spheret.support import files
from spheret.runs.run import read_metrics


class Log:
    """Lines that are whole or absent: what a kill tore is cut off when the log is opened again."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after the line of `last_step`; lines beyond it are dropped."""
        keep = 0
        for record, end in read_metrics(path) if last_step else ():
            keep = end
            # what lies beyond, damaged or not, is of no interest
            if record["step"] >= last_step:
                break
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._file.truncate(keep)

    def append(self, record: dict[str, Any]) -> None:
        try:
            text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_numbers(record), separators=(",", ":"), allow_nan=False)
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


def _numbers(value: Any) -> Any:
    """The same with null for what is no number: JSON has none of NaN and inf."""
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Tracker:
    """TensorBoard where it is installed; its failures are said once and end it, not the run."""

    def __init__(self, path: Path, wanted: bool, last_step: int) -> None:
        self._writer: Any = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(path), purge_step=last_step + 1)
            except ImportError:
                pass
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        print(f"TensorBoard is off, the run goes on: {error}", file=sys.stderr)

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
                self._writer.close()
            except Exception as error:
                self._give_up(error)
