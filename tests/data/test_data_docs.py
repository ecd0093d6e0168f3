"""What the documentation says of data is so; its examples run with those of the other pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import spheret

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


def test_numbers_are_those_of_the_file() -> None:
    numbers = json.loads((ROOT / "benchmarks" / "data.json").read_text())
    assert f"| {numbers['prepare']['ratio']:.2f}x |" in PAGE
    assert f"| {numbers['loader']['ratio']:.2f}x |" in PAGE


def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    done = spheret("bench", "data", "--repeats", 1, "--batches", 20, "--json", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
    assert json.loads(out.read_text()).keys() >= {"command", "processor", "prepare", "loader", "memory"}
