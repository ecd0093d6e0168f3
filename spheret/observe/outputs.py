"""Where a watch speaks: the terminal, `watch.jsonl`, and the loop's own logger."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spheret.observe.records import Event, Header, Observation

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

WATCH = "watch.jsonl"
_BEGINNING = b'{"format":"spheret-watch"'
# takes values by name, and the step
Log = Callable[[Mapping[str, float], int], object]


def logger(log: Any) -> Log | None:
    """A function of values and step, from one, from a SummaryWriter of TensorBoard, or from a run of Weights &
    Biases, of trackio or of anything else with `log(values, step=step)`.
    """
    if log is None:
        return None
    if hasattr(log, "add_scalar"):

        def add(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                log.add_scalar(name, value, step)

        return add
    if callable(getattr(log, "log", None)):
        return lambda values, step: log.log(dict(values), step=step)
    if callable(log):
        given: Log = log
        return given
    raise TypeError(
        f"log must be a function of (values, step), a SummaryWriter, or have a method log(values, step=...), got "
        f"{type(log).__name__}."
    )


def scalars(observation: Observation) -> dict[str, float]:
    """Every finite number of an observation, by names such as watch/norm/003."""
    found: dict[str, float | None] = {"watch/grad_norm": observation.grad_norm, "watch/skipped": observation.skipped}
    for sublayer in observation.sublayers:
        for name, value in asdict(sublayer).items():
            if name != "sublayer":
                found[f"watch/{name}/{sublayer.sublayer:03d}"] = value
    for place in observation.places:
        found[f"watch/grad_norm/{place.name}"] = place.grad_norm
        found[f"watch/update/{place.name}"] = place.update
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def say(event: Event) -> None:
    """Print an event to the terminal."""
    helps = f" What helps: {event.remedy}." if event.remedy else ""
    print(f"spheret.watch: {event.level.upper()} at step {event.step}: {event.sentence}.{helps}", file=sys.stderr)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineFile:
    """watch.jsonl, to which a restarted loop appends. A line that a kill cut short is removed first."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / WATCH
        directory.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._file = self.path.open("r+b", buffering=0)
        try:
            self._lock()
        except BlockingIOError:
            self._file.close()
            raise BlockingIOError(f"another watch writes {self.path}: close it, or give another `out`.") from None
        # of a file that is continued; None if a kill cut its first line short
        self.first: dict[str, Any] | None = None
        line = self._file.readline()
        if line.endswith(b"\n") or not line.startswith(_BEGINNING[: len(line)]):
            self.first = self._header(line)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def _lock(self, released: bool = False) -> None:
        """Lock the file until it is closed or the process ends. A forked process may hold it open longer."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_UN if released else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        # some network drives have no locks
        except OSError:
            pass

    def _header(self, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != "spheret-watch":
            raise ValueError(f"{self.path} is not a file of spheret.watch, and stays as it is: give another `out`.")
        return found

    def begin(self, header: Header) -> None:
        """Write the header, or check that the file continues with the same model."""
        values = asdict(header)
        if self.first is None:
            self._write({"format": values.pop("format"), **values})
        elif self.first.get("sublayers") != values["sublayers"] or self.first.get("model") != header.model:
            raise ValueError(f"{self.path} holds what was seen of a different model: give another `out`.")

    def append(self, observation: Observation) -> None:
        self._write(asdict(observation))

    def _write(self, values: dict[str, Any]) -> None:
        self._file.seek(0, 2)
        self._file.write(json.dumps(_finite(values), separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._lock(released=True)
        self._file.close()
