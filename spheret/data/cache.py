"""Where spheret keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$SPHERET_CACHE, else spheret's folder in the user's cache directory."""
    given = os.environ.get("SPHERET_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spheret"
