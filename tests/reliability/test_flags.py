"""Values of flags that cannot be meant: exit code 2, one sentence that names the flag, and nothing written."""

import importlib
import os
import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import tyro

from spheret.cli import COMMANDS, main
from spheret.kernels import dispatch
from spheret.model.gpt import GPTConfig
from spheret.runs.config import SECTIONS
from spheret.support import machine
from spheret.support.files import check_output_file

# more than 64 bits hold
HUGE = "9" * 23
# what each command needs besides the flag
NEEDED = {
    "sample": ["nowhere"],
    "inspect": ["nowhere"],
    "eval": ["nowhere"],
    "report": ["nowhere"],
    "export": ["nowhere", "--out", "out"],
    "import": ["nowhere", "--out", "out"],
    "convert": ["nowhere", "--data", "nowhere", "--out", "out"],
    "prepare": ["nowhere", "--out", "out"],
    "study": ["nowhere"],
    "train": ["--scheme", "pre-ln", "--data", "nowhere", "--out", "out", "--steps", "6"],
    "race": ["--schemes", "pre-ln", "--data", "nowhere", "--out", "out"],
    "reproduce": ["--dataset", "openwebtext", "--size", "S", "--scheme", "keel", "--out", "out", "--data", "nowhere"],
}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command that must be refused, in an empty directory; returns its sentence."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())

    def run(*words):
        assert main([str(word) for word in words]) == 2, words
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert sentence.startswith(f"spheret {words[0]}: ")
        assert "internal error" not in sentence
        assert len(sentence) < 1500
        assert sorted(tmp_path.iterdir()) == before
        return sentence

    return run


def flags(command):
    """Every flag of a command with what its value is called, from tyro's own parser."""
    module, _, function = COMMANDS[command][0].partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(getattr(importlib.import_module(module), function))
    return {name: str(action.metavar) for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("command", NEEDED)
def test_a_number_that_is_none(command, refused):
    assert NEEDED.keys() | {"schemes", "doctor"} == COMMANDS.keys()
    for flag, kind in flags(command).items():
        if kind in ("INT", "FLOAT"):
            for value in ("word", "", "9" * 5000)[: 3 if kind == "INT" else 2]:
                refused(command, *NEEDED[command], f"{flag}={value}")


@pytest.mark.parametrize("command", ["sample", "inspect", "convert"])
def test_a_count_outside_of_its_range(command, refused):
    """It is refused before a run is opened, a model is built or a corpus is read."""
    for flag, kind in flags(command).items():
        # any whole number is a seed
        if kind == "INT" and flag != "--seed":
            for value in ("-1", HUGE):
                assert flag[2:] in refused(command, *NEEDED[command], f"{flag}={value}").replace("_", "-")


@pytest.mark.parametrize("command", ["train", "race"])
def test_a_setting_outside_of_its_range(command, refused):
    for section in ("model", "train", "evaluation"):
        for field in fields(SECTIONS[section]):
            if field.type == "int" and not (command == "race" and field.name == "seed"):
                sentence = refused(command, *NEEDED[command], "--set", f"{section}.{field.name}={HUGE}")
                assert field.name in sentence.replace("-", "_"), sentence


# text that is too short for a window, of training or of validation, or for documents of both kinds
SHORT = {
    "one document": {"a": "short"},
    "training": {"a": "a few words", "b": "more"},
    "validation": {"a": "word " * 99},
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("command", ["train", "race"])
def test_a_sentence_about_short_text_names_flags_that_are_there(
    command, name, refused, tmp_path_factory, monkeypatch
):
    texts = tmp_path_factory.mktemp("texts")
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path_factory.mktemp("cache")))
    for file, text in SHORT[name].items():
        (texts / file).write_text(text)
    chosen = ["--scheme", "pre-ln", "--steps", "2"] if command == "train" else ["--schemes", "pre-ln"]
    sentence = refused(command, *chosen, "--data", texts, "--out", "out", "--quiet")
    named = re.findall(r"(?:spheret ([a-z-]+) )?(--[a-z-]+)", sentence)
    assert (("prepare", "--val-fraction") in named) == (name != "training"), sentence
    assert all(flag in flags(other or command) for other, flag in named), sentence


@pytest.mark.parametrize("what", ["text", "json", "link", "device", "pipe", "directory", "below a file"])
def test_numbers_are_written_over_numbers_alone(what, tmp_path):
    notes, path = tmp_path / "notes", tmp_path / "numbers.json"
    notes.write_text("[1]" if what == "json" else "mine")
    if what == "link":
        path.symlink_to(notes)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        others = {"device": Path("/dev/full"), "directory": tmp_path, "below a file": notes / "it.json"}
        path = others.get(what, notes)
    with pytest.raises((OSError, ValueError), match="--json"):
        check_output_file("--json", path)


def test_memory_is_compared_and_can_be_ignored(prepared, tmp_path, monkeypatch, refused):
    have = machine.memory_bytes(torch.device("cpu"))
    assert have is None or 1 << 28 < have < 1 << 50
    tiny = ["--layers", "1", "--heads", "1", "--width", "8", "--block", "8", "--batch-size", "1", "--steps", "1"]
    words = ["train", "--scheme", "pre-ln", "--data", prepared, "--out", tmp_path / "run", *tiny, "--quiet"]
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 50_000)
    assert "50 kB" in refused(*words)
    assert main([*map(str, words), "--ignore-memory"]) == 0


def test_an_unknown_backend_in_the_environment(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "_forced", "nope")
    with pytest.raises(ValueError, match="SPHERET_BACKEND"):
        GPTConfig()
    with pytest.raises(ValueError, match="SPHERET_BACKEND"):
        dispatch.retract(torch.ones(1, 2), torch.ones(1, 2))
    # help answers all the same
    assert main(["train", "--help"]) == 0
    assert "--ignore-memory" in capsys.readouterr().out
