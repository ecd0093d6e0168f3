"""Trainings as child processes: each ends with its parent, whatever ends that."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
# how long a training may take to save when it is asked to stop
PATIENCE = 60.0

# looked up before any fork, after which a lock may be held by nobody. None (not Linux): a training whose parent was
# killed goes on to its own end
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


def _ends_with(parent: int) -> Callable[[], None]:
    """What a child does first: ask the system for a SIGTERM when its parent dies, kill -9 included."""

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # the parent may have died before that was said
        if os.getppid() != parent:
            os._exit(1)

    return ask


class Child:
    """`python -m spheret ARGUMENTS`, with what it says in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self._file: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spheret", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the parent, which then asks each child once: a second signal would not let it save
            start_new_session=True,
            preexec_fn=_ends_with(os.getpid()) if _prctl is not None else None,
        )

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        code = self._process.poll()
        if code is not None:
            self._file.close()
        return code

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()
            self._process.wait()


def stop(children: Sequence[Child]) -> None:
    """Let each save and end; one that takes too long, or a second Ctrl-C, ends it with its last checkpoint."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
