"""The cache directory: apart from output directories, the only place that spheret writes to."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return `$SPHERET_CACHE` if it is set, otherwise the user's cache directory of this system."""
    chosen = os.environ.get("SPHERET_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("spheret", appauthor=False)
