"""Endpoints: paired tests against scipy, a false-positive rate, and what is said before all seeds are there."""

import math

import numpy as np
import pytest
from scipy import stats
from study_helpers import bowl, noise, plan_of, row, run_all

from spheret.lab.answers import group_answers
from spheret.lab.endpoints import endpoint_answers
from spheret.lab.report import sections_of, study_findings
from spheret.lab.rows import FINAL, STRESS
from spheret.lab.stages import SEEDS, stage_of

PLAN = """
[[parts]]
name = "three"
contestants = ["pre-ln", "post-ln", "keel"]
rates = [1e-3, 2e-3, 4e-3]
seeds = 6
stress = 4
ladder = [{layers = 36}, {layers = 24}]

[[endpoints]]
kind = "gap"
part = "three"
contestants = ["post-ln", "pre-ln"]

[[endpoints]]
kind = "equivalence"
part = "three"
contestants = ["pre-ln", "post-ln", "keel"]
margin = 0.05

[[endpoints]]
kind = "stress"
part = "three"
"""
LAYERS = {"three": 12, "three-layers36": 36, "three-layers24": 24}


def loss_of(key):
    depth = math.log2(LAYERS[key.group] / 12)
    shift = {"pre-ln": 0.0, "post-ln": -0.1 - 0.05 * depth, "keel": 0.01}[key.contestant]
    return bowl(2e-3, 2.0 + shift, deviation=0.02)(key) + 0.01 * noise(*key)


def result_of(key):
    if stage_of(key) == STRESS and key.contestant == "post-ln" and key.seed < SEEDS[STRESS] + 2:
        return row(key, None, "diverged")
    return loss_of(key)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    plan = plan_of(tmp_path_factory.mktemp("plan"), PLAN)
    return plan, run_all(plan, result_of)[0]


def answered(plan, rows):
    return endpoint_answers(plan.endpoints, group_answers(plan, rows))


def losses(rows, group, contestant):
    return [r.loss for k, r in sorted(rows.items()) if k[:2] == (group, contestant) and stage_of(k) == FINAL]


class TestGap:
    def test_it_is_the_paired_test_of_scipy(self, study):
        gap = answered(*study)[0]
        assert [each.where for each in gap.comparisons] == ["layers 12", "layers 24", "layers 36"]
        for each, group in zip(gap.comparisons, ("three", "three-layers24", "three-layers36"), strict=True):
            expected = stats.ttest_rel(losses(study[1], group, "post-ln"), losses(study[1], group, "pre-ln"))
            low, high = expected.confidence_interval(0.95)
            assert each.p == pytest.approx(expected.pvalue)
            assert (each.interval.low, each.interval.high) == (pytest.approx(low), pytest.approx(high))
            assert (each.verdict, each.seeds, each.planned) == ("lower", 6, 6)

    def test_the_slope_is_that_of_scipy_seed_by_seed(self, study):
        slope, rows = answered(*study)[0].slope, study[1]
        by_group = {g: np.subtract(losses(rows, g, "post-ln"), losses(rows, g, "pre-ln")) for g in LAYERS}
        x = [math.log2(LAYERS[group]) for group in by_group]
        slopes = [stats.linregress(x, gaps).slope for gaps in zip(*by_group.values(), strict=True)]
        expected = stats.ttest_1samp(slopes, 0)
        assert slope.interval.estimate == pytest.approx(np.mean(slopes))
        assert slope.p == pytest.approx(expected.pvalue)
        assert slope.interval.estimate == pytest.approx(-0.05, abs=0.02)
        assert slope.verdict == "lower"

    def test_a_failed_seed_leaves_no_mean(self, tmp_path):
        plan = plan_of(tmp_path, PLAN)

        def failing(key):
            bad = key.contestant == "post-ln" and key.group == "three-layers36" and key.seed == 103
            return row(key, 3.0, "collapsed") if bad else loss_of(key)

        gap = answered(plan, run_all(plan, failing)[0])[0]
        last = gap.comparisons[-1]
        assert (last.verdict, last.interval) == ("failed", None)
        assert "post-ln: collapsed in 1 of 6 seeds" in last.trouble
        assert gap.slope.verdict == "failed"

    def test_no_verdict_before_all_seeds_are_there(self, study):
        plan, rows = study
        some = {k: r for k, r in rows.items() if k.group != "three-layers24" and k.seed not in (104, 105, 106)}
        gap = answered(plan, some)[0]
        assert [each.verdict for each in gap.comparisons] == ["not run"] * 3
        assert [each.seeds for each in gap.comparisons] == [3, 0, 3]
        # what is there is shown
        assert gap.comparisons[0].interval.estimate == pytest.approx(-0.1, abs=0.03)
        assert gap.slope.trouble == "2 of 3 sizes, 3 of 6 seeds"
        empty = answered(plan, {})
        assert {each.verdict for answer in empty for each in answer.comparisons} == {"not run"}


class TestEquivalence:
    def test_it_is_two_one_sided_tests_of_scipy(self, study):
        equivalence = answered(*study)[1]
        assert len(equivalence.comparisons) == 3 * 3
        for each in equivalence.comparisons:
            group = {f"layers {layers}": name for name, layers in LAYERS.items()}[each.where]
            first, second = (losses(study[1], group, name) for name in (each.first, each.second))
            above = stats.ttest_rel(first, np.subtract(second, 0.05), alternative="greater").pvalue
            below = stats.ttest_rel(first, np.add(second, 0.05), alternative="less").pvalue
            assert each.p == pytest.approx(max(above, below))
            low, high = stats.ttest_rel(first, second).confidence_interval(0.90)
            # the interval says the same
            assert (each.verdict == "equivalent") == (low > -0.05 and high < 0.05)
        verdicts = {(each.first, each.second): each.verdict for each in equivalence.comparisons}
        assert verdicts["pre-ln", "keel"] == "equivalent"
        assert verdicts["pre-ln", "post-ln"] == "not shown"


class TestStress:
    def test_failures_are_counted_by_seed(self, study):
        stress = answered(*study)[2]
        counts = {(each.label, each.where): len(each.failed) for each in stress.stresses}
        assert counts == {
            (name, f"layers {layers}"): 2 * (name == "post-ln")
            for name in ("pre-ln", "post-ln", "keel")
            for layers in (12, 24, 36)
        }
        assert {each.rate for each in stress.stresses[0].runs.values()} == {8e-3}


def test_they_come_first_among_the_details(study):
    plan, rows = study
    sections = sections_of(study_findings(plan, rows))
    names = [each.name for each in sections]
    assert names.index("endpoints") == names.index("losses") - 1
    section = sections[names.index("endpoints")]
    assert [table.name for table in section.tables] == ["endpoints", "stress"]
    for table in section.tables:
        for cells in table.rows:
            assert all(cell.source for cell in cells if cell.value is not None)
