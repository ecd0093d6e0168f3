"""Rows are read while trainings run."""

from spheret.runs.layout import LOCK
from spheret.study.rows import Key, row_of


def test_a_run_that_is_still_starting_has_no_row(tmp_path):
    key = Key("two", "pre-ln", 1e-3, 1)
    assert row_of(tmp_path / "run", key) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()
    assert row_of(tmp_path / "run", key) is None
