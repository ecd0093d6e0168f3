"""Rows are read while trainings run, and say where a run spent its time."""

import pytest
from report_helpers import write_run
from study_helpers import TWO, plan_of, row

from spheret.lab.laboratory import Laboratory
from spheret.lab.rows import STUDY_ROWS, Key, plateau, read_rows, row_of_run
from spheret.runs.layout import LOCK
from spheret.runs.run import open_run

KEY = Key("two", "pre-ln", 1e-3, 1)


def test_a_run_that_is_still_starting_has_no_row(prepared, tmp_path):
    laboratory = Laboratory(plan_of(tmp_path, f'[data]\npath = "{prepared}"\n{TWO}'), tmp_path)
    directory = laboratory.run_directory(laboratory.wanted()[0])
    directory.mkdir(parents=True)
    (directory / LOCK).touch()
    assert laboratory.rows() == {}


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


def test_two_rows_of_one_run_must_agree(tmp_path):
    path, first = tmp_path / "results.jsonl", row(KEY, 2.0)
    for second, good in ((row(KEY, 2.0, seconds=9.0), True), (row(KEY, 2.1), False)):
        path.write_bytes(b"".join(map(STUDY_ROWS.encode, (first, second))))
        if good:
            assert read_rows(path) == {KEY: first}
        else:
            with pytest.raises(ValueError):
                read_rows(path)


@pytest.mark.parametrize(
    ("settings", "state", "val"),
    [
        ({}, "finished", True),
        ({"diverged": 9}, "diverged", False),
        ({"diverged_finite": 9}, "diverged", True),
        # an alarm counts only if the loss is still that of token frequencies
        ({"alarm": "token collapse"}, "collapsed", True),
        ({"alarm": "token collapse", "quality": 1.0}, "finished", True),
        ({"until": 9}, None, False),
        ({"until": 0}, None, False),
    ],
)
def test_the_row_of_a_run(settings, state, val, tmp_path):
    found = row_of_run(open_run(write_run(tmp_path / "run", steps=20, **settings)), KEY)
    if state is None:
        assert found is None
        return
    assert (found.state, found.val_loss is not None) == (state, val)
    assert (found.reason != "") == (state != "finished")
    assert (found.key, found.run, found.steps, found.tokens) == (KEY, "run", 20, 20 * 512)
