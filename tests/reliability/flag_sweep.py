"""Every flag of every command with values that are seldom meant, and a judge of what happens.

The flags come from tyro's own parser, so that a new flag is swept from its first day. Each command has a base: words
with which it ends quickly. A case adds one flag to the base, or replaces one of its positional words. It runs in a
forked child, on a stage that is put back as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forked
import fuzz
import tyro

from spheret.cli import COMMANDS

TINY = (
    "--layers", "1", "--heads", "1", "--width", "8", "--block", "16", "--batch-size", "1", "--eval-windows", "1",
    "--steps", "1", "--threads", "1", "--quiet",
)  # fmt: skip


class Base(NamedTuple):
    """Words with which a command ends quickly, and the files of the stage that it may write beside `out/`."""

    command: str
    positional: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    writes: str = "nothing"


BASES = (
    # finished already. Other valid settings are refused here, and `train` has them too
    Base("race", (), ("--out", "race", "--schemes", "pre-ln", "--lr", "3e-3", "--data", "data", *TINY, "--jobs",
                        "1"),
         r"race/(report.*|costs\.json|results\.jsonl|plan\.toml)"),
    Base("study", ("plan.toml",), ("--results", "results.jsonl", "--out", "out/study")),
    Base("prepare", ("texts",), ("--out", "out/data", "--tokenizer", "bytes", "--val-fraction", "0.2", "--workers",
                                 "1")),
    Base("prepare", ("texts",), ("--out", "data", "--verify")),
    Base("train", (), ("--out", "out/run", "--scheme", "pre-dyt", "--data", "data", *TINY, "--no-tensorboard")),
    Base("sample", ("run",), ("--tokens", "2")),
    Base("eval", ("run",), ("--tasks", "piqa", "--data", str(fuzz.ROWS), "--limit", "1"),
         r"run/eval(_fewshot)?(_samples)?\.jsonl?"),
    Base("certify", ("run",), ("--tokens", "1", "--sequence", "1", "--out", "out/certificate")),
    Base("certify", (), ("--schemes", "pre-ln", "--layers", "1,2", "--width", "8", "--out", "out/initialisation")),
    Base("inspect", ("run",), ("--windows", "1", "--out", "out/inspect")),
    Base("report", ("run",), ("--out", "out/report")),
    Base("explore", ("run",), ("--windows", "1", "--out", "out/explorer.html")),
    Base("reproduce", (), ("--dataset", "openwebtext", "--size", "S", "--scheme", "keel", "--out", "out/paper",
                           "--data", "nowhere")),
    Base("reproduce", (), ("--dataset", "openwebtext", "--size", "S", "--scheme", "keel", "--out", "out/paper",
                           "--dry-run")),
    Base("coord-check", (), ("--widths", "8,16", "--layers", "1,2", "--steps", "1", "--seeds", "1", "--batch-size",
                             "1", "--block", "4", "--out", "out/coordinates")),
    Base("plan"),
    Base("export", ("run",), ("--out", "out/exported")),
    Base("import", ("exported",), ("--out", "out/imported")),
    Base("convert", ("run",), ("--data", "data", "--out", "out/converted", "--steps", "1", "--batch-size", "1",
                               "--block", "8", "--eval-windows", "1", "--threads", "1", "--quiet")),
    Base("schemes"),
    Base("retractions"),
    Base("doctor"),
)  # fmt: skip
PLAN = """
title = "A trial"
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [1e-3, 2e-3]
"""

# words that are no numbers of the kind, and numbers that nobody means
WORDS = ("", "word", "nan", "inf", "-inf", "9" * 5000)
NUMBERS = ("0", "-1", str(1 << 70), "1" + "0" * 400)
FRACTIONS = ("1e308", "1e-308")
# a place below the stage is named as the stage has it
PLACES = (
    "elsewhere/missing", "elsewhere", "elsewhere/notes.txt", "elsewhere/notes.txt/below", "elsewhere/link",
    "elsewhere/way", "/dev/zero", "/dev/full",
)  # fmt: skip
TEXTS = (
    "", "word", "0", "-1", "nan", "1" + "0" * 400, "\udcff\udcfe", "x" * 100_000, "a\nb", "../..", "~nobody-here/x",
)  # fmt: skip
# a flag is given without a value, and twice
NOTHING, TWICE = "no value", "twice"
VALUES = {
    "INT": (*WORDS, *NUMBERS, *FRACTIONS),
    "FLOAT": (*WORDS, *NUMBERS, *FRACTIONS),
    "TEXT": (*TEXTS, *PLACES),
    "SWITCH": ("", TWICE, "=word"),
}
VALID = {"INT": "1", "FLOAT": "0.5", "TEXT": "word"}
# numbers that mean something to these flags, although they mean nothing to the others
MEANT = {
    # any whole number is a seed of `doctor`
    ("--seed", "-1"),
    ("--seed", NUMBERS[2]),
    ("--seed", NUMBERS[3]),
    ("--clip", "inf"),
    # the next number after all floats
    ("--clip", "9" * 5000),
    ("--clip", NUMBERS[3]),
}
# commands whose exit code 1 is an answer: a machine or a model that fails the check
ANSWER_1 = ("doctor", "certify")


class Flag(NamedTuple):
    """A flag or, without a name, the positional word of this number. `count`: the values that it takes at once."""

    name: str
    kind: str
    count: int = 1
    place: int = 0


class Case(NamedTuple):
    base: Base
    flag: Flag
    value: str

    @property
    def words(self) -> list[str]:
        base, flag, value = self
        positional = list(base.positional)
        if not flag.name:
            positional[flag.place : flag.place + 1] = [value]
            given = []
        elif flag.kind == "SWITCH":
            given = {"": [flag.name], TWICE: [flag.name] * 2}.get(value, [flag.name + value])
        elif value == NOTHING:
            given = [flag.name]
        elif value == TWICE:
            given = [flag.name, *[VALID[flag.kind]] * flag.count] * 2
        elif value.startswith("-") and flag.count == 1:
            given = [f"{flag.name}={value}"]
        else:
            given = [flag.name, *[value] * flag.count]
        return [base.command, *positional, *base.flags, *given]

    @property
    def must_be_refused(self) -> bool:
        """Whether no meaning of the value is right."""
        kind, value = self.flag.kind, self.value
        if value in (NOTHING, "=word"):
            return True
        if kind not in ("INT", "FLOAT") or (self.flag.name, value) in MEANT or value == TWICE:
            return False
        return value in WORDS or value in NUMBERS[1:2] or value in (*NUMBERS[2:], *FRACTIONS) * (kind == "INT")

    def __str__(self) -> str:
        return re.sub(r"(.)\1{60,}", r"\1...", " ".join(self.words).encode("ascii", "backslashreplace").decode())


def parser(command: str) -> argparse.ArgumentParser:
    module, _, function = COMMANDS[command][0].partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(getattr(importlib.import_module(module), function))


def flags(command: str) -> Iterator[Flag]:
    """Every flag of a command and every positional word. A switch with a --no-form is two flags."""
    place = 0
    for action in parser(command)._actions:
        metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else str(action.metavar)
        kind = next((kind for kind in ("INT", "FLOAT") if kind in metavar), "TEXT")
        if not action.option_strings:
            yield Flag("", kind, place=place)
            place += 1
            continue
        for name in action.option_strings:
            yield Flag(name, "SWITCH") if action.nargs == 0 else Flag(name, kind, *_count(action))


def _count(action: Any) -> tuple[int, ...]:
    return (action.nargs,) if isinstance(action.nargs, int) else ()


def cases(base: Base) -> Iterator[Case]:
    for flag in flags(base.command):
        # the drill kills for minutes
        if flag.name == "--crash-drill":
            continue
        more = (NOTHING, TWICE) if flag.name and flag.kind != "SWITCH" else ()
        for value in (*VALUES[flag.kind], *more):
            yield Case(base, flag, value)


class Stage:
    """Data, a run, its export, a finished race, and files of somebody else."""

    def __init__(self, root: Path, whole: bool) -> None:
        """whole: with the race and the export, which take longest."""
        self.root, self.stage, self.pristine = root, root / "stage", root / "pristine"
        self.counts: dict[tuple[str, str], int] = {}
        self.child = forked.Child(self.stage, root)
        # names of modules that need no second attempt
        self.tried: set[str] = set()
        texts, elsewhere = self.stage / "texts", self.stage / "elsewhere"
        for folder in (texts, elsewhere, self.stage / "out"):
            folder.mkdir(parents=True)
        choose = random.Random(0)
        for number in range(20):
            (texts / f"{number}.txt").write_text(" ".join(choose.choices(["sphere", "angle", "of", "the"], k=100)))
        (elsewhere / "notes.txt").write_text("not of spheret\n")
        (elsewhere / "link").symlink_to("notes.txt")
        (elsewhere / "way").symlink_to(".")
        (self.stage / "plan.toml").write_text(PLAN)
        (self.stage / "results.jsonl").touch()
        base = {base.command: base for base in reversed(BASES)}
        # absolute, because the run keeps it
        data = ("--data", str(self.stage / "data"))
        self._do("prepare", *base["prepare"].positional, *base["prepare"].flags, "--out", "data")
        self._do("train", *base["train"].flags, *data, "--out", "run")
        if whole:
            self._do("export", "run", "--out", "exported")
            self._do("race", *base["race"].flags)
        shutil.copytree(self.stage, self.pristine, symlinks=True)
        self.before = forked.snapshot(self.pristine)

    def _do(self, *words: str) -> None:
        outcome = self.child.run(words, at_first=True)
        assert outcome.code == 0, (words, outcome)

    def _import(self) -> None:
        """Import what the last child has imported, so that the next ones need not."""
        names = set((self.root / "modules").read_text().split()) - self.tried
        self.tried |= names
        for name in names - sys.modules.keys():
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def try_case(self, case: Case) -> str | None:
        """Run and judge. Returns what is wrong, or None."""
        self._import()
        outcome = self.child.run(case.words)
        after = forked.snapshot(self.stage)
        said = outcome.printed + outcome.errors
        wrong = _judge(case, outcome) or self._judge_files(case, outcome.code, said, after)
        if after != self.before:
            shutil.rmtree(self.stage)
            shutil.copytree(self.pristine, self.stage, symlinks=True)
        end = {2: "refused", -signal.SIGPROF: "at work", -signal.SIGALRM: "at work"}.get(outcome.code, "done")
        counted = case.base.command, "wrong" if wrong else end
        if counted[1] == "at work":
            print(f"at work: {case}")
        self.counts[counted] = self.counts.get(counted, 0) + 1
        return wrong and f"{case}: {wrong}\n{outcome.printed[-300:]}{outcome.errors[-1500:]}"

    def _judge_files(self, case: Case, code: int, said: str, after: dict[str, str]) -> str | None:
        if code == 2:
            changed = sorted(set(self.before.items()) ^ set(after.items()))
            return f"{changed[0][0]} was changed by a refused command" if changed else None
        if code >= 0 and after == self.before and not said:
            return "it did nothing"
        may = re.compile(case.base.writes)
        for path in self.before.keys() | after.keys():
            if self.before.get(path) == after.get(path) or may.fullmatch(path):
                continue
            if path in self.before:
                return f"{path} was changed"
            given = case.flag.kind == "TEXT" and path.startswith(case.value.split("/")[0])
            if not given and not path.startswith("out/") and case.value != TWICE:
                return f"{path} was left behind"
        return None


def _judge(case: Case, outcome: forked.Outcome) -> str | None:
    code, errors = outcome.code, outcome.errors
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        # a number that asks for long work gets it
        return "it took too long" if case.must_be_refused or case.flag.kind == "TEXT" else None
    if code < 0:
        return f"signal {-code}"
    if "internal error" in errors or "Traceback" in errors:
        return "a trace"
    if code not in (0, 2, 3) and not (code == 1 and case.base.command in ANSWER_1):
        return f"exit code {code}"
    if code != 2:
        if case.must_be_refused:
            return "it was not refused"
        return None
    lines = [line for line in errors.splitlines() if line.strip()]
    start = f"spheret {case.base.command}: "
    if not (lines and lines[-1].startswith(start) and lines[-1].endswith((".", "?"))):
        return "no sentence at the end"
    if len(lines[-1]) > 1500:
        return "a sentence without end"
    return None
