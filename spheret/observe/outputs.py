"""Where a watch speaks: the terminal, `watch.jsonl`, and the loop's own logger."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from spheret.observe.records import Event, Header, Observation, SublayerObservation
from spheret.support.errors import unknown

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

WATCH = "watch.jsonl"
_BEGINNING = b'{"format":"spheret-watch"'
# packages that keep the curves of many runs
TRACKERS = ("trackio", "wandb")


class Tracker:
    """A logger: it takes values at a step, and alarms if it has alerts, as trackio and Weights & Biases have.

    Args:
        log: a function of values and step, or a run of Weights & Biases, of trackio or of anything else with
            `log(values, step=step)`. The modules trackio and wandb stand for their last run.
    """

    def __init__(self, log: Any) -> None:
        self.log: Callable[[Mapping[str, float], int], object] = log
        if callable(getattr(log, "log", None)):
            self.log = lambda values, step: log.log(dict(values), step=step)
        elif not callable(log):
            given = type(log).__name__
            raise TypeError(
                f"log must be a function of (values, step) or have a method log(values, step=...), got {given}."
            )
        self._run = log
        name = log.__name__ if isinstance(log, ModuleType) else type(log).__module__
        self._package: Any = sys.modules.get(name.partition(".")[0])

    def alert(self, event: Event) -> None:
        """Send an alarm or a warning, at the tracker's own level for it."""
        levels = getattr(self._package, "AlertLevel", None)
        if levels is None or not hasattr(self._run, "alert"):
            return
        level = levels.ERROR if event.level == "alarm" else levels.WARN
        # trackio prints what was printed already
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.alert(title=f"{event.kind} at step {event.step}", text=sentences(event), level=level)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            # not the run's own, after which trackio would end it once more when the process ends
            self._package.finish()


def check_tracker(package: str) -> Any:
    """The module of a tracker. Raises for an unknown one, and for one that is not installed."""
    if package not in TRACKERS:
        raise unknown("logger", package, TRACKERS)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is not installed. Run: pip install {package}") from error


def open_tracker(package: str, name: str, config: dict[str, Any]) -> Tracker:
    """A run of trackio or Weights & Biases in the project "spheret"; the one of this name goes on if there is one."""
    module, words = check_tracker(package), {"project": "spheret", "name": name, "config": config, "resume": "allow"}
    if package == "wandb":
        return Tracker(module.init(id=re.sub(r"[/\\#?%:]", "_", name), **words))
    # it prints where its dashboard is
    with contextlib.redirect_stdout(sys.stderr):
        return Tracker(module.init(embed=False, **words))


def scalars(observation: Observation) -> dict[str, float]:
    """Every finite number of an observation, by names such as watch/norm/003."""
    found = {"watch/grad_norm": observation.grad_norm}
    for place in observation.places:
        found[f"watch/grad_norm/{place.name}"] = place.grad_norm
        found[f"watch/update/{place.name}"] = place.update
    return {**finite_numbers(found), **sublayer_scalars(observation.sublayers)}


def sublayer_scalars(sublayers: Iterable[SublayerObservation]) -> dict[str, float]:
    """Every finite number of these sublayers, by names such as watch/norm/003."""
    return finite_numbers({
        f"watch/{name}/{each.sublayer:03d}": value
        for each in sublayers
        for name, value in asdict(each).items()
        if name != "sublayer"
    })  # fmt: skip


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers, and finite."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, (bool, int, float))}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def sentences(event: Event) -> str:
    """What happened, and what helps."""
    return f"{event.sentence}." + (f" What helps: {event.remedy}." if event.remedy else "")


def say(event: Event) -> None:
    """Print an event to the terminal."""
    print(f"spheret.watch: {event.level.upper()} at step {event.step}: {sentences(event)}", file=sys.stderr)


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
            with contextlib.suppress(ValueError):
                self.first = json.loads(line)
            if not isinstance(self.first, dict) or self.first.get("format") != "spheret-watch":
                raise ValueError(
                    f"{self.path} is not a file of spheret.watch, and stays as it is: give another `out`."
                )
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
