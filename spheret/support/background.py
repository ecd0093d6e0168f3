"""Errors in threads that a library starts."""

from __future__ import annotations

import threading

_SILENT: set[str] = set()


def silence_threads(package: str) -> None:
    """Print no trace when a thread of this package fails. It is for packages that also tell the caller."""
    if not _SILENT:
        before = threading.excepthook

        def hook(failure: threading.ExceptHookArgs) -> None:
            if type(failure.thread).__module__.split(".")[0] not in _SILENT:
                before(failure)

        threading.excepthook = hook
    _SILENT.add(package)
