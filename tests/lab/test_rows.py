"""Rows are read while trainings run, and say where a run spent its time."""

import pytest
from study_helpers import row

from spheret.lab.rows import Key, plateau, row_of
from spheret.runs.layout import LOCK

KEY = Key("two", "pre-ln", 1e-3, 1)


def test_a_run_that_is_still_starting_has_no_row(tmp_path):
    assert row_of(tmp_path / "run", KEY) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()
    assert row_of(tmp_path / "run", KEY) is None


@pytest.mark.parametrize(
    ("losses", "updates"),
    [
        ((2.5, 2.4, 2.3, 2.2, 2.1), 0),
        ((3.01, 2.4, 2.3, 2.2, 2.1), 0),
        ((3.01, 3.01, 2.3, 2.2, 2.1), 60),
        ((3.01, 2.5, 3.01, 3.02, 2.96), 120),
        ((4.0, None, 3.01, 3.02, 3.01), 120),
    ],
)
def test_the_updates_at_the_loss_of_token_frequencies(losses, updates):
    curve = list(zip(range(60, 301, 60), losses, strict=True))
    assert plateau(curve, 3.04) == updates
    run = row(KEY, losses[-1], curve=curve, steps=300, unigram_entropy=3.04)
    assert run.stalled == (updates >= 60)
    assert run.outcome == ("finished (stalled)" if updates else "finished")


def test_who_is_not_marked():
    there = [(60, 3.0), (120, 3.0)]
    assert row(KEY, 3.0, curve=there, steps=120, unigram_entropy=3.04).stalled
    # at its end alone
    assert row(KEY, 3.0, curve=[(60, 2.9), (120, 3.0)], steps=120, unigram_entropy=3.04).stalled
    assert not row(KEY, 3.0, "collapsed", curve=there, steps=120, unigram_entropy=3.04).stalled
    assert not row(KEY, 3.0, curve=there, steps=120).stalled
    assert not row(KEY, None, curve=there, steps=120, unigram_entropy=3.04).stalled
