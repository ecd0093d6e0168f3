"""The cache directory is the user's choice, otherwise where the system keeps caches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spheret.support.cache import PLACES, cache_directory, keep_libraries_inside


def test_the_user_s_choice_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "chosen"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.setenv("SPHERET_CACHE", "~/chosen")
    assert cache_directory() == tmp_path / "chosen"


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG directories are Linux's")
def test_the_system_s_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPHERET_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "spheret"
    for unusable in ("", "relative", None):
        if unusable is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_directory() == tmp_path / ".cache" / "spheret"
    # asking makes nothing
    assert list(tmp_path.iterdir()) == []


def test_the_places_of_other_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SPHERET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory() == tmp_path / "Library" / "Caches" / "spheret"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache_directory() == tmp_path / "AppData" / "Local" / "spheret" / "Cache"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_directory() == tmp_path / "local" / "spheret" / "Cache"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which no library has a place. What is set in it ends with the test."""
    monkeypatch.setattr(os, "environ", {"SPHERET_CACHE": str(tmp_path / "cache")})
    return tmp_path / "cache"


def test_libraries_get_places_in_the_cache(bare: Path) -> None:
    keep_libraries_inside()
    assert {variables[0]: str(bare / folder) for folder, variables in PLACES.items()}.items() <= os.environ.items()
    # nothing is made before a library writes
    assert not bare.exists()


@pytest.mark.parametrize(
    ("folder", "chosen"), [(folder, name) for folder, variables in PLACES.items() for name in variables]
)
def test_the_user_s_own_places_stay(folder: str, chosen: str, bare: Path) -> None:
    os.environ[chosen] = "mine"
    keep_libraries_inside()
    assert os.environ[chosen] == "mine"
    assert (PLACES[folder][0] in os.environ) == (PLACES[folder][0] == chosen)


def test_a_command_sets_them_before_any_library_is_imported(tmp_path: Path) -> None:
    code = """
import os, sys
from spheret import cli
cli.COMMANDS["look"] = ("look:look", "")
sys.argv = ["spheret", "look"]
sys.exit(cli.main())
"""
    module = """
import os, sys
assert not {"matplotlib", "torch", "triton", "datasets", "huggingface_hub"} & set(sys.modules)
assert os.environ["PYTHONSAFEPATH"] == "1"
def look():
    print(os.environ["MPLCONFIGDIR"], os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""
    (tmp_path / "look.py").write_text(module)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "TORCHINDUCTOR"))}
    environment |= {"SPHERET_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "matplotlib"), str(tmp_path / "inductor")], done.stderr


def test_a_program_that_calls_a_command_keeps_its_environment() -> None:
    from spheret.cli import main

    names = ("PYTHONSAFEPATH", *(variables[0] for folder, variables in PLACES.items() if folder != "inductor"))
    before = list(map(os.environ.get, names))
    assert main(["retractions"]) == 0
    assert list(map(os.environ.get, names)) == before
