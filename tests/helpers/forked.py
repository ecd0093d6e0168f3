"""Commands in a fork: how each ends, and what it leaves in a directory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
from matplotlib.transforms import TransformNode

from spheret.analysis import figures
from spheret.certificates import figure as certificate_figure
from spheret.cli import main
from spheret.lab.figures import answers as answer_figures
from spheret.lab.figures import runs as run_figures

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


class Child:
    """A fork that runs command after command. If one ends it, the next command gets a new fork.

    A fork costs more than most commands, so that there is not one for each. Nothing that spheret keeps in memory
    is the content of a file.
    """

    def __init__(self, stage: Path, scratch: Path) -> None:
        """stage: where commands start. scratch: where their words, and the figures of the whole stage, are kept."""
        self.stage, self.scratch, self._process = stage, scratch, 0

    def run(self, words: Sequence[str], at_first: bool = False) -> Outcome:
        """Run a command.

        at_first: everything is imported for the first time, so that it may take long, and in a fork of its own.
        Otherwise a signal ends what takes too long.
        """
        if at_first:
            self.end()
        if not self._process:
            self._fork()
        self._orders.write(json.dumps([words, at_first]) + "\n")
        self._orders.flush()
        if answer := self._answers.readline():
            code = int(answer)
        else:
            code, self._process = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1]), 0
        if at_first:
            self.end()
        made = {name: digest for name, digest in snapshot(self.stage / "out").items() if not name.endswith("/")}
        printed, errors = ((self.scratch / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(code, printed, errors, made)

    def end(self) -> None:
        if self._process:
            self._orders.close()
            os.waitpid(self._process, 0)
            self._process = 0

    def _fork(self) -> None:
        (reads, orders), (answers, writes) = os.pipe(), os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                os.close(orders)
                # pytest has put its own in their place
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                with os.fdopen(reads) as lines:
                    for line in lines:
                        os.write(writes, f"{self._obey(*json.loads(line))}\n".encode())
            finally:
                os._exit(0)
        os.close(reads)
        os.close(writes)
        self._orders, self._answers = os.fdopen(orders, "w"), os.fdopen(answers)

    def _obey(self, words: Sequence[str], at_first: bool) -> int:
        environment = dict(os.environ)
        os.chdir(self.stage)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(self.scratch / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        try:
            with _figures_remembered(self.scratch / "figures", at_first):
                if not at_first:
                    signal.setitimer(signal.ITIMER_PROF, COMPUTING)
                    signal.alarm(WAITING)
                code = main(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 98
        except BaseException:
            traceback.print_exc()
            code = 99
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ.clear()
        os.environ.update(environment)
        if at_first:
            (self.scratch / "modules").write_text("\n".join(sys.modules))
        return code


class _Content(pickle.Pickler):
    """Pickles what a figure holds. A transform also keeps the addresses of those that use it, which never repeat."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            # a function inside of another is its name and what it holds
            return tuple, ([value.__qualname__, [cell.cell_contents for cell in value.__closure__ or ()]],)
        if not isinstance(value, TransformNode):
            return NotImplemented
        return object.__new__, (type(value),), value.__getstate__() | {"_parents": None}


def _key(arguments: Any) -> str:
    content = io.BytesIO()
    _Content(content).dump(arguments)
    return hashlib.sha256(content.getvalue()).hexdigest()


@contextmanager
def _figures_remembered(memory: Path, keep: bool) -> Iterator[None]:
    """Draw no figure twice: matplotlib takes most of a command's time.

    A figure is looked up by everything that it holds, so that a figure of damaged numbers is drawn.
    keep: whether new figures are kept, as those of the whole stage are.
    """
    memory.mkdir(exist_ok=True)

    def remembered(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*arguments: Any, **options: Any) -> Any:
            path = memory / _key((arguments, options))
            if path.exists():
                return pickle.loads(path.read_bytes())
            drawing = draw(*arguments, **options)
            if keep:
                path.write_bytes(pickle.dumps(drawing))
            return drawing

        return drawn

    on_the_page, alone = remembered(run_figures.render), remembered(figures.png)
    with (
        mock.patch.object(run_figures, "render", on_the_page),
        mock.patch.object(answer_figures, "render", on_the_page),
        mock.patch.object(figures, "png", alone),
        mock.patch.object(certificate_figure, "png", alone),
    ):
        yield


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


@contextmanager
def surroundings(cache: Path) -> Iterator[None]:
    """What forks need: a cache of their own, no network, and one thread, because a fork has none of the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {"SPHERET_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}):
        yield
    torch.set_num_threads(threads)


def try_all(stage: Any, cases: Sequence[Any]) -> list[str]:
    """Try cases on a stage, print how they ended, and return what is wrong with each that fails."""
    begun = time.monotonic()
    wrong = [text for text in map(stage.try_case, cases) if text is not None]
    print(f"{len(cases):,} cases, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s")
    for (kind, end), count in sorted(stage.counts.items()):
        print(f"{kind}: {count:,} {end}")
    stage.counts.clear()
    return wrong
