"""Settings that a dataclass of settings gained after documents with the others existed.

A document leaves such a setting out where it has its default. So documents from before read as they did, and a
document that uses none of them is the same as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

_LATER = "added later"


def later(default: Any) -> Any:
    """A field of a dataclass for a setting that was added later."""
    return field(default=default, metadata={_LATER: True})


def later_settings(kind: Any) -> dict[str, Any]:
    """The settings of a dataclass that were added later, with their defaults."""
    return {setting.name: setting.default for setting in fields(kind) if setting.metadata.get(_LATER)}


def without_later_defaults(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass as a document has them: later settings only if they are not the default."""
    defaults = later_settings(kind)
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
