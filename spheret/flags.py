"""The settings of a run as flags and as words of `--set`, from their declarations in the dataclasses of settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

import tyro

from spheret.connections.parse import parse_options
from spheret.runs.config import SECTIONS, check_section, merge
from spheret.support.errors import unknown
from spheret.support.ranges import json_value
from spheret.support.settings import declared

SIZE_HELP = "The paper's model and recipe: S, M or L. It changes the defaults that name it; give no --layers with it."
SET_HELP = "An option of the scheme, as option=value; or any setting of docs/settings.md, as section.key=value."


def shown(metavar: str, default: str) -> Any:
    """How `--help` shows a flag whose default is None: its value, and what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def default_words(section: str, name: str, recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """The default of a setting, in words. recipe: the defaults of a command, by section."""
    field = next(field for field in fields(SECTIONS[section]) if field.name == name)
    if name in recipe.get(section, {}):
        return str(recipe[section][name])
    if follows := declared(SECTIONS[section])[name].follows:
        return follows
    if field.default is MISSING:
        return "none"
    return " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)


def with_size_words(section: str, name: str) -> str:
    """What `--size` makes of the default of a setting, in words; empty if nothing."""
    said = declared(SECTIONS[section])[name]
    values = said.paper if isinstance(said.paper, tuple) else (said.paper,)
    return said.with_size.format("/".join(f"{x:g}" if isinstance(x, float) else str(x) for x in values))


def section_flags(
    section: str, recipe: Mapping[str, Mapping[str, Any]], size: bool = False, without: tuple[str, ...] = ()
) -> Any:
    """A type that tyro turns into the flags of a section. Parsed, it holds the settings that were given.

    recipe: the defaults that `--help` shows, by section. size: whether the command has `--size`.
    """
    entries: dict[str, Any] = {}
    hints = get_type_hints(SECTIONS[section])
    for name, said in declared(SECTIONS[section]).items():
        flag = said.flag_of(name)
        if flag is None or name in without:
            continue
        # None stands for a setting that is not given
        kind = next((part for part in get_args(hints[name]) if hints[name] == (part | None)), hints[name])
        default = default_words(section, name, recipe)
        sized = with_size_words(section, name) if size else ""
        more = f"; with --size {sized}" if sized else ""
        hint = "(required)" if default == "required" else f"(default: {default}{more})"
        entries[name] = Annotated[kind, tyro.conf.arg(name=flag, help=said.help, help_behavior_hint=hint)]
    if section == "model" and size:
        entries["size"] = Annotated[str, tyro.conf.arg(help=SIZE_HELP, help_behavior_hint="(default: none)")]
    return TypedDict(section, entries, total=False)  # type: ignore[operator]


def given(set: Iterable[str] = (), **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed flags as the settings that were given, by section.

    set: words of `--set`, which win. One with a dot before its = is a setting, any other an option of the scheme.
    """
    settings = {name: dict(values) for name, values in sections.items() if values}
    size = settings.get("model", {}).pop("size", None)
    words = list(set)
    keys = [word for word in words if "." in word.partition("=")[0]]
    options = parse_options(word for word in words if word not in keys)
    if options:
        settings = merge(settings, {"model": {"scheme_options": options}})
    settings = merge(settings, *map(_setting, keys))
    return {**{name: values for name, values in settings.items() if values}, **({"size": size} if size else {})}


def _setting(word: str) -> dict[str, Any]:
    """A word section.key=value as a given setting. A value is JSON, inf, none, or a plain word."""
    place, equals, text = word.partition("=")
    section, _, name = place.partition(".")
    if not (equals and text):
        raise ValueError(f"--set takes section.key=value, got {word!r}.")
    if section not in SECTIONS:
        raise unknown("section of --set", section, SECTIONS)
    kind = get_type_hints(SECTIONS[section]).get(name)
    value: Any = text
    if text == "none" and kind is not str:
        value = None
    elif kind is not str and str not in get_args(kind):
        # the word inf, and one that is of the wrong type, stay words
        value = json_value(f"--set {place}", text)
    return {section: check_section(Path("--set"), section, {name: value})}


def words(settings: Mapping[str, Any]) -> list[str]:
    """Given settings as the words of a command line."""
    result = ["--size", str(settings["size"])] if "size" in settings else []
    for section, kind in SECTIONS.items():
        for name, value in settings.get(section, {}).items():
            flag = declared(kind)[name].flag_of(name)
            if name == "scheme_options":
                for option, each in value.items():
                    result += ["--set", f"{option}={json.dumps(each)}"]
            elif isinstance(value, bool) and flag is not None:
                result.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                plain = isinstance(value, (bool, list, tuple))
                text = json.dumps(value) if plain else str(value)
                result += [f"--{flag}", text] if flag is not None else ["--set", f"{section}.{name}={text}"]
    return result
