"""Other processes that run Python; a `Child` ends when its parent ends, for any reason.

None of them imports from the directory in which it starts, which may hold anybody's files.
"""

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

from spheret.support import mkl
from spheret.support.files import replaced

_PR_SET_PDEATHSIG = 1
# seconds that a child may take to save when it is asked to stop
PATIENCE = 60.0

# looked up before any fork, because afterwards a lock may stay held. None where it is not Linux: there a child whose
# parent was killed runs to its own end
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


def _ends_with(parent: int) -> Callable[[], None]:
    """What a child does first: it asks the system for a SIGTERM when its parent dies, by kill -9 too."""

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # the parent may have died before this call
        if os.getppid() != parent:
            os._exit(1)

    return ask


def spheret_command(arguments: Sequence[str], processes: int | None = None) -> list[str]:
    """The words that run `spheret ARGUMENTS` with this Python; with `processes`, that many of them under torchrun."""
    start = ["-m", "spheret"]
    if processes is not None:
        # what torchrun starts has no -P: the environment has to say the same
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        start = [*torchrun, "--max-restarts=3", *start]
    return python_command(*start, *arguments)


def python_command(*words: str) -> list[str]:
    """The words that run Python without the current directory on its import path. Give it `python_environment()`."""
    return [sys.executable, "-P", *words]


def python_environment() -> dict[str, str]:
    """This environment, in which Python finds this copy of spheret and all that this process finds.

    The current directory is left out, also if it is on this process's path, and also for processes that the child
    starts in its turn.
    """
    root, here = str(Path(__file__).resolve().parents[2]), os.path.realpath(os.curdir)
    path = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
    if root not in path:
        path.insert(0, root)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


class Child:
    """`python -m spheret ARGUMENTS`, with its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self._file: IO[bytes] = replaced(log)
        self._process = subprocess.Popen(
            spheret_command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            # a user's own choice comes first
            env={mkl.VARIABLE: mkl.FAST, **python_environment()},
            # Ctrl-C reaches only the parent, which asks each child once: a second signal would not let it save
            start_new_session=True,
            preexec_fn=_ends_with(os.getpid()) if _prctl is not None else None,
        )

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._file.close()
        return code

    def last_line(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()
            self._process.wait()


def stop(children: Sequence[Child]) -> None:
    """Ask each child to save and end. One that takes too long is killed, and so are all after a second Ctrl-C."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
