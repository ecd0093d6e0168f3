"""The one place outside an output directory that is written: $SPHERET_CACHE, or the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    given = os.environ.get("SPHERET_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spheret"
