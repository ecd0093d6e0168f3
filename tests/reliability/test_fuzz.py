"""Whatever is damaged: a command ends with the right result or with one sentence, and nothing that was whole is lost.

A case is a file of a stage, a damage, and a command that reads the file. A seeded sample is quick; all of them are
slow. tests/reliability/test_documents.py damages every key of every document.
"""

import hashlib
import os
import random
import re
import shutil
import stat
from pathlib import Path

import damage
import pytest
from surroundings import surroundings

from spheret.cli import main

SAMPLE = 8
TINY = (
    "--layers", "1", "--heads", "2", "--width", "16", "--block", "64", "--batch-size", "2", "--threads", "1",
    "--set", "evaluation.eval_windows=2", "--set", "model.dropout=0.1", "--set", "train.keep=9", "--steps", "4",
    "--eval-every", "2", "--set", "train.checkpoint_every=1", "--scheme", "proj-spheretnorm",
    "--quiet",
)  # fmt: skip
PREPARE = ("prepare", "texts", "--out", "data", "--tokenizer", "bpe:300", "--val-fraction", "0.2")
# the words of each command, and the files of the stage that it may write; `out/` may be written by all
COMMANDS = {
    "train": (
        ("train", "--out", "run", "--resume", "--threads", "1", "--quiet"),
        r"run/(metrics\.jsonl|sample\.json|checkpoints/step-[34].*)",
    ),
    "report": (("report", "run", "--out", "out"), "nothing"),
    "sample": (("sample", "run", "--tokens", "8"), "nothing"),
    "inspect": (("inspect", "run", "--windows", "1"), r"run/inspect\.(json|png)"),
    "export": (("export", "run", "--out", "out/exported"), "nothing"),
    "prepare": (PREPARE, "nothing"),
    "verify": ((*PREPARE, "--verify"), "nothing"),
}
# each folder, and the commands that read in it
FOLDERS = {
    "run": ("train", "report", "sample", "inspect", "export"), "data": ("prepare", "verify", "train", "inspect"),
}  # fmt: skip
DAMAGES = {**damage.FILES, "flipped": damage.FLIPPED}


def snapshot():
    """The hash of every regular file of the stage; the kind and size of what is no file or very large."""
    found = {}
    for path in sorted(Path().rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not stat.S_ISDIR(status.st_mode):
            found[str(path)] = f"{stat.S_IFMT(status.st_mode)} {status.st_size}"
    return found


def weights():
    last = Path("run", "checkpoints", "step-4")
    return [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Data and a run after a kill between its last metrics and its last checkpoint, with the weights of its end."""
    root, here = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    (root / "stage" / "texts").mkdir(parents=True)
    os.chdir(root / "stage")
    choose = random.Random(0)
    for number in range(20):
        words = choose.choices(["sphere", "stream", "angle", "layer", "of", "the", "turns"], k=200)
        Path("texts", f"{number:02d}.txt").write_text(" ".join(words))
    with surroundings(root / "cache"):
        assert main(PREPARE) == 0
        assert main(["train", "--data", str(root / "stage" / "data"), *TINY, "--out", "run"]) == 0
        end = weights()
        assert main(COMMANDS["inspect"][0]) == 0
        shutil.rmtree("run/checkpoints/step-4")
        for name in FOLDERS:
            Path(name, "notes.txt").write_text("not of spheret\n")
        shutil.copytree(root / "stage", root / "pristine")
        yield root / "pristine", end
    os.chdir(here)


def cases(folder):
    """Every file that a command reads, everything that can happen to it, every command that reads there."""
    for path in snapshot():
        if path.startswith(f"{folder}/") and not path.endswith("notes.txt"):
            yield from ((path, what, command) for what in DAMAGES for command in FOLDERS[folder])


def fault(pristine, path, what, command, capsys):
    """What is wrong with how a command ends after a damage, or None."""
    whole, end = pristine
    stage = whole.with_name("stage")
    shutil.rmtree(stage, ignore_errors=True)
    shutil.copytree(whole, stage)
    os.chdir(stage)
    DAMAGES[what](Path(path))
    before = snapshot()
    words, writes = COMMANDS[command]
    capsys.readouterr()
    code, errors = main(words), capsys.readouterr().err
    after = snapshot()
    os.chdir(whole)
    if code not in (0, 2, 3) or "internal error" in errors or "Traceback" in errors:
        return f"exit code {code}: {errors[-800:]}"
    last = (errors.strip().splitlines() or [""])[-1]
    if code and not (last.startswith(f"spheret {words[0]}: ") and last.endswith((".", "?")) and len(last) < 1500):
        return f"no sentence: {last}"
    for name in before.keys() | after.keys():
        ours = re.fullmatch(writes, name) or name.startswith("out/") or name == path
        if before.get(name) != after.get(name) and not ours:
            return f"{name} was changed"
    os.chdir(stage)
    same = command != "train" or code or weights() == end
    os.chdir(whole)
    return None if same else "other weights than those of the unbroken run"


def check(pristine, some, capsys):
    wrong = [(case, found) for case in some if (found := fault(pristine, *case, capsys))]
    assert not wrong, wrong[:5]


def test_a_sample(pristine, capsys):
    os.chdir(pristine[0])
    every = [case for folder in FOLDERS for case in cases(folder)]
    check(pristine, random.Random(1337).sample(every, SAMPLE), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file(folder, pristine, capsys):
    os.chdir(pristine[0])
    check(pristine, list(cases(folder)), capsys)
