"""The intervals: against printed tables, and by simulation of their coverage. test_seed_table asks scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.lab.statistics import holm, mean_and_deviation, over_seeds, quantile


# from a printed table of Student's t
@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042)]
)
def test_students_t_is_the_printed_one(degrees, t):
    assert quantile(0.95, degrees) == pytest.approx(t, abs=5e-4)


def test_a_run_against_itself_is_exactly_zero():
    interval = over_seeds([0.0, 0.0])
    assert (interval.estimate, interval.low, interval.high, interval.p) == (0.0, 0.0, 0.0, 1.0)


def test_holm_bounds_the_rate_of_false_differences():
    rng = np.random.default_rng(0)
    false_differences = [min(holm(row.tolist())) < 0.05 for row in rng.uniform(size=(4000, 36))]
    assert np.mean(false_differences) == pytest.approx(0.05, abs=0.012)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_mean_and_deviation_are_numpys(values):
    assert mean_and_deviation(values) == pytest.approx((np.mean(values), np.std(values, ddof=1)), abs=1e-9)
