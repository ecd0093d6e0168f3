"""The plan that a race proposes: one that can be run, with every contestant, around the best rates."""

import math

import pytest
from study_helpers import bowl, row, run_all

from spheret.lab.answers import group_answers
from spheret.lab.plan import RECIPE, read_plan
from spheret.lab.proposal import SEEDS, STEP, propose_study
from spheret.lab.race import race_plan
from spheret.runs.config import merge

CONTESTANTS = "pre-ln,proj-spheretnorm:head=tied,p-spheretnorm:p=0.3:schedule=sqrt,keel:head_bias=none"
RATES = [1e-3, 2e-3, 4e-3]
SHARED = merge(
    RECIPE,
    {
        "train": {"steps": 30, "lr": 2e-3, "clip": math.inf, "weight_decay": 1e-5},
        "model": {"dropout": 0.1},
        # what JSON would escape in a way that TOML does not read
        "data": {"path": 'my "own" text 😀'},
    },
)


def answer_of(result, contestants=CONTESTANTS):
    plan = race_plan(contestants, [1337], RATES, SHARED)
    (answer,) = group_answers(plan, run_all(plan, result)[0])
    return answer


def test_it_has_every_contestant_and_the_settings_of_the_race(tmp_path):
    best = {"pre-ln": 1e-3, "keel, head_bias=none": 4e-3}
    answer = answer_of(lambda key: bowl(best.get(key.contestant, 2e-3))(key))
    path = propose_study(tmp_path, answer, SHARED)
    (group,) = read_plan(path).groups
    assert path == tmp_path / "plan.toml"
    labels = {each.label: each.given["model"] for each in answer.group.contestants}
    assert {each.label: each.given["model"] for each in group.contestants} == labels
    assert len(labels) == 4
    assert group.given["train"] == {name: value for name, value in SHARED["train"].items() if name != "lr"}
    assert (group.given["model"], group.given["data"]) == (SHARED["model"], SHARED["data"])
    # fresh seeds, at all best rates and one step beyond them
    assert (group.part.fresh, group.part.seeds) == (True, SEEDS)
    assert group.part.rates[0] == pytest.approx(1e-3 / STEP, rel=0.01)
    assert group.part.rates[-1] == pytest.approx(4e-3 * STEP, rel=0.01)
    assert group.ratio == pytest.approx(STEP, rel=0.01)


def test_what_failed_everywhere_is_proposed_too(tmp_path):
    answer = answer_of(lambda key: row(key, 3.0, "collapsed") if "keel" in key.contestant else bowl(2e-3)(key))
    (group,) = read_plan(propose_study(tmp_path, answer, SHARED)).groups
    assert [each.label for each in group.contestants] == [each.label for each in answer.group.contestants]


def test_without_a_loss_there_is_nothing_to_propose(tmp_path):
    assert propose_study(tmp_path, answer_of(lambda key: row(key, None, "diverged")), SHARED) is None
    assert not list(tmp_path.iterdir())


def test_a_plan_of_ones_own_is_kept(tmp_path):
    answer, path = answer_of(bowl(2e-3)), tmp_path / "plan.toml"
    path.write_text("title = 'mine'\n")
    assert propose_study(tmp_path, answer, SHARED) is None
    assert path.read_text() == "title = 'mine'\n"
    # one that was proposed before is written again
    path.unlink()
    first = propose_study(tmp_path, answer, SHARED).read_bytes()
    other = answer_of(bowl(4e-3))
    assert propose_study(tmp_path, other, SHARED).read_bytes() != first
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.toml")
    assert propose_study(tmp_path, answer, SHARED) is None
    assert not (tmp_path / "elsewhere.toml").exists()
