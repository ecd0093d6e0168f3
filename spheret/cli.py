"""The command line: one row per command, each a plain function that tyro turns into flags."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from spheret import __version__
from spheret.support import mkl
from spheret.support.cache import keep_libraries_inside
from spheret.support.errors import (
    BROKEN_PIPE,
    INTERNAL_ERROR,
    INTERRUPTED,
    USAGE_ERROR,
    explanation,
    internal_error,
    need_lab,
    one_line,
    unknown,
)

# name: (module:function, what it is for); a module is imported when its command runs, and torch with it
COMMANDS: dict[str, tuple[str, str]] = {
    "race": ("spheret.lab.race:race", "train every scheme on the same batches, then write one report; resumable"),
    "study": ("spheret.lab.study:study", "find each scheme's best learning rate, then say who wins; resumable"),
    "prepare": (
        "spheret.data.prepare_command:prepare_command",
        "turn any text into checked, resumable shards of token ids",
    ),
    "train": ("spheret.train.train_command:train", "train a GPT under any scheme; resumes bit for bit"),
    "sample": ("spheret.train.sample:sample", "print text from a run"),
    "eval": (
        "spheret.evaluate.eval_command:eval_command",
        "evaluate a run zero-shot on the paper's tasks, by lm_eval",
    ),
    "inspect": (
        "spheret.observe.inspect.command:inspect_command",
        "show what the stream of a run does, or of two runs",
    ),
    "report": ("spheret.lab.report:report_command", "compare runs: a page, tables and figures"),
    "reproduce": ("spheret.paper.reproduce:reproduce", "run the paper's recipe: one cell of its tables, or all 48"),
    "export": ("spheret.hub.transfer:export_command", "write a run as files that transformers loads"),
    "import": ("spheret.hub.transfer:import_command", "make a run of a model that transformers has saved"),
    "convert": (
        "spheret.conversion.command:convert_command",
        "put a trained model's stream on a sphere, with its loss before and after",
    ),
    "schemes": ("spheret.catalogue:schemes", "list every scheme and retraction: formula, options, source, backends"),
    "doctor": ("spheret.doctor:doctor", "check versions, devices and backends"),
}


def parse(function: Callable[..., Any], prog: str, words: Sequence[str]) -> Callable[[], Any]:
    """The call of a command's function that these words ask for. Words that it does not have raise ValueError.

    `--help` prints the flags and raises SystemExit.
    """
    import tyro

    # tyro calls what it has parsed; this call is kept for later, when no error is one of the words
    @functools.wraps(function)
    def later(*arguments: Any, **named: Any) -> Callable[[], Any]:
        return lambda: function(*arguments, **named)

    try:
        return tyro.cli(later, prog=prog, args=list(words))
    except SystemExit as error:
        if not error.code:
            raise
        raise ValueError(f"invalid arguments (see above): `{prog} --help` lists the flags.") from None


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  spheret {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"spheret {__version__}: deep connections for PyTorch\n\n{rows}\n\nspheret COMMAND --help lists its flags."


def _drop_output() -> None:
    """Send the rest of the output nowhere if it cannot be written: at exit Python would print its own message."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str) -> None:
    """Print to stderr. If nothing can be written there, the exit code has to say it."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends with one sentence on stderr and exit code 2.

    Any other exception is a mistake of ours: one sentence, the trace in a file, and exit code 1.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # it is None if it was closed before the start, and libraries ask it for its width
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    # a name that this terminal cannot show is not an error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    name = words[0] if words and words[0] in COMMANDS else ""
    prog = f"spheret {name}".rstrip()
    try:
        # a program that calls this function keeps its own environment
        if name and arguments is None:
            _keep_to_ourselves()
        _check_encoding(words)
        code = _run(name, prog, words[1:]) if name else _answer(words)
        # here a full disk is still an error with a sentence
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _say(f"{prog}: stopped")
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of the output went away, as `| head` does
        return BROKEN_PIPE
    except SystemExit as error:
        # rich ends a process so when that happens
        if isinstance(error.__context__, BrokenPipeError):
            return BROKEN_PIPE
        raise
    except Exception as error:
        sentence = explanation(error)
        _say(f"{prog}: {internal_error(error) if sentence is None else one_line(sentence)}")
        return INTERNAL_ERROR if sentence is None else USAGE_ERROR
    finally:
        _drop_output()


def _keep_to_ourselves() -> None:
    """Keep this process and those that libraries start apart from the current directory, which is anybody's."""
    try:
        os.getcwd()
    except OSError:
        # libraries below torch end the process without a word of why
        raise FileNotFoundError(
            "the current directory is gone: go to an existing one, and run the same command again."
        ) from None
    keep_libraries_inside()
    # before any library imports torch
    mkl.load()
    os.environ["PYTHONSAFEPATH"] = "1"


def _check_encoding(words: Sequence[str]) -> None:
    """Raise if a word is not UTF-8. All files of spheret are, and some of them contain these words."""
    for word in words:
        # Python keeps the bytes that it cannot decode as lone surrogates
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"{word!r} is not UTF-8: give a name that is.")


def _answer(words: Sequence[str]) -> int:
    """Answer words that are no command: help, the version, or what is wrong with them."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"spheret {__version__}")
        return 0
    raise unknown("command", words[0], COMMANDS)


def _run(name: str, prog: str, words: Sequence[str]) -> int:
    # before torch is imported, which takes seconds
    need_lab()
    module, _, function = COMMANDS[name][0].partition(":")
    loaded = importlib.import_module(module)
    try:
        call = parse(getattr(loaded, function), prog, words)
    except SystemExit:
        # --help
        return 0
    return call() or 0
