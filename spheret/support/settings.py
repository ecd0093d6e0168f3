"""The declaration of a setting: a field of a dataclass with its help, its recipes, and whether it is a flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_DECLARED = "setting"


@dataclass(frozen=True)
class Setting:
    """What is said of a setting beside its type and its default.

    Args:
        help: one line, for `--help` and docs/settings.md.
        flag: whether it is a flag of `spheret train` and `spheret race`; a word is the flag's own name. Every
            other setting is a key of a config file, or of `--set section.key=value`.
        follows: the default in words, if it follows from other settings.
        small: the default of a run without `--size`, if it differs from the field's.
        paper: the paper's value; three of them are for S, M and L.
        with_size: how `--size` takes the paper's value, as a format of it; "" if it does not take it.
    """

    help: str
    flag: bool | str = False
    follows: str = ""
    small: Any = None
    paper: Any = None
    with_size: str = ""

    def flag_of(self, name: str) -> str | None:
        """The flag of the setting of this name, without dashes in front; None if it has none."""
        if isinstance(self.flag, str):
            return self.flag
        return name.replace("_", "-") if self.flag else None

    def paper_value(self, size: str) -> Any:
        """The paper's value for S, M or L."""
        return self.paper["SML".index(size)] if isinstance(self.paper, tuple) else self.paper


def setting(default: Any = MISSING, *, factory: Callable[[], Any] | Any = MISSING, **said: Any) -> Any:
    """A field of a dataclass of settings, with what `Setting` takes."""
    return field(default=default, default_factory=factory, metadata={_DECLARED: Setting(**said)})


def declared(kind: Any) -> dict[str, Setting]:
    """What is said of each setting of a dataclass."""
    return {each.name: each.metadata[_DECLARED] for each in fields(kind)}
