"""Helpers of the data tests."""

from __future__ import annotations

SENTENCES = (
    "The quick brown fox doesn't jump.",
    "Ünïcode \u2013 “quotes” and 中文 stay.",
    "tabs\tand  spaces,\n\nthen 1234 more",
)


def documents(count: int = 120) -> list[str]:
    """Return different documents with several scripts and kinds of white space."""
    return [
        f"{number}: " + " ".join(SENTENCES[(number + n) % 3] for n in range(number % 7 + 1))
        for number in range(count)
    ]
