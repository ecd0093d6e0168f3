"""MKL's fast code on AMD processors, for processes that the lab starts.

MKL asks a function of its own whether the processor is Intel's, and takes slower code on all others: 110 instead of
230 to 255 GFLOP/s were measured on an AMD processor. A library with that function, loaded before torch, answers yes.
The last bits of a product differ with it, so that a run records it in its backend.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from spheret.support.cache import cache_directory

# "fast" loads the library. The lab sets it for its trainings, unless the user has set something else
VARIABLE, FAST = "SPHERET_MKL", "fast"
_SOURCE = b"int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"
_loaded: list[ctypes.CDLL] = []


def vendor() -> str:
    """The maker of the processor as Linux names it, such as AuthenticAMD; empty where that is not known."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def library() -> Path:
    """The library, built by the machine's compiler unless the cache has it."""
    folder = cache_directory() / f"native-{os.geteuid()}"
    # what lies in it is run: it is this user's own, whatever the umask is
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"mkl-{platform.machine()}-{hashlib.sha256(_SOURCE).hexdigest()}.so"
    if not path.exists():
        # each process builds its own file and renames it atomically
        built = path.with_suffix(f".{os.getpid()}")
        compiler = shlex.split(os.environ.get("CC") or "cc")
        flags = ["-shared", "-fPIC", "-O2", "-x", "c", "-", "-o"]
        subprocess.run([*compiler, *flags, built], input=_SOURCE, check=True, capture_output=True)
        os.replace(built, path)
    return path


def load() -> None:
    """Load the library if the process was asked to and the processor is AMD's. Call it before torch is imported."""
    if os.environ.get(VARIABLE) != FAST or vendor() != "AuthenticAMD" or _loaded or "torch" in sys.modules:
        return
    try:
        _loaded.append(ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"spheret: MKL keeps its slow code, because the library was not built: {error}", file=sys.stderr)


def names() -> list[str]:
    """What the backend of a run says of it."""
    return ["mkl-fast"] if _loaded else []
