"""Errors that say what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


def unknown(kind: str, given: object, allowed: Iterable[str]) -> ValueError:
    """The error for an unknown name. It suggests the nearest known one and lists all of them."""
    names = list(allowed)
    # a name from a file may be of any length
    shown = repr(given) if len(repr(given)) <= 80 else repr(given)[:77] + "..."
    near = difflib.get_close_matches(str(given)[:80], names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {shown}.{hint} Known: {', '.join(names)}.")


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency. If it is missing, the error names the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed. Run: pip install "spheret[{extra}]"') from error
