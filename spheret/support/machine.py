"""The machine: versions, hardware, and the device to compute on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spheret import __version__

# imported by the functions that need it, so that counting cores does not
if TYPE_CHECKING:
    import torch


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Versions and hardware, for JSON."""
    import torch

    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "spheret": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processor": model,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str | None:
    """The commit of the source tree that spheret runs from, or None if it is not a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


def resolve_device(wanted: str | None) -> torch.device:
    """The device of this name, or the first of cuda, mps and cpu that this machine has."""
    import torch

    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted is None:
        wanted = next(name for name, there in have.items() if there)
    kind = wanted.split(":")[0]
    if not have.get(kind, False):
        usable = ", ".join(name for name, there in have.items() if there)
        raise ValueError(f"--device {wanted} is not available: this machine has {usable}.")
    return torch.device(wanted)


def write_measurement(path: Path | None, result: dict[str, Any]) -> None:
    """Write a command's numbers as JSON, with the command and the machine; nothing happens without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"command": " ".join(["spheret", *sys.argv[1:]]), **machine(), **result}, indent=1) + "\n"
        )
