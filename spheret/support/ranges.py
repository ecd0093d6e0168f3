"""Checks of numbers that come from a user. The sentence says what was given and what is allowed."""

from __future__ import annotations

import json
import math
from typing import Any

from spheret.support.errors import shortened

# more than any count of layers, tokens or updates that a machine will ever work off, and far from int64's end
MOST = 10**12


def check_count(name: str, value: int, least: int = 1, most: int = MOST) -> int:
    """Return a whole number, or raise if it lies outside its range."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {shortened(str(value))}.")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {shortened(str(value))}.")
    return value


def check_counts(least: int = 1, **values: int | None) -> None:
    """Check several flags of a command, by the names of its arguments. None stands for a flag that is not given."""
    for name, value in values.items():
        if value is not None:
            check_count("--" + name.replace("_", "-"), value, least)


def check_above_zero(name: str, value: float, most: float = math.inf) -> float:
    """Return a number, or raise if it is NaN, infinite, 0 or less, or above `most`."""
    if not 0 < value < math.inf or value > most:
        limit = "and finite" if most == math.inf else f"and at most {most:g}"
        raise ValueError(f"{name} must be above 0 {limit}, got {value}.")
    return value


def whole_number(name: str, text: str, least: int = 1, most: int = MOST) -> int:
    """The whole number that a word says."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {shortened(text, 60)!r}.")
    # more digits are too large in any case, and Python refuses to read very many
    return check_count(name, int(text.lstrip("0")[:20] or "0"), least, most)


# no value of a setting comes near this, and Python reads neither thousands of digits nor thousands of brackets
_LONGEST_VALUE = 500


def json_value(name: str, text: str) -> Any:
    """The value that a word of the command line says as JSON, or the word itself if it is not JSON."""
    if len(text) > _LONGEST_VALUE:
        raise ValueError(f"{name} may have {_LONGEST_VALUE} letters, got {len(text):,}: {shortened(text)}.")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def counts(name: str, text: str, least: int = 1) -> list[int]:
    """The whole numbers of a list with commas, such as the flag `--batches 1,8`."""
    return [whole_number(f"each number of {name}", word.strip(), least) for word in text.split(",")]


def divisors(number: int) -> list[int]:
    """Every divisor of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(numbers: list[int], wanted: int, most: int = 8) -> str:
    """The numbers nearest to the wanted one, in words: `1, 2, 4 or 8`."""
    near = sorted(sorted(numbers, key=lambda n: abs(n - wanted))[:most])
    return f"{', '.join(map(str, near[:-1]))} or {near[-1]}" if len(near) > 1 else str(near[0])


def bytes_in_words(count: float) -> str:
    """A number of bytes in the unit that shows its digits: `1.2 GB`, `350 kB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"
