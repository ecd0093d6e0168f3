"""Parse schemes and their options on the command line: `--schemes a,b:option=value` and `--set option=value`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from spheret.connections import OTHER_NAMES, PAPER_SCHEMES, SCHEMES, Scheme, scheme
from spheret.retractions import Retraction, table_name
from spheret.support.errors import shortened, unknown
from spheret.support.ranges import json_value

_WORDS = {"none": None, "None": None, "True": True, "False": False, "inf": math.inf}


def parse_options(settings: Iterable[str]) -> dict[str, Any]:
    """Settings `option=value` as a dictionary. A value is JSON, inf, none, or a plain word."""
    options: dict[str, Any] = {}
    for setting in settings:
        option, equals, text = setting.partition("=")
        if not (option and equals and text):
            raise ValueError(f"--set takes option=value, got {setting!r}.")
        options[option] = _WORDS[text] if text in _WORDS else json_value(f"--set {shortened(option)}", text)
        if isinstance(options[option], (list, dict)):
            raise ValueError(f"--set takes a number, a word, true, false or none for {option}, got {text}.")
    return options


# JSON has no infinity: in documents it is this word, where a number may be infinite
INFINITY = "inf"


def json_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a scheme as JSON holds them: a Retraction becomes its name in RETRACTIONS, infinity the word inf."""
    values: dict[str, Any] = {}
    for option, value in options.items():
        name = table_name(value) if isinstance(value, Retraction) else INFINITY if value == math.inf else None
        values[option] = value if name is None else name
        undefined = isinstance(values[option], float) and not math.isfinite(values[option])
        if undefined or not isinstance(values[option], (str, int, float, type(None))):
            raise ValueError(
                f"the option {option} = {value!r} cannot be written to a config, which holds numbers and names: add "
                "your retraction to spheret.RETRACTIONS, and give its name."
            )
    return values


def options_from_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `json_options` wrote, with the number for the word inf."""
    return {option: math.inf if value == INFINITY else value for option, value in options.items()}


@dataclass(frozen=True)
class SchemeChoice:
    """A scheme and the options that were set for it.

    others: settings that are not options of the scheme, such as head=tied.
    """

    name: str
    settings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The choice as the command line spells it: `scheme:option=value`."""
        return ":".join((self.name, *self.settings, *self.others))

    @property
    def options(self) -> dict[str, Any]:
        return parse_options(self.settings)

    def build(self) -> Scheme:
        return scheme(self.name, **self.options)


def parse_schemes(text: str, others: Collection[str] = ()) -> list[SchemeChoice]:
    """Scheme names separated by commas. `paper` is its eight and Post-LN, `all` every scheme.

    `scheme:option=value:option=value` sets options of a scheme, and settings whose names are in `others`.
    """
    groups = {"paper": PAPER_SCHEMES, "all": tuple(SCHEMES)}
    words: list[str] = []
    for word in text.split(","):
        words += groups.get(word.strip(), (word.strip(),))
    choices = []
    for word in dict.fromkeys(words):
        name, *settings = word.split(":")
        if name not in SCHEMES:
            raise unknown("scheme", name, [*SCHEMES, *groups], OTHER_NAMES)
        for setting in settings:
            # a race names a directory after the variant
            if not re.fullmatch(r"\w+=[\w.+-]+", setting):
                raise ValueError(f"a variant is scheme:option=value, as in {name}:schedule=sqrt, got {word!r}.")
        other = tuple(each for each in settings if each.partition("=")[0] in others)
        choices.append(SchemeChoice(name, tuple(each for each in settings if each not in other), other))
    return choices
