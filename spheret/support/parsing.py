"""Flags into a call: tyro reads the words of a command, and says what it does not understand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def parse(function: Callable[..., Any], prog: str, words: Sequence[str]) -> Callable[[], Any]:
    """The call of a command's function that these words ask for. Words that it does not have raise ValueError.

    `--help` prints the flags and raises SystemExit.
    """
    import tyro

    # tyro calls what it has parsed; this call is kept for later, when no error is one of the words
    @functools.wraps(function)
    def later(*arguments: Any, **named: Any) -> Callable[[], Any]:
        return lambda: function(*arguments, **named)

    try:
        return tyro.cli(later, prog=prog, args=list(words))
    except SystemExit as error:
        if not error.code:
            raise
        raise ValueError(f"not understood, as said above: `{prog} --help` lists the flags.") from None
