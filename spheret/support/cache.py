"""The cache directory: apart from output directories, the only place that spheret writes to."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Return `$SPHERET_CACHE` if it is set, otherwise the user's cache directory of this system.

    That directory is the one that the package platformdirs names.
    """
    chosen = os.environ.get("SPHERET_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser() / "spheret" / "Cache"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    if not os.path.isabs(caches):
        caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(caches).expanduser() / "spheret"


# where other libraries keep files of their own: our folder, the variable that says so, and variables by which the
# user may have chosen already
PLACES = {
    "matplotlib": ("MPLCONFIGDIR",),
    "inductor": ("TORCHINDUCTOR_CACHE_DIR",),
    "triton": ("TRITON_CACHE_DIR", "TRITON_HOME"),
    "hub": ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"),
    "datasets": ("HF_DATASETS_CACHE", "HF_HOME"),
    "modules": ("HF_MODULES_CACHE", "HF_HOME"),
    "xet": ("HF_XET_CACHE", "HF_HOME"),
}


def keep_libraries_inside() -> None:
    """Give other libraries a place in the cache for what they write, unless the user has given them one.

    They look when they are imported, so this comes first. Nothing is made before one of them writes.
    """
    cache = cache_directory().absolute()
    for folder, variables in PLACES.items():
        if not any(map(os.environ.get, variables)):
            os.environ[variables[0]] = str(cache / folder)
    # Inductor keeps these below the system's folder for temporary files and nowhere else, where any user may put them
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
