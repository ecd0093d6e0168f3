"""The cache directory is the user's choice, otherwise where the system keeps caches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spheret.support.cache import cache_directory


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
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", empty)
        assert cache_directory() == tmp_path / ".cache" / "spheret"
    # asking makes nothing
    assert list(tmp_path.iterdir()) == []
