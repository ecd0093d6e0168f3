"""A command in a fork: how it ends, and what it leaves in a directory."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.transforms import TransformNode

from spheret.analysis import figures
from spheret.cli import main
from spheret.report import plots

# a command hangs if it computes for so many seconds, or if it has not ended after so many on a busy machine
COMPUTING, WAITING = 10, 60
# what makes a file's content what it is, and the hash of the content
_hashes: dict[tuple[int, ...], str] = {}


class Outcome(NamedTuple):
    """How a command ended: its exit code (minus the signal that killed it), its words, and what is in `out/`."""

    code: int
    printed: str
    errors: str
    made: dict[str, str]


def in_a_child(words: Sequence[str], stage: Path, scratch: Path, at_first: bool = True) -> Outcome:
    """Run a command in a fork that starts in the stage.

    at_first: everything is imported for the first time, so that it may take long. Otherwise a signal ends it.
    """
    printed, errors = scratch / "stdout", scratch / "stderr"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if not at_first:
                signal.setitimer(signal.ITIMER_PROF, COMPUTING)
                signal.alarm(WAITING)
            os.chdir(stage)
            for number, path in ((1, printed), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            # pytest has put its own in their place
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            _remember_figures(scratch / "figures", at_first)
            try:
                code = main(words)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 98
            sys.stdout.flush()
            sys.stderr.flush()
            if at_first:
                (scratch / "modules").write_text("\n".join(sys.modules))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    made = {name: digest for name, digest in snapshot(stage / "out").items() if not name.endswith("/")}
    return Outcome(status, printed.read_text(errors="replace"), errors.read_text(errors="replace"), made)


class _Content(pickle.Pickler):
    """Pickles what a figure holds. A transform also keeps the addresses of those that use it, which never repeat."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TransformNode):
            return NotImplemented
        return object.__new__, (type(value),), value.__getstate__() | {"_parents": None}


def _key(arguments: Any) -> str:
    content = io.BytesIO()
    _Content(content).dump(arguments)
    return hashlib.sha256(content.getvalue()).hexdigest()


def _remember_figures(memory: Path, keep: bool) -> None:
    """Draw no figure twice: matplotlib takes most of a command's time.

    A figure is looked up by everything that it holds, so that a figure of damaged numbers is drawn.
    keep: whether new figures are kept, as those of the whole stage are.
    """
    memory.mkdir(exist_ok=True)

    def remembered(draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def drawn(*arguments: Any) -> Any:
            path = memory / _key(arguments)
            if path.exists():
                return pickle.loads(path.read_bytes())
            drawing = draw(*arguments)
            if keep:
                path.write_bytes(pickle.dumps(drawing))
            return drawing

        return drawn

    plots.render = remembered(plots.render)
    figures._png = remembered(figures._png)


def snapshot(directory: Path) -> dict[str, str]:
    """What is in a directory: the hash of each file, and the target of each link. Folders end in a slash."""
    found: dict[str, str] = {}
    for folder, names, filenames in os.walk(directory):
        start = "" if folder == str(directory) else folder[len(str(directory)) + 1 :] + "/"
        for name in (*names, *filenames):
            path, relative = f"{folder}/{name}", start + name
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                found[relative] = f"-> {os.readlink(path)}"
            elif stat.S_ISDIR(status.st_mode):
                found[relative + "/"] = ""
            elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
                found[relative] = _hash(path, status)
            else:
                found[relative] = f"{stat.S_IFMT(status.st_mode)} {status.st_size}"
    return found


def _hash(path: str, status: os.stat_result) -> str:
    """The hash of a file. It is read again only if something about it has changed: a write changes its ctime."""
    key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if key not in _hashes:
        with open(path, "rb") as file:
            _hashes[key] = hashlib.sha256(file.read()).hexdigest()
    return _hashes[key]
