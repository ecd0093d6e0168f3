"""Errors that say what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


def unknown(kind: str, given: object, allowed: Iterable[str]) -> ValueError:
    """The error for a name that is in no table, with the nearest one that is."""
    names = list(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Known: {', '.join(names)}.")


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed. Run: pip install "spheret[{extra}]"') from error
