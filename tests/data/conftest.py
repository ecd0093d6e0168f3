from __future__ import annotations

from pathlib import Path

import pytest
from data_helpers import documents


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for each test, so that nothing is written to the user's."""
    path = tmp_path / "cache"
    monkeypatch.setenv("SPHERET_CACHE", str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one text file per document."""
    path = tmp_path / "texts"
    path.mkdir()
    for number, text in enumerate(documents()):
        (path / f"{number:03d}.txt").write_text(text)
    return path
