"""The cache directory is the user's choice, otherwise where the system keeps caches."""

from __future__ import annotations

import os
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


def test_the_user_s_own_places_stay(bare: Path) -> None:
    for folder, variables in PLACES.items():
        for chosen in variables:
            os.environ.clear()
            os.environ |= {"SPHERET_CACHE": str(bare), chosen: "mine"}
            keep_libraries_inside()
            assert os.environ[chosen] == "mine"
            assert (variables[0] in os.environ) == (variables[0] == chosen), folder
