"""A command overwrites what it wrote itself, and nothing of somebody else's. Logs and leftovers alike."""

import os
import re
from pathlib import Path

import pytest
from small_models import TINY, randomize

from spheret import GPT, GPTConfig
from spheret.cli import main
from spheret.data.tokenizers import describe, load
from spheret.runs.run import create_run
from spheret.support import files
from spheret.support.child import Child

ROOT = Path(__file__).parents[2]
LEFT = ".name.0123456789abcdef.tmp"
INSPECT = ["inspect", "run", "--windows", "1", "--data", "sotu"]
FOREIGN = b'{"inspected": ["my car"], "command": "wash"}'


def test_files_of_others_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    create_run("run", randomize(GPT(GPTConfig(**{**TINY, "vocab": 257}))), describe(load("bytes")))
    path = tmp_path / "run" / "inspect.json"
    path.write_bytes(FOREIGN)
    assert main(INSPECT) == 2
    assert "inspect.json" in capsys.readouterr().err
    assert path.read_bytes() == FOREIGN
    path.unlink()
    path.symlink_to("/dev/null")
    assert main(INSPECT) == 2
    assert "link" in capsys.readouterr().err
    path.unlink()
    # its own may be written again
    assert [main(INSPECT) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_no_log_is_written_through_something_else(kind, tmp_path):
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("precious")
    {"link": lambda: log.symlink_to(other), "pipe": lambda: os.mkfifo(log), "directory": log.mkdir}[kind]()
    with pytest.raises(ValueError, match=kind):
        Child(["--version"], log)
    assert other.read_text() == "precious"


def test_leftovers_of_a_kill_go_a_day_later(tmp_path):
    """Whoever writes the same file next removes them. Somebody may still write a younger one."""
    dead, alive, folder = (tmp_path / LEFT.replace("0", digit) for digit in "012")
    folder.mkdir()
    others = [tmp_path / name for name in (".other.0123456789abcdef.tmp", ".name.tmp", "name.tmp")]
    for path in (dead, alive, folder / "model.safetensors", *others):
        path.touch()
        if path != alive:
            os.utime(path, (0, 0))
    os.utime(folder, (0, 0))
    files.write_atomically(tmp_path / "name", b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([alive, *others, tmp_path / "name"])


def test_every_promise_names_its_tests():
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert all((ROOT / test).is_file() for test in tests), row
    assert len(page.split()) <= 600
