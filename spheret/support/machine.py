"""The machine: versions, hardware, and the device to compute on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spheret import __version__
from spheret.support.ranges import bytes_in_words

# imported by the functions that need it, so that counting cores does not
if TYPE_CHECKING:
    import torch


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_threads() -> int:
    """The most threads that a command may have: eight per core."""
    return 8 * cores()


def check_threads(flag: str, threads: int) -> int:
    """Return a number of threads, or raise if it is not between one and eight per core."""
    most = most_threads()
    if not 1 <= threads <= most:
        raise ValueError(f"{flag} must lie between 1 and {most}, eight per core, got {threads}.")
    return threads


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """Within the block torch uses one thread for widths up to 256: small decompositions are slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if width <= 256 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """Versions and hardware, for JSON."""
    import torch

    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
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
        result = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, encoding="utf-8")
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
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(
            f"--device {wanted} does not exist: give {kind}, or {kind}:0 for the first of them."
        ) from None
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if (device.index or 0) >= count:
        raise ValueError(f"--device {wanted} is not available: this machine has {count} {kind}, counted from 0.")
    return device


# where Linux says how much memory a container may use, in its second and first version of control groups
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes(device: torch.device) -> int | None:
    """The memory of a device, or of this machine and its container, in bytes; None where the system does not say."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = []
    with suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in _CONTAINER_LIMITS:
        # "max" stands for no limit
        with suppress(ValueError, OSError):
            limits.append(int(Path(name).read_text(encoding="utf-8")))
    return min((limit for limit in limits if limit > 0), default=None)


def check_bytes(needed: float, device: torch.device, what: str, remedy: str) -> None:
    """Raise if more bytes are needed than the device has."""
    have = memory_bytes(device)
    if have is not None and needed > have:
        place = "this machine" if device.type == "cpu" else str(device)
        raise ValueError(
            f"{what} needs at least {bytes_in_words(needed)}, and {place} has {bytes_in_words(have)}: {remedy}."
        )
