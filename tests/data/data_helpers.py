"""Helpers of the data tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def spheret(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "spheret", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
