"""What a laboratory wants next, and what it takes from elsewhere."""

import pytest
from study_helpers import TWO, bowl, key, plan_of, row

from spheret.lab.laboratory import Laboratory
from spheret.lab.race import race_plan
from spheret.lab.study import jobs
from spheret.support.meter import Meter


@pytest.fixture
def race(tmp_path, prepared):
    shared = {
        "model": {"layers": 1, "heads": 2, "width": 16, "block": 16, "head": "tied", "head_bias": "none"},
        "data": {"path": str(prepared)},
        "train": {"steps": 10, "batch_size": 2},
    }
    plan = race_plan(tmp_path / "plan.toml", "pre-ln,keel", "7,8", [1e-3], shared)
    return Laboratory(plan, tmp_path / "race")


@pytest.fixture
def study(tmp_path, prepared):
    text = f'[data]\npath = "{prepared}"\n[train]\nsteps = 10\n[model]\nlayers = 1\nwidth = 16\n{TWO}seeds = 2\n'
    return Laboratory(plan_of(tmp_path, text), tmp_path / "study")


def test_the_jobs_of_a_race(race, capsys):
    names = ["pre-ln-lr0.001-seed7", "keel-lr0.001-seed7", "pre-ln-lr0.001-seed8", "keel-lr0.001-seed8"]
    assert [job.name.rpartition("-")[0] for job in jobs(race, Meter("race"))] == names
    assert capsys.readouterr().err == "race: 0 of 4 runs\n"


def test_the_jobs_of_a_study_that_has_rows(study, capsys):
    losses = {"pre-ln": bowl(2e-3), "post-ln": bowl(2e-3, 1.0)}
    keys = [key(label, rate, 1) for label in losses for rate in (1e-3, 2e-3, 4e-3)]
    assert study.join([row(each, losses[each.contestant](each), run=study.name(each)[0]) for each in keys]) == 6
    (first, *_) = jobs(study, Meter("study"))
    assert first.name.startswith("pre-ln-lr0.002-seed101-")
    assert "6 of about 10 runs" in capsys.readouterr().err
