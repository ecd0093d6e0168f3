"""One table: what is refused, the exit code or the exception, and a noun that the sentence must have.

The rows stand in refusals/, one file per room: ROWS are the words of commands, CALLS are calls of the library.
{data}: prepared tokens; {run}: a finished run of two updates on them; {text}: a text file; {folder}: the folder of
the last two; {out}: a place that does not exist. What is refused writes nothing.
"""

import importlib
import os
from pathlib import Path

import pytest
from train_helpers import train

from spheret.cli import main

FILES = sorted(path.stem for path in (Path(__file__).parent / "refusals").glob("*.py"))


def rows():
    for name in FILES:
        for words, code, noun in importlib.import_module(f"refusals.{name}").ROWS:
            yield pytest.param(words, code, noun, id=f"{name}: {words[:60]}")


def calls():
    for name in FILES:
        for number, row in enumerate(getattr(importlib.import_module(f"refusals.{name}"), "CALLS", [])):
            yield pytest.param(*row, id=f"{name}: {number}, {row[2]}")


@pytest.fixture(scope="module")
def places(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    text = folder / "text.txt"
    text.write_text("A line of text, and one more.\n" * 40)
    run = folder / "run"
    assert train(run, prepared, steps=2) == 0
    return {"data": prepared, "run": run, "text": text, "folder": folder}


@pytest.mark.parametrize(("words", "code", "noun"), rows())
def test_what_is_refused(words, code, noun, places, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(path for place in places.values() for path in Path(place).rglob("*"))
    assert main([word.format(**places, out=tmp_path / "out") for word in words.split()]) == code
    sentence = capsys.readouterr().err
    assert noun.format(**places) in sentence
    assert "internal error" not in sentence
    assert os.listdir(tmp_path) == []
    assert sorted(path for place in places.values() for path in Path(place).rglob("*")) == before


@pytest.mark.parametrize(("call", "error", "noun"), calls())
def test_what_the_library_refuses(call, error, noun):
    with pytest.raises(error) as refused:
        call()
    assert noun in str(refused.value)
