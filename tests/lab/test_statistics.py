"""What has no counterpart in scipy, and printed numbers. test_seed_table and test_endpoints ask scipy."""

import numpy as np
import pytest

from spheret.lab.statistics import holm, over_seeds, quantile


# from a printed table of Student's t
@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (10, 2.228), (30, 2.042)])
def test_students_t_is_the_printed_one(degrees, t):
    assert quantile(0.95, degrees) == pytest.approx(t, abs=5e-4)


def test_a_run_against_itself_is_exactly_zero():
    interval = over_seeds([0.0, 0.0])
    assert (interval.estimate, interval.low, interval.high, interval.p) == (0.0, 0.0, 0.0, 1.0)


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    rng = np.random.default_rng(0)
    false_differences = [min(holm(row.tolist())) < 0.05 for row in rng.uniform(size=(4000, 36))]
    assert np.mean(false_differences) == pytest.approx(0.05, abs=0.012)
