"""The plan of a study: a small TOML file that can be read, committed and run again. A race is a plan too.

A plan has parts. A part is a set of contestants that are compared; its ladder repeats it at other sizes. Each rung,
the first included, is a `Group`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from spheret.connections import OTHER_NAMES, SCHEMES
from spheret.connections.parse import parse_schemes
from spheret.runs.config import SECTIONS, Given, check_section, merge
from spheret.support import files
from spheret.support.documents import MOST_BYTES, Count, Positive, Record, explain, read_toml
from spheret.support.errors import unknown

# what a race or a study takes where nothing is given
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"layers": 12, "heads": 4, "width": 64, "block": 128, "head_bias": "unigram", "head": "shifted"},
    "data": {"path": "sotu"},
    "train": {"steps": 300, "batch_size": 8, "keep": 1},
    "evaluation": {"eval_windows": 128},
}
# the plans that come with the library, by name
PLANS = {path.stem: path for path in sorted(Path(__file__).parent.joinpath("plans").glob("*.toml"))}
OURS = PLANS["connections"]
# what a study varies by itself
OWN = ("scheme", "scheme_options", "seed", "lr", "init_from")
# settings of the model that a contestant may have for itself in its words: all have the same matrices
OWN_SETTINGS = ("head", "head_bias")
# no plan of ours comes near this
MOST_CONTESTANTS = 10_000
# the seeds above are fresh ones
MOST_TUNING_SEEDS = 100
SIGNIFICANT = 3

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")]
Rate = Annotated[float, Meta(gt=0, lt=1e6)]
Few = Annotated[int, Meta(ge=0, le=1000)]
Scalar = str | int | float | bool | None


class ContestantsRecord(Record):
    """Schemes with options and other settings. A list of values multiplies: every product is a contestant."""

    schemes: list[str]
    options: dict[str, Scalar | list[Scalar]] = msgspec.field(default_factory=dict)
    settings: dict[str, Scalar | list[Scalar]] = msgspec.field(default_factory=dict)


class PartRecord(Record):
    """A part of a plan.

    contestants: words as for `spheret race --schemes`, or tables. The first ones are trained first.
    rates: the learning rates that every contestant gets, in equal ratios. rates_of: the rates of single contestants.
    behind: contestants that lie further than this above the lowest loss of the search get no more seeds, and are not
        compared; 0 to compare all. With fresh = false the search is then the first seed.
    extend: how often the grid may grow at an edge, in each direction.
    tuning_seeds: runs per learning rate, or their seeds. seeds: fresh runs at the best one; 0 for none.
    fresh: false to compare the contestants on the seeds that chose their rates, as a race does.
    first: contestants that are trained before the others. first_seeds: seeds that all get before any gets more.
    ladder: settings of further sizes.
    stress: the fresh seeds are trained once more at so many times the best rate, to count who fails; 0 for none.
    data, model, train, evaluation: settings of this part, as in a config file.
    """

    name: Name
    contestants: list[str | ContestantsRecord]
    rates: list[Rate] = msgspec.field(default_factory=list)
    rates_of: dict[str, list[Rate]] = msgspec.field(default_factory=dict)
    behind: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    title: str = ""
    extend: Few = 3
    tuning_seeds: Annotated[int, Meta(ge=1)] | list[Count] = 1
    seeds: Few = 3
    fresh: bool = True
    first: Positive = 3
    first_seeds: Positive = 3
    ladder: list[dict[str, Any]] = msgspec.field(default_factory=list)
    stress: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    train: dict[str, Any] = msgspec.field(default_factory=dict)
    evaluation: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def tuned_with(self) -> Sequence[int]:
        """The seeds of each learning rate of the search."""
        given = self.tuning_seeds
        return range(1, given + 1) if isinstance(given, int) else given

    @property
    def compared_with(self) -> int:
        """How many seeds the contestants are compared on; 0 if they are not compared."""
        return self.seeds if self.fresh else len(self.tuned_with)


class EndpointRecord(Record):
    """A question that a plan asks before its first run, and answers with all seeds of a rung.

    kind: gap, the difference of two contestants at every rung and its slope per doubling of what the ladder changes;
        equivalence, whether the contestants lie within a margin of each other; stress, who fails at the part's
        multiple of the best rate.
    contestants: labels; two for a gap, two or more for an equivalence, none for the stress of all.
    margin: in nats per token, for an equivalence.
    """

    kind: Literal["gap", "equivalence", "stress"]
    part: Name
    contestants: list[str] = msgspec.field(default_factory=list)
    margin: Annotated[float, Meta(ge=0)] = 0.0


class PlanRecord(Record):
    """A plan: its title, what all runs share, and its parts, the most valuable first."""

    title: str
    parts: list[PartRecord]
    reference: str = "pre-ln"
    endpoints: list[EndpointRecord] = msgspec.field(default_factory=list)
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    train: dict[str, Any] = msgspec.field(default_factory=dict)
    evaluation: dict[str, Any] = msgspec.field(default_factory=dict)


def rounded(rate: float) -> float:
    """A learning rate with a few digits, as the grid has them."""
    return round(rate, SIGNIFICANT - 1 - math.floor(math.log10(rate)))


@dataclass(frozen=True)
class Contestant:
    """A scheme with its options, and with other settings of its own. The label says all of them."""

    label: str
    given: Given = field(hash=False)


@dataclass(frozen=True)
class Group:
    """One rung of a part: contestants that are compared with each other.

    name: the part's, with the rung's settings. rung: 0 for the part itself.
    given: what all contestants share. setting: what the rung changes.
    """

    part: PartRecord = field(hash=False, compare=False)
    name: str
    rung: int
    contestants: tuple[Contestant, ...]
    given: Given = field(hash=False)
    setting: Mapping[str, Any] = field(hash=False)

    @property
    def title(self) -> str:
        title = self.part.title or self.part.name
        return f"{title}, {_words(self.setting)}" if self.setting else title

    def value(self, name: str) -> Any:
        """A setting of all contestants, given or by default."""
        given = merge(RECIPE, self.given)
        for section, kind in SECTIONS.items():
            for each in fields(kind):
                if each.name == name:
                    return given.get(section, {}).get(name, each.default)
        raise KeyError(name)

    def rates(self, label: str) -> list[float]:
        """The learning rates with which a contestant starts."""
        return self.part.rates_of.get(label, self.part.rates)

    @property
    def ratio(self) -> float:
        """The ratio of two neighbouring learning rates."""
        low, high, *_ = next(iter(self.part.rates_of.values()), self.part.rates)
        return high / low

    def beside(self, rate: float, steps: int) -> float:
        """The learning rate that lies so many places above or below another one on the grid."""
        return rounded(rate * self.ratio**steps)


@dataclass(frozen=True)
class Plan:
    """A plan that was read and checked. Groups come in the order in which they are worth running."""

    title: str
    reference: str
    groups: tuple[Group, ...]
    endpoints: tuple[EndpointRecord, ...]
    text: bytes = field(repr=False)

    def rung(self, group: Group, rung: int) -> Group | None:
        """A rung of the part of a group; None if there is none of this number."""
        same = [each for each in self.groups if each.part.name == group.part.name and each.rung == rung]
        return same[0] if same else None


def committed_results(path: Path) -> Path | None:
    """The results of a plan that comes with the library, if this is a checkout that has them."""
    plan = PLANS.get(str(path), path)
    name = "results" if plan == OURS else plan.stem
    results = Path(__file__).parents[2] / "docs" / "results" / f"{name}.jsonl"
    return results if plan in PLANS.values() and not Path(str(path)).is_dir() and results.is_file() else None


def read_plan(path: Path) -> Plan:
    """Read a plan: a file, or a name of PLANS. Whatever is wrong with it is one sentence that names the place."""
    # a file of the user's own comes first
    path = PLANS.get(str(path), path) if not path.exists() else path
    try:
        return parse_plan(path, files.read_regular(path, MOST_BYTES, follow=True))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no plan at {path}: give a TOML file as in docs/compare.md, or one of {', '.join(PLANS)}."
        ) from None
    except (files.NotRegular, OSError) as error:
        reason = error if isinstance(error, files.NotRegular) else error.strerror
        raise ValueError(f"{path} is not a plan ({reason}): give a TOML file as in docs/compare.md.") from None


def parse_plan(path: Path, text: bytes) -> Plan:
    """A plan from its text. path: where it stands, for errors."""
    try:
        record = msgspec.convert(read_toml(text), PlanRecord)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path} is not a plan of a study ({explain(error)}): docs/compare.md lists its keys."
        ) from None
    # TOML that is wrong, nested too deeply, or with numbers of thousands of digits
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a plan ({explain(error)}): give a TOML file as in docs/compare.md."
        ) from None
    if not record.parts:
        raise ValueError(f"{path} has no [[parts]]: a study needs at least one.")
    rungs = [_groups(path, record, part) for part in record.parts]
    # every part at its own size before any part at the next one
    ordered = [group for same in itertools.zip_longest(*rungs) for group in same if group is not None]
    called = [group.name for group in ordered]
    for name in called:
        if called.count(name) > 1:
            raise ValueError(f"{path} has two parts, or a part and a rung, of the name {name!r}: rename one.")
    parts = {groups[0].part.name: groups[0] for groups in rungs}
    for number, endpoint in enumerate(record.endpoints, 1):
        _check_endpoint(f"endpoint {number} of {path}", endpoint, parts)
    return Plan(record.title, record.reference, tuple(ordered), tuple(record.endpoints), text)


def _check_endpoint(where: str, endpoint: EndpointRecord, parts: Mapping[str, Group]) -> None:
    if endpoint.part not in parts:
        raise unknown(f"part in {where}:", endpoint.part, parts)
    part, names = parts[endpoint.part].part, endpoint.contestants
    labels = [contestant.label for contestant in parts[endpoint.part].contestants]
    for name in names:
        if name not in labels:
            raise unknown(f"contestant in {where}:", name, labels)
        if names.count(name) > 1:
            raise ValueError(f"{where} names {name!r} twice: leave one of them out.")
    stress, equivalence = endpoint.kind == "stress", endpoint.kind == "equivalence"
    if stress and not (part.stress and part.seeds):
        raise ValueError(f"{where} needs a part with stress and seeds: part {part.name!r} lacks one of them.")
    if not stress and part.seeds < 2:
        raise ValueError(f"{where} needs two or more seeds, and part {part.name!r} has {part.seeds}: give it more.")
    if not stress and (len(names) < 2 or (len(names) > 2 and not equivalence)):
        raise ValueError(f"{where}, a {endpoint.kind}, needs two contestants, an equivalence two or more: name them.")
    if equivalence and not endpoint.margin:
        raise ValueError(f"{where} is an equivalence without a margin: give one above 0, such as margin = 0.02.")


def _groups(path: Path, plan: PlanRecord, part: PartRecord) -> list[Group]:
    where = f"part {part.name!r} of {path}"
    shared = merge(*(_sections(path, record) for record in (plan, part)))
    contestants = tuple(_contestants(path, where, part))
    labels = [contestant.label for contestant in contestants]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{where} has the contestant {label!r} twice: leave one of them out.")
    if not labels:
        raise ValueError(f"{where} has no contestants: name some, such as paper.")
    _check_seeds(where, part)
    for label in part.rates_of:
        if label not in labels:
            raise unknown(f"contestant in rates_of of {where}:", label, labels)
    for rates in [*part.rates_of.values(), *([part.rates] if part.rates or set(labels) - {*part.rates_of} else [])]:
        _check_rates(where, part, rates)
    groups = []
    for rung, setting in enumerate([{}, *part.ladder]):
        if rung and not setting:
            raise ValueError(f"rung {rung} of {where} changes nothing: name a setting, such as layers = 24.")
        given = merge(shared, _by_section(path, where, setting))
        name = "-".join([part.name, *(f"{key}{_word(value)}" for key, value in setting.items())])
        groups.append(Group(part, name, rung, contestants, given, setting))
    return groups


def _check_seeds(where: str, part: PartRecord) -> None:
    seeds = list(part.tuned_with)
    if not seeds or len(set(seeds)) < len(seeds) or (part.fresh and max(seeds) > MOST_TUNING_SEEDS):
        raise ValueError(
            f"tuning_seeds of {where} must be a number from 1 to {MOST_TUNING_SEEDS}, or different seeds below it: "
            "the fresh seeds are others."
        )
    if not part.fresh and (part.extend or part.stress):
        raise ValueError(f"{where} has fresh = false, so extend must be 0, and stress is not for it.")


def _check_rates(where: str, part: PartRecord, rates: list[float]) -> None:
    # a rung of a ladder takes the neighbours of the best rate below it
    if not part.fresh and not part.ladder and rates and rates == sorted(set(rates)):
        return
    if len(rates) < 2:
        raise ValueError(f"rates of {where} must be two or more, from the lowest to the highest, got {len(rates)}.")
    ratio = rates[1] / rates[0]
    if ratio < 1.05 or any(not math.isclose(b / a, ratio, rel_tol=0.05) for a, b in itertools.pairwise(rates)):
        raise ValueError(
            f"rates of {where} must rise in equal ratios, as 1e-3, 2e-3, 4e-3 do, got {', '.join(map(str, rates))}."
        )


def _sections(path: Path, record: PlanRecord | PartRecord) -> dict[str, Any]:
    """The settings that a plan or a part gives, by section."""
    given = {}
    for section in SECTIONS:
        values = check_section(path, section, getattr(record, section))
        _refuse_own(f"[{section}] in {path}", values)
        given[section] = values
    return given


def _refuse_own(where: str, names: Mapping[str, Any]) -> None:
    for name in names:
        if name in OWN:
            raise ValueError(f"{name} in {where} is what a study chooses itself: leave it out.")


def _by_section(path: Path, where: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their plain names, such as layers, put into their sections."""
    _refuse_own(where, settings)
    names = {each.name: section for section, kind in SECTIONS.items() for each in fields(kind)}
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            raise unknown(f"setting in {where}:", name, names)
        given.setdefault(names[name], {})[name] = value
    return {section: check_section(path, section, values) for section, values in given.items()}


def named_contestants(words: str) -> list[Contestant]:
    """The contestants of words such as paper, all, or pre-ln,proj-spheretnorm:head=tied."""
    # the values of these settings are words, and none is one of them
    choices = [
        (choice, dict(each.split("=", 1) for each in choice.others)) for choice in parse_schemes(words, OWN_SETTINGS)
    ]
    return [_contestant(choice.name, choice.options, own, {"model": own} if own else {}) for choice, own in choices]


def _contestants(path: Path, where: str, part: PartRecord) -> Iterator[Contestant]:
    for entry in part.contestants:
        if isinstance(entry, str):
            yield from named_contestants(entry)
            continue
        options, settings = _products(entry.options), _products(entry.settings)
        if len(entry.schemes) * len(options) * len(settings) > MOST_CONTESTANTS:
            raise ValueError(f"{where} has more than {MOST_CONTESTANTS:,} contestants: take fewer values.")
        for scheme, chosen, setting in itertools.product(entry.schemes, options, settings):
            if scheme not in SCHEMES:
                raise unknown(f"scheme in {where}:", scheme, SCHEMES, OTHER_NAMES)
            yield _contestant(scheme, chosen, setting, _by_section(path, where, setting))


def _products(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, product, strict=True)) for product in itertools.product(*lists)]


def _contestant(scheme: str, options: Mapping[str, Any], settings: Mapping[str, Any], given: Given) -> Contestant:
    label = scheme + (f" ({_words(options)})" if options else "") + (f", {_words(settings)}" if settings else "")
    # TOML has no none
    chosen = {name: None if value == "none" else value for name, value in options.items()}
    return Contestant(label, merge(given, {"model": {"scheme": scheme, "scheme_options": chosen}}))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, (bool, type(None))) else str(value)
