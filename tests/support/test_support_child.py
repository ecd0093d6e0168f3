"""Processes that we start import what this process imports, and nothing from the current directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import plant, planted

from spheret.support.child import python_command, python_environment, spheret_command

# what each kind of child does first, without the seconds that torch takes
COMMANDS = {
    "spheret": spheret_command(["--version"]),
    "code": python_command("-c", "import json, numpy, socket, tyro"),
    "a child of a child": python_command(
        "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, numpy'], check=True)"
    ),
    "spawned": python_command(
        "-c", "import multiprocessing as m; p = m.get_context('spawn').Process(target=print); p.start(); p.join()"
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_runs_from_the_current_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(tmp_path / "corpus"):
        # it is also on the path of this process
        monkeypatch.setattr(sys, "path", ["", os.getcwd(), *sys.path])
        subprocess.run(COMMANDS[name], env=python_environment(), check=True, capture_output=True)


@pytest.mark.slow
def test_nor_when_the_module_is_started_by_hand(tmp_path: Path) -> None:
    ran = plant(tmp_path / "corpus")
    # the name of the package itself is looked up before any of its code runs
    (tmp_path / "corpus" / "spheret.py").unlink()
    command = [sys.executable, "-m", "spheret", "sample", "--help"]
    environment = python_environment() | {"PYTHONSAFEPATH": ""}
    done = subprocess.run(command, cwd=tmp_path / "corpus", env=environment, capture_output=True, text=True)
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_children_import_what_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    subprocess.run(python_command("-c", "import mine"), env=python_environment(), check=True)
