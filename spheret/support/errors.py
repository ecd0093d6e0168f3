"""Errors that say what was given, what is allowed and what to do; and what a command ends with."""

from __future__ import annotations

import difflib
import importlib
import linecache
import os
import re
import secrets
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from spheret.support.cache import cache_directory

# what a command ends with; `spheret train` says what each means
FINISHED = 0
# an exception that nobody expected
INTERNAL_ERROR = 1
USAGE_ERROR = 2
STOPPED_BY_GUARD = 3
# 128 + the signal's number, as shells have it
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
INTERRUPTED = SIGNALS[signal.SIGINT]
# SIGPIPE, which Windows lacks
BROKEN_PIPE = 128 + 13

# what the commands need beyond torch and numpy: the extra `lab` of pyproject.toml
LAB = ("safetensors", "rich", "tyro", "matplotlib", "scipy", "filelock", "jinja2", "msgspec")

_LONGEST_WORD = 500
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def unknown(kind: str, given: object, allowed: Iterable[str], others: Mapping[str, str] | None = None) -> ValueError:
    """The error for an unknown name. It suggests the one that is meant, or the nearest, and lists all of them.

    others: what else the known names are called, in lowercase letters and digits only, and the known name for each.
    """
    names = list(allowed)
    # a name from a file may be of any length
    shown, start = shortened(repr(given)), str(given)[:80]
    meant = (others or {}).get(re.sub("[^a-z0-9]", "", start.lower()))
    near = [meant] if meant in names else difflib.get_close_matches(start, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {shown}.{hint} Known: {', '.join(names)}.")


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency. If it is missing, the error names the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed. Run: pip install "spheret[{extra}]"') from error


def need_lab() -> None:
    """Raise the error of `need` if a package of the extra `lab` is missing. Nothing is imported if all are there."""
    for package in LAB:
        if find_spec(package) is None:
            need(package, "lab")


def shortened(text: str, most: int = 80) -> str:
    """A text for a sentence, which may come from a file and have any length, on one line."""
    text = text.replace("\n", " ")
    return text if len(text) <= most else text[: most - 3] + "..."


def one_line(sentence: str) -> str:
    """A sentence as a terminal can show it: on one line, without words that are longer than any that is meant."""
    words = (word if len(word) <= _LONGEST_WORD else f"{word[:60]}...{word[-20:]}" for word in sentence.split())
    return " ".join(words).encode(errors="backslashreplace").decode()


def explanation(error: Exception) -> str | None:
    """Return what to tell a user about an exception that ended a command. None means that nobody expected it.

    Expected are: errors that spheret raises itself, which are sentences; what the operating system says of a file; a
    package that is not installed; a user's home that is not there; and a lack of memory.
    """
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, MemoryError) or "allocate memory" in first_line or "out of memory" in first_line:
        return f"out of memory ({first_line or 'MemoryError'}): take a smaller model, batch, block or count."
    if isinstance(error, OSError) and error.errno is not None:
        place = f" of {error.filename}" if error.filename is not None else ""
        return f"the system says{place}: {error.strerror}. Fix this, and run the same command again."
    if isinstance(error, ImportError):
        return str(error)
    if isinstance(error, RuntimeError) and "home directory" in first_line:
        return "a path begins with ~ and the name of no user of this machine: write the path out."
    return str(error) if _raised_here(error) else None


@contextmanager
def refusing(what: str, remedy: str, whole: bool = False) -> Iterator[None]:
    """Whatever a library makes of someone else's files in this block becomes one ValueError that begins with `what`.

    Libraries look at some values without a check, so that any exception may come. A package that is not installed is
    not the file's fault, nor is a lack of memory.

    whole: the block is the whole work of a command, ours included. Then sentences of spheret's own stay as they are,
    and the trace of anything else is kept in a file, because the mistake may be ours.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if whole and explanation(error) is not None:
            raise
        reason: BaseException = error
    except BaseException as error:
        # Rust code that fails an assertion, as in tokenizers
        if type(error).__name__ != "PanicException":
            raise
        reason = error
    else:
        return
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()] or [type(reason).__name__]
    kept = _keep_trace(reason) if whole else None
    place = "" if kept is None else f" The trace is in {kept}."
    raise ValueError(f"{what} ({shortened(lines[0], 300).rstrip('.:')}): {remedy}.{place}")


def _raised_here(error: Exception) -> bool:
    """Whether a raise statement of spheret raised this exception, and not a library or a mistake in an expression."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    frame, line = frames[-1]
    name = frame.f_code.co_filename
    return name.startswith(_PACKAGE) and linecache.getline(name, line).lstrip().startswith("raise ")


def internal_error(error: Exception) -> str:
    """Write the trace of an unexpected exception into the cache, and return one sentence that names the file."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    path = _keep_trace(error)
    if path is None:
        trace = "".join(traceback.format_exception(error))
        return f"internal error, {reason}: please report it with this trace.\n{trace}"
    return f"internal error, {reason}: please report it with the trace in {path}."


def _keep_trace(error: BaseException) -> Path | None:
    """Write a trace into the cache. Returns its path, or None if nothing can be written there."""
    try:
        # the cache may be given as the home of a user who is not there
        folder = cache_directory() / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(4)}.txt"
        with (folder / name).open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    except (OSError, RuntimeError):
        return None
    return folder / name
