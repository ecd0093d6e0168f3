"""Rows are read while trainings run."""

import json

import pytest
from report_helpers import write_run
from study_helpers import row

from spheret.lab.rows import STUDY_ROWS, Key, read_rows, row_of_run
from spheret.runs.run import open_run

KEY = Key("two", "pre-ln", 1e-3, 1)


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


@pytest.mark.parametrize("field", ["val_loss", "train_loss", "curve", "rate"])
def test_a_loss_that_has_no_square_is_refused_where_it_stands(field, tmp_path):
    path = tmp_path / "results.jsonl"
    good = json.loads(STUDY_ROWS.encode(row(KEY, 2.0)))
    path.write_text(json.dumps(good | {field: [[5, 1e308]] if field == "curve" else 1e308}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*results\.jsonl"):
        read_rows(path)


def test_a_run_may_have_such_a_loss(tmp_path):
    path = write_run(tmp_path / "run", steps=20) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["val_loss"] = 1e308
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = row_of_run(open_run(tmp_path / "run"), KEY)
    assert (found.val_loss, found.curve[-1]) == (None, (20, None))
