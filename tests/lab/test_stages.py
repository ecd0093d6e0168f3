"""What comes next: tuning that brackets, fresh seeds, ladders, and an order in which every beginning is of use."""

import math

import pytest
from study_helpers import TWO, bowl, key, plan_of, row, run_all

from spheret.lab.entries import runs_left
from spheret.lab.rows import FINAL, STRESS, TUNE
from spheret.lab.stages import final_rates, stage_of, tuning, unfinished


def contestant(plan, label):
    return next(each for each in plan.groups[0].contestants if each.label == label)


def search(plan, rows, label="pre-ln", group=0):
    return tuning(plan, plan.groups[group], contestant(plan, label), rows)


def test_a_best_rate_inside_is_taken(tmp_path):
    plan = plan_of(tmp_path, TWO + "seeds = 2")
    rows, order = run_all(plan, bowl(2e-3))
    found = search(plan, rows)
    assert (found.best, found.bracketed, found.missing) == (2e-3, True, ())
    assert len(order) == 2 * 3 + 2 * 2 == runs_left(plan, {})
    # the middle first, and every contestant before the next rate
    assert [(each.contestant, each.rate) for each in order[:4]] == [
        ("pre-ln", 2e-3), ("post-ln", 2e-3), ("pre-ln", 1e-3), ("post-ln", 1e-3),
    ]  # fmt: skip
    assert order[6:] == [key(name, 2e-3, seed) for seed in (101, 102) for name in ("pre-ln", "post-ln")]


@pytest.mark.parametrize(("best", "tried"), [(16e-3, 6), (0.25e-3, 6)])
def test_an_edge_extends_the_grid_of_that_contestant_alone(best, tried, tmp_path):
    plan = plan_of(tmp_path)
    losses = {"pre-ln": bowl(best), "post-ln": bowl(2e-3)}
    rows, _ = run_all(plan, lambda each: losses[each.contestant](each))
    assert (search(plan, rows).best, search(plan, rows).bracketed) == (best, True)
    assert len(search(plan, rows).losses) == tried
    assert len(search(plan, rows, "post-ln").losses) == 3


@pytest.mark.parametrize(("state", "lost"), [("diverged", None), ("collapsed", 3.0)])
def test_a_grid_that_fails_moves_down(state, lost, tmp_path):
    plan = plan_of(tmp_path)

    def loss(each):
        # a collapsed run has a loss, which is lower at some rates by chance
        failed = row(each, lost and lost - 0.1 * (each.rate == 2e-3), state)
        return failed if each.rate > 0.3e-3 else bowl(0.25e-3)(each)

    rows, _ = run_all(plan, loss)
    assert (search(plan, rows).best, search(plan, rows).bracketed) == (0.25e-3, True)
    assert search(plan, rows).losses[4e-3] == math.inf
    # and where nothing works at all it ends
    rows, order = run_all(plan, lambda each: row(each, lost, state))
    assert search(plan, rows).best is None
    assert {stage_of(each) for each in order} == {TUNE}


def test_a_seed_that_collapses_takes_all_to_the_next_lower_rate(tmp_path):
    plan = plan_of(tmp_path, TWO + "seeds = 4")
    safe = {"pre-ln": 1.0, "post-ln": 1.5e-3, "keel": 0.0}

    def loss(each):
        unlucky = each.seed == 102 and each.rate > safe[each.contestant]
        return row(each, 3.0, "collapsed") if unlucky else bowl(2e-3)(each)

    rows, order = run_all(plan, loss)
    group, post = plan.groups[0], contestant(plan, "post-ln")
    assert final_rates(plan, group, post, search(plan, rows, "post-ln"), rows) == [2e-3, 1e-3]
    assert [each.reason for each in unfinished(group, post, 2e-3, rows)] == ["step 3: collapsed"]
    lower = [
        each.seed for each in order if each.contestant == "post-ln" and stage_of(each) == FINAL and each.rate == 1e-3
    ]
    assert lower == [101, 102, 103, 104]
    assert final_rates(plan, group, contestant(plan, "pre-ln"), search(plan, rows), rows) == [2e-3]
    # it does not go down for ever
    safe["post-ln"] = 0.0
    rows, _ = run_all(plan, loss)
    assert final_rates(plan, group, post, search(plan, rows, "post-ln"), rows) == [2e-3, 1e-3, 5e-4]


def test_stress_comes_last_at_a_multiple_of_the_best_rate(tmp_path):
    plan = plan_of(tmp_path, TWO + "seeds = 2\nextend = 1\nstress = 3.33\nladder = [{layers = 24}]")
    # the second is never bracketed, so that it has no fresh seeds
    losses = {"pre-ln": bowl(2e-3), "post-ln": bowl(1.0)}

    def result(each):
        return row(each, None, "diverged") if each.rate == 6.66e-3 else losses[each.contestant](each)

    rows, order = run_all(plan, result)
    assert order[-4:] == [
        key("pre-ln", 6.66e-3, seed, group) for group in ("two", "two-layers24") for seed in (301, 302)
    ]
    assert [stage_of(each) for each in order].count(STRESS) == 4
    # a failure there takes nobody to a lower rate
    assert final_rates(plan, plan.groups[0], contestant(plan, "pre-ln"), search(plan, rows), rows) == [2e-3]
    assert runs_left(plan_of(tmp_path, TWO + "seeds = 2\nstress = 4"), {}) == 2 * 3 + 2 * 2 + 2 * 2


def test_the_first_contestants_are_done_before_the_others_begin(tmp_path):
    text = TWO.replace('"pre-ln", "post-ln"', '"pre-ln", "post-ln", "keel", "peri-ln"') + "first = 2\nseeds = 5"
    _, order = run_all(plan_of(tmp_path, text), bowl(2e-3))
    first = [each.contestant in ("pre-ln", "post-ln") for each in order]
    # three rates and three seeds of two, then of the others, then two more seeds of all
    assert first == [True] * 12 + [False] * 12 + [True, True, False, False] * 2


def test_a_ladder_starts_from_the_rung_below(tmp_path):
    plan = plan_of(tmp_path, TWO + "seeds = 2\nladder = [{layers = 24}, {layers = 36}]")
    best = {"two": 4e-3, "two-layers24": 2e-3, "two-layers36": 2e-3}
    rows, order = run_all(plan, lambda each: bowl(best[each.group])(each))
    tried = {name: sorted({each.rate for each in order if each.group == name}) for name in best}
    assert tried["two"] == [1e-3, 2e-3, 4e-3, 8e-3]
    # around 4e-3, and one further down because the best was at the edge
    assert tried["two-layers24"] == [1e-3, 2e-3, 4e-3, 8e-3]
    assert tried["two-layers36"] == [1e-3, 2e-3, 4e-3]
    assert search(plan, rows, group=2).best == 2e-3
    assert [each.group for each in order] == sorted((each.group for each in order), key=list(best).index)
