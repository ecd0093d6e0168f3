"""Watched trainings: `watch.jsonl`, which `spheret.watch` writes, read into its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np

from spheret.lab.rows import shortest_names
from spheret.observe.outputs import WATCH
from spheret.observe.records import Event, Header, Observation, PlaceObservation, SublayerObservation
from spheret.runs.layout import CONFIG
from spheret.support.documents import DamagedDocument, Document, Lines

# nobody can see more columns on one map
MOST_COLUMNS = 200
# numbers beyond are as good as infinite, and below as good as zero
MOST, LEAST = 1e100, 1e-100


_REMEDY = "copy the file back, or delete it and watch the training again"
HEADERS = Document(Header, "watch", _REMEDY)
OBSERVATIONS = Lines(Observation, _REMEDY, appended=True)


@dataclass(frozen=True)
class Watched:
    """A watched training: its name, what is watched, and what was seen, by ascending step."""

    name: str
    header: Header
    observations: Sequence[Observation]

    @property
    def step(self) -> int:
        """The last step that was watched; 0 if there is none yet."""
        return self.observations[-1].step if self.observations else 0

    @cached_property
    def events(self) -> list[Event]:
        return [event for observation in self.observations for event in observation.events]

    @cached_property
    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps that have a loss, ascending, and their losses."""
        lengths = [len(each.losses) for each in self.observations]
        firsts = [each.step + 1 - length for each, length in zip(self.observations, lengths, strict=True)]
        # None becomes NaN
        values = np.array(list(chain.from_iterable(each.losses for each in self.observations)), dtype=float)
        within = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return _finite(np.repeat(firsts, lengths) + within, values)

    @cached_property
    def norms(self) -> tuple[np.ndarray, np.ndarray]:
        """The watched steps that have a gradient norm, and their norms."""
        steps = np.array([each.step for each in self.observations], dtype=int)
        return _finite(steps, np.array([each.grad_norm for each in self.observations], dtype=float))

    @property
    def alarms(self) -> list[Event]:
        return [event for event in self.events if event.level == "alarm"]

    @cached_property
    def shown(self) -> list[Observation]:
        """The observations that maps show: at most MOST_COLUMNS, the last one among them."""
        seen = [each for each in self.observations if each.sublayers or each.places]
        return seen[::-1][:: _stride(len(seen))][::-1]

    @cached_property
    def parts(self) -> list[str]:
        """The names of the sublayers; without sublayers, of the places of the last watched step."""
        if self.header.sublayers:
            return [each.name for each in self.header.sublayers]
        return [] if self.last is None else [each.name for each in self.last.places]

    @cached_property
    def measures(self) -> dict[str, np.ndarray]:
        """Every measure of the parts, by part and by the watched steps that are shown. NaN: not measured."""
        record = SublayerObservation if self.header.sublayers else PlaceObservation
        keys = [each.name for each in fields(record) if each.type == "float | None"]
        read, unseen = attrgetter(*keys), [None] * len(keys)
        # None becomes NaN
        rows = [[read(each) if each else unseen for each in self._by_part(seen)] for seen in self.shown]
        table = np.array(rows, dtype=float).reshape(len(self.shown), len(self.parts), len(keys))
        table[np.abs(table) > MOST] = np.nan
        table[np.abs(table) < LEAST] = 0.0
        return {key: table[:, :, index].T for index, key in enumerate(keys)}

    def _by_part(self, observation: Observation) -> list[SublayerObservation | PlaceObservation | None]:
        if self.header.sublayers:
            sublayers = {each.sublayer: each for each in observation.sublayers}
            return [sublayers.get(each.sublayer) for each in self.header.sublayers]
        places = {each.name: each for each in observation.places}
        return [places.get(name) for name in self.parts]

    @property
    def last(self) -> Observation | None:
        """The last observation of the inside of the model."""
        return self.shown[-1] if self.shown else None


def _finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = np.abs(values) < MOST
    return steps[known], np.where(np.abs(values[known]) < LEAST, 0.0, values[known])


def _stride(count: int) -> int:
    return max(1, -(-count // MOST_COLUMNS))


def in_order(observations: Iterable[Observation]) -> list[Observation]:
    """The observations by ascending step. After a restart the steps go back, and what came later counts."""
    kept: list[Observation] = []
    for observation in observations:
        while kept and kept[-1].step >= observation.step:
            kept.pop()
        kept.append(observation)
    return kept


def read_watched(path: Path, name: str) -> Watched:
    """Read a watch.jsonl. A last line that a kill has cut short is left out."""
    head, *lines = OBSERVATIONS.split(path) or [b""]
    if not head:
        raise DamagedDocument(
            f"{path} has no whole line yet: wait until the training has begun, or give another path."
        )
    header = HEADERS.decode(head, path)
    stride, found = _stride(len(lines)), list[Observation]()
    for number, line in enumerate(lines, start=2):
        observation = OBSERVATIONS.decode(line, f"line {number} of {path}")
        # a long training has more than its page can show: what is not shown is not kept
        if (len(lines) + 1 - number) % stride:
            observation = replace(observation, sublayers=[], places=[])
        found.append(observation)
    return Watched(name, header, in_order(found))


def find_watched(paths: Iterable[str | Path]) -> tuple[list[Path], list[str | Path]]:
    """The watch.jsonl that these paths name, and the paths that name something else.

    A path is such a file, a directory that holds one, or a directory of such directories. A run directory, which has
    a config.json, is not one.
    """
    found, others = list[Path](), list[str | Path]()
    for given in paths:
        path = Path(given).expanduser()
        inside = [path, *sorted(each.parent for each in path.glob(f"*/{WATCH}"))]
        files = [each / WATCH for each in inside if (each / WATCH).is_file() and not (each / CONFIG).exists()]
        if path.suffix == ".jsonl" and path.is_file():
            files = [path]
        found += files
        # a directory may hold runs beside watched trainings
        if not files or any(path.glob(f"*/{CONFIG}")):
            others.append(given)
    return list(dict.fromkeys(found)), others


def read_all(paths: Sequence[Path]) -> list[Watched]:
    """Read every watch.jsonl, each with the shortest name that no other one has."""
    places = [path.parent if path.name == WATCH else path for path in paths]
    names = shortest_names(places)
    return [read_watched(path, names[place]) for path, place in zip(paths, places, strict=True)]
