"""A fuzzer of commands: a stage of tiny runs and data, one damaged file at a time, and a judge of what happens.

A case is a file of the stage, a damage, and a command that reads the file. The command runs in a fork. It
must end with the right result, or with exit code 2 or 3 and one sentence. Nothing that was whole may be lost.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import damage
from forked import Child, Outcome, snapshot
from watched_helpers import event, header, observations, write_watch

ROWS = Path(__file__).parents[1] / "evaluate" / "rows"
TINY = (
    "--layers", "2", "--heads", "2", "--width", "16", "--block", "128", "--batch-size", "2", "--eval-windows", "2",
    "--threads", "1", "--quiet",
)  # fmt: skip
RECIPE = ("--steps", "6", "--eval-every", "2", "--checkpoint-every", "2", "--dropout", "0.1", "--keep", "3")
NEW = ("--data", "data", *TINY, "--steps", "1", "--no-tensorboard", "--out", "out/new")
CONVERT = (
    "gpt2", "--data", "data", "--steps", "1", "--batch-size", "2", "--block", "16", "--eval-windows", "2",
    "--threads", "1",
)  # fmt: skip
RACED = "race/proj-spheretnorm-1337"
STUDIED = "study/runs/pre-ln-lr0.02-seed1-*"
STUDY = ("study", "plan.toml", "--jobs", "1", "--quiet")
PLAN = """
title = "A trial"
[data]
path = "data"
[model]
layers = 1
heads = 2
width = 16
block = 32
[train]
steps = 2
batch_size = 2
checkpoint_every = 1
[evaluation]
eval_every = 1
eval_windows = 2
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [2e-2, 4e-2]
extend = 0
seeds = 1
"""
NEWEST = "run/checkpoints/step-4"

# what to put in the place of a key: {missing, null, wrong types, huge, negative, NaN}
VALUES = ("missing", "null", "word", "number", "true", "list", "table", "huge", "large", "negative", "NaN")
# what can happen to a file
FILES = ("missing", "empty", "truncated", "flipped", "grown", "directory", "link", "pipe", "device")

# the words of each command, and the files of the stage that it may write; `out/` may be written by all
COMMANDS: dict[str, tuple[Sequence[str], str]] = {
    "train --resume": (
        ("train", "--out", "run", "--resume", "--threads", "1", "--no-tensorboard", "--quiet"),
        rf"run/(metrics\.jsonl|sample\.json)|run/checkpoints(/step-6.*)?|{NEWEST}.*",
    ),
    "train --init-from": (
        ("train", *NEW, "--scheme", "proj-spheretnorm", "--init-from", "run"),
        "",
    ),
    "train": (
        ("train", *NEW, "--scheme", "keel"),
        "",
    ),
    "report": (("report", "run", "--out", "out"), ""),
    "report a watch": (("report", "watched", "--out", "out"), ""),
    "report a begun watch": (("report", "begun", "--out", "out"), ""),
    "sample": (("sample", "run", "--tokens", "8"), ""),
    "eval": (("eval", "run", "--tasks", "piqa", "--data", str(ROWS)), r"run/eval(_samples)?\.jsonl?"),
    "certify": (("certify", "run", "--tokens", "2", "--sequence", "2"), r"run/certificate\.(json|png)"),
    "inspect": (("inspect", "run", "--windows", "1"), r"run/inspect\.(json|png)"),
    "export": (("export", "run", "--out", "out/exported"), ""),
    "race": (
        ("race", "--out", "race", "--schemes", "proj-spheretnorm", "--data", "data", *TINY, "--steps", "2", "--jobs",
         "1", "--lr", "3e-3"),
        rf"race/report.*|race/configs.*|race/.*\.log|{RACED}/(sample\.json|metrics\.jsonl|checkpoints.*)"
        r"|race/(costs\.json|results\.jsonl|plan\.toml)",
    ),
    "prepare": (("prepare", "texts", "--out", "data", "--tokenizer", "bpe:300", "--val-fraction", "0.2"), ""),
    "prepare --verify": (("prepare", "texts", "--out", "data", "--verify"), ""),
    "prepare again": (
        ("prepare", "texts", "--out", "unfinished", "--tokenizer", "bpe:300", "--val-fraction", "0.2",
         "--shard-tokens", "2000", "--workers", "1"),
        "unfinished/.*",
    ),
    "import": (("import", "gpt2", "--out", "out/imported"), ""),
    "inspect a model": (("inspect", "gpt2", "--windows", "1", "--data", "data", "--out", "out/inspected"), ""),
    "import back": (("import", "exported", "--out", "out/imported"), ""),
    "convert": (("convert", *CONVERT, "--out", "out/converted"), ""),
    "convert again": (("convert", *CONVERT, "--out", "converted"), r"converted/report/.*"),
    "certify a model": (
        ("certify", "gpt2", "--tokens", "2", "--sequence", "2", "--data", "data", "--out", "out/certified"), ""
    ),
    "inspect a conversion": (
        ("inspect", "converted", "--windows", "1", "--data", "data", "--out", "out/inspected"), ""
    ),
    # what is lost of a run is trained again
    "study": (
        (*STUDY, "--out", "study"),
        r"study/(report.*|configs.*|logs.*|costs\.json|results\.jsonl|plan\.toml)|study/runs/.*",
    ),
    "study --minutes 0": ((*STUDY, "--out", "study", "--minutes", "0"), r"study/report.*"),
    "study --join": ((*STUDY, "--out", "out/joined", "--join", "joined/rows.jsonl"), ""),
    "study --results": ((*STUDY, "--out", "out/results", "--results", "joined/rows.jsonl"), ""),
}  # fmt: skip
OF_A_RUN = ("train --resume", "train --init-from", "report", "sample", "eval", "certify", "inspect", "export")
OF_WEIGHTS = tuple(name for name in OF_A_RUN if name != "report")
OF_DATA = ("prepare", "prepare --verify", "train", "train --resume", "certify", "inspect", "race")

# each document, and the commands that read it
DOCUMENTS: dict[str, tuple[str, ...]] = {
    "run/config.json": OF_A_RUN,
    "run/metrics.jsonl": ("train --resume", "report", "inspect"),
    f"{NEWEST}/state.json": OF_A_RUN,
    f"{NEWEST}/manifest.json": OF_A_RUN,
    "run/eval.json": ("report", "eval"),
    "run/eval_samples.jsonl": ("report", "eval"),
    "run/certificate.json": ("report",),
    "run/inspect.json": ("inspect",),
    "run/sample.json": ("report",),
    "race/costs.json": ("race",),
    f"{RACED}/config.json": ("race",),
    f"{RACED}/metrics.jsonl": ("race",),
    "race/race.json": ("race",),
    "data/manifest.json": OF_DATA,
    "unfinished/progress.json": ("prepare again",),
    "gpt2/config.json": ("import", "convert", "inspect a model", "certify a model"),
    "exported/config.json": ("import back",),
    "converted/convert.json": ("convert again",),
    "converted/config.json": ("inspect a conversion",),
    "study/results.jsonl": ("study", "study --minutes 0"),
    "study/costs.json": ("study", "study --minutes 0"),
    "joined/rows.jsonl": ("study --join", "study --results"),
    "watched/watch.jsonl": ("report a watch",),
    "begun/watch.jsonl": ("report a begun watch",),
}
# each folder, and the commands that read in it
FOLDERS: dict[str, tuple[str, ...]] = {
    "run": OF_A_RUN,
    "race": ("race",),
    "data": OF_DATA,
    "unfinished": ("prepare again",),
    "gpt2": ("import", "convert", "inspect a model", "certify a model"),
    "exported": ("import back",),
    "converted": ("convert again", "inspect a conversion"),
    "study": ("study", "study --minutes 0"),
    "joined": ("study --join", "study --results"),
    "watched": ("report a watch",),
    "begun": ("report a begun watch",),
}
# what takes longest to make
LONG = ("race", "converted", "study", "joined")
# files that the clock changes
UNSTABLE = re.compile(r"metrics\.jsonl|config\.json|state\.json|manifest\.json|certificate\.json")
# what a report shows as it stands
UNGUARDED = (
    ("run/certificate.json", "missing"), ("run/eval.json", "missing"), ("run/config.json", "flipped"),
    ("run/sample.json", "missing"), ("run/sample.json", "flipped"), ("watched/watch.jsonl", "truncated"),
)  # fmt: skip
# documents whose content is compared with a hash or a copy: if a command takes one, its output is as before
GUARDED = (f"{NEWEST}/state.json", f"{NEWEST}/manifest.json", "data/manifest.json")


class Case(NamedTuple):
    """What is damaged, how, and which command reads it. `place` is a key; None is the file as a whole."""

    path: str
    what: str
    place: damage.Place | None
    command: str


class Stage:
    """Directories in which commands run, put back as they were after each case.

    run: after a kill between step 4 and step 6, with everything that later commands write.
    unbroken: the same run as it ends. race: a finished race of one scheme. data: finished. unfinished: after a kill.
    exported: the run for transformers. gpt2: a GPT-2 as transformers saves it. converted: what became of it.
    study: a finished study of four runs. joined: the rows of it, for another one. watched: a watched training with an
    alarm. begun: one of which nothing was seen yet.
    """

    def __init__(self, root: Path, race: bool) -> None:
        """race: whether there are a race, a conversion and a study, which take longest."""
        self.root, self.stage, self.pristine = root, root / "stage", root / "pristine"
        self.stage.mkdir()
        self.child = Child(self.stage, root)
        self._build(race)
        (self.stage / "out").mkdir()
        (self.stage / "elsewhere").mkdir()
        for name in ("run", "data", "unfinished", "gpt2", "exported", "watched", "begun", *(LONG if race else ())):
            (self.stage / name / "notes.txt").write_text("not of spheret\n")
        shutil.copytree(self.stage, self.pristine, symlinks=True)
        self.whole = snapshot(self.pristine)
        self.counts: dict[tuple[str, str], int] = {}
        self._baselines: dict[tuple[str, bool], Outcome] = {}

    def _do(self, *words: str) -> str:
        outcome = self.child.run(words, at_first=True)
        assert outcome.code in (0, 1), (words, outcome)
        assert "internal error" not in outcome.errors, (words, outcome)
        self._import()
        return outcome.printed

    def _import(self) -> None:
        """Import what the last child has imported, so that the next ones need not."""
        for name in (self.root / "modules").read_text().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)

    def _build(self, race: bool) -> None:
        texts = self.stage / "texts"
        texts.mkdir()
        choose = random.Random(0)
        words = ["sphere", "stream", "branch", "angle", "layer", "token", "step", "of", "the", "and", "turns", "is"]
        for number in range(40):
            (texts / f"{number:02d}.txt").write_text(" ".join(choose.choices(words, k=200)))
        self._do(*COMMANDS["prepare"][0])
        self._kill_a_preparation()
        # absolute, because the run keeps it
        data = str(self.stage / "data")
        train = ("train", "--data", data, *TINY, *RECIPE, "--no-tensorboard", "--scheme", "proj-spheretnorm")
        self._do(*train, "--out", "unbroken")
        shutil.copytree(self.stage / "unbroken", self.stage / "run")
        # as after a kill between the last line of the metrics and the last checkpoint
        shutil.rmtree(self.stage / "run" / "checkpoints" / "step-6")
        for name in ("eval", "certify", "inspect", *(("race",) if race else ())):
            self._do(*COMMANDS[name][0])
        self._do("export", "run", "--out", "exported")
        self._save_a_gpt2()
        self._write_watches()
        if race:
            self._do(*COMMANDS["convert again"][0])
            (self.stage / "plan.toml").write_text(PLAN.replace('"data"', json.dumps(data)))
            self._do(*COMMANDS["study"][0])
            (self.stage / "joined").mkdir()
            shutil.copy(self.stage / "study" / "results.jsonl", self.stage / "joined" / "rows.jsonl")

    def _save_a_gpt2(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(self.stage / "gpt2")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.stage / "exported" / name, self.stage / "gpt2")

    def _write_watches(self) -> None:
        # the longest of the first lines is the one with an event
        seen = observations(2, 4, 5, events={2: [event(10, 1)]}, places=1)
        write_watch(self.stage / "watched" / "watch.jsonl", header(2), seen)
        write_watch(self.stage / "begun" / "watch.jsonl", header(2), [])

    def _kill_a_preparation(self) -> None:
        """Leave a preparation as a kill does, after its first note of tokens."""
        from spheret.data.workspace import Workspace

        record, notes = Workspace.record, 0

        def counted(self: Workspace, *arguments: Any) -> None:
            nonlocal notes
            record(self, *arguments)
            notes += 1
            if notes == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        Workspace.record = counted  # type: ignore[method-assign]
        try:
            assert self.child.run(COMMANDS["prepare again"][0], at_first=True).code == -signal.SIGKILL
        finally:
            Workspace.record = record  # type: ignore[method-assign]
        (self.stage / "unfinished" / "prepare.lock").unlink()

    def restore(self, found: dict[str, str]) -> None:
        """Put back what differs. found: the snapshot of the stage as it is."""
        differs = {path for path in found.keys() | self.whole.keys() if found.get(path) != self.whole.get(path)}
        # what is in a folder comes after the folder
        for path in sorted(differs & found.keys(), reverse=True):
            (Path.rmdir if path.endswith("/") else Path.unlink)(self.stage / path)
        for path in sorted(differs & self.whole.keys()):
            if path.endswith("/"):
                (self.stage / path).mkdir()
            else:
                shutil.copy2(self.pristine / path, self.stage / path)

    def baseline(self, command: str, fallen_back: bool = False) -> Outcome:
        """How a command ends where nothing is damaged, or where the newest checkpoint is gone."""
        key = command, fallen_back
        if key not in self._baselines:
            if fallen_back:
                shutil.rmtree(self.stage / NEWEST)
            outcome = self.child.run(COMMANDS[command][0], at_first=True)
            assert outcome.code in (0, 1), (command, outcome)
            self._import()
            self.restore(snapshot(self.stage))
            self._baselines[key] = outcome
        return self._baselines[key]

    def cases_of_keys(self, path: str) -> Iterator[Case]:
        """Every key of a document with every value, and every key with every command that reads the document.

        Commands take turns over the values, and values over the commands. Items of a list have the same keys: those
        of the first item meet all of it, those of the last item one value and one command.
        """
        commands, met = DOCUMENTS[path], set()
        for number, place in enumerate(damage.places(self.document(path))):
            pairs = [(what, commands[(number + turn) % len(commands)]) for turn, what in enumerate(VALUES)]
            pairs += [(VALUES[(number + 3 * turn) % len(VALUES)], command) for turn, command in enumerate(commands)]
            pairs = list(dict.fromkeys(pairs))
            key = tuple("any" if isinstance(step, int) else step for step in place)
            for what, command in [pairs[number % len(pairs)]] if key in met else pairs:
                yield Case(path, what, place, command)
            met.add(key)

    def cases_of_files(self) -> Iterator[Case]:
        """Every file that a command reads, everything that can happen to it, every command that reads there."""
        for path in self.whole:
            folder = path.split("/")[0]
            ours = not path.endswith("/") and "/report/" not in path and not path.endswith("notes.txt")
            # one run of a study stands for all
            ours = ours and (not path.startswith("study/runs/") or fnmatch.fnmatch(path, f"{STUDIED}/*"))
            for what in FILES if folder in FOLDERS and ours else ():
                for command in FOLDERS[folder]:
                    yield Case(path, what, None, command)

    def document(self, path: str) -> Any:
        """A document, or the line of a file of lines that has the most keys."""
        text = (self.pristine / path).read_text()
        return json.loads(text if path.endswith(".json") else self._line(text))

    @staticmethod
    def _line(text: str) -> str:
        return max(text.splitlines()[:4], key=len)

    def _damage(self, case: Case) -> None:
        path = self.stage / case.path
        if case.place is not None:
            document = self.document(case.path)
            step = damage.changed(document, case.place, damage.change_of(case.what))
            text = path.read_text()
            old = text if case.path.endswith(".json") else self._line(text)
            path.write_text(text.replace(old, damage.dump(step), 1))
            if case.path.endswith("/state.json"):
                self._hash(path)
        elif case.what == "link":
            target = self.stage / "elsewhere" / "victim"
            path.rename(target)
            path.symlink_to(target)
        elif case.what == "flipped":
            damage.FLIPPED(path)
        else:
            damage.FILES[case.what](path)

    @staticmethod
    def _hash(path: Path) -> None:
        """Give a file of a checkpoint its right hash, so that its content is looked at."""
        manifest = path.with_name("manifest.json")
        record, data = json.loads(manifest.read_text()), path.read_bytes()
        record[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(record))

    def try_case(self, case: Case) -> str | None:
        """Damage, run and judge. Returns what is wrong, or None."""
        expected = self.baseline(case.command).code
        self._damage(case)
        before = snapshot(self.stage)
        outcome = self.child.run(COMMANDS[case.command][0])
        after = snapshot(self.stage)
        wrong = _judge(outcome, expected) or self._judge_files(case, before, after)
        self.restore(after)
        wrong = wrong or (self._judge_result(case, outcome, after) if outcome.code == expected else None)
        kind = case.path if case.place is not None else "files of " + case.path.split("/")[0]
        counted = (kind, "taken" if outcome.code == expected else "refused")
        self.counts[counted] = self.counts.get(counted, 0) + 1
        return wrong and f"{case}: {wrong}\n{outcome.printed[-300:]}{outcome.errors[-2000:]}"

    def _judge_files(self, case: Case, before: dict[str, str], after: dict[str, str]) -> str | None:
        may = re.compile(COMMANDS[case.command][1] or "nothing")

        def allowed(path: str) -> bool:
            return path.startswith("out/") or may.fullmatch(path.rstrip("/")) is not None

        for path in before.keys() | after.keys():
            if before.get(path) == after.get(path) or allowed(path) or path.startswith(case.path):
                continue
            done = "lost" if path not in after else "left behind" if path not in before else "changed"
            return f"{path} was {done}"
        return None

    def _judge_result(self, case: Case, outcome: Outcome, after: dict[str, str]) -> str | None:
        if case.command == "train --resume":
            names = ("model.safetensors", "optimizer.safetensors")
            same = [
                after.get(f"run/checkpoints/step-6/{name}") == after[f"unbroken/checkpoints/step-6/{name}"]
                for name in names
            ]
            return None if all(same) else "the resumed run differs from the unbroken run"
        if case.command == "prepare again":
            # other shards than those of `data`, but the same ids
            same_ids = after["unfinished/counts.bin"] == after["data/counts.bin"]
            return None if same_ids else "its data differs from that of an unbroken preparation"
        # files of transformers have no hashes: a changed bit is a changed weight or word
        if case.what == "flipped" and case.command.startswith(("import", "inspect a", "certify a", "convert")):
            return None
        # nor have the numbers of a study and of a watch
        if case.what == "flipped" and case.command.startswith(("study", "report a")):
            return None
        if case.command.startswith("import"):
            name = "imported/checkpoints/step-0/model.safetensors"
            if outcome.made[name] != self.baseline(case.command).made[name]:
                return "its weights are not those of the source"
        # a report without what was not done, of a watch that ends earlier and says when, and with words for people in
        # which a bit is flipped
        if case.command.startswith("report") and (case.path, case.what) in UNGUARDED:
            return None
        # what nothing guards may have changed the output
        if case.place is not None and case.path not in GUARDED:
            return None
        for fallen_back in (False, True):
            if _is_alike(outcome, self.baseline(case.command, fallen_back)):
                return None
        return "its output is not that of the whole stage"


def _is_alike(one: Outcome, other: Outcome) -> bool:
    return _stable(one) == _stable(other)


def _stable(outcome: Outcome) -> tuple[str, dict[str, str]]:
    """What a command printed and wrote, apart from what the clock decides."""
    made = {name: digest for name, digest in outcome.made.items() if not UNSTABLE.search(name)}
    return re.sub(r"[\d.]+ s\b", "SECONDS", outcome.printed), made


def _judge(outcome: Outcome, expected: int) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    code, errors = outcome.code, outcome.errors
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        return "it took too long"
    if code < 0:
        return f"signal {-code}"
    if "internal error" in errors or "Traceback" in errors:
        return "a trace"
    if code not in (expected, 0, 2, 3):
        return f"exit code {code}"
    lines = [line for line in errors.splitlines() if line.strip()]
    if code == 2 and not (lines and lines[-1].startswith("spheret ") and lines[-1].endswith(".")):
        return "no sentence at the end"
    if code == 2 and len(lines[-1]) > 1500:
        return "a sentence without end"
    return None
