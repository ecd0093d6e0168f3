"""docs/data.md agrees with the code. Its examples are run together with those of the other pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from spheret.data import CORPORA
from spheret.data.corpora import Hub

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_is_documented(name: str) -> None:
    row = CORPORA[name]
    assert f"| `{name}` |" in PAGE
    if isinstance(row, Hub):
        for fact in (row.path, row.revision, row.licence, f"{row.documents:,}"):
            assert fact in PAGE
