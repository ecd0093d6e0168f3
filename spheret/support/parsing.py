"""Flags into a call: tyro reads the words of a command, and what it does not understand becomes one sentence."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from spheret.support.errors import shortened

# how Python says that a word is not a number, and how we do
_REASONS = (
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", "{} must be a whole number, got {}"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", "{} must be a number, got {}"),
    (r"Error parsing (\S+): Exceeds the limit (.*)", "{} must be a number of fewer digits"),
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# of tyro's boxes: where stdout is not UTF-8 they are made of signs that all have
_SIDES, _RULE = "│|", "─-"
_MOST_LETTERS = 300


def parse(function: Callable[..., Any], prog: str, words: Sequence[str]) -> Callable[[], Any]:
    """The call of a command's function that these words ask for. Words that it does not have raise ValueError.

    `--help` prints the flags and raises SystemExit.
    """
    import tyro

    # tyro calls what it has parsed; this call is kept for later, when stderr is no longer caught
    @functools.wraps(function)
    def later(*arguments: Any, **named: Any) -> Callable[[], Any]:
        return lambda: function(*arguments, **named)

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(later, prog=prog, args=list(words))
    except SystemExit as error:
        if not error.code:
            raise
        _refuse(printed.getvalue(), prog)


def _refuse(box: str, prog: str) -> NoReturn:
    """Raise what tyro has printed in a box, as one sentence."""
    message, *rest = _sections(box) or ["these words are not understood"]
    for pattern, sentence in _REASONS:
        if found := re.fullmatch(pattern, message):
            message = sentence.format(*found.groups())
    similar = ("Perhaps", "Arguments similar")
    near = next((section.split(":", 1)[1].split()[0] for section in rest if section.startswith(similar)), None)
    hint = f" Did you mean {near}?" if near else ""
    raise ValueError(f"{shortened(message, _MOST_LETTERS).rstrip('.')}.{hint} `{prog} --help` lists the flags.")


def _sections(box: str) -> list[str]:
    """The parts of a box of tyro's, which lines divide, each on one line."""
    sections = [""]
    for line in _COLOURS.sub("", box).splitlines()[1:-1]:
        text = line.strip().strip(_SIDES).strip()
        if text and not text.strip(_RULE):
            sections.append("")
        else:
            sections[-1] = f"{sections[-1]} {text}".strip()
    return [section for section in sections if section]
