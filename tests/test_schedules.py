import pytest

from spheret import SCHEDULES
from spheret.schedules import factor


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_lie_in_the_unit_interval_and_never_grow(name):
    factors = [factor(name, sublayer, 24) for sublayer in range(1, 25)]
    assert all(0 <= x <= 1 for x in factors)
    assert factors == sorted(factors, reverse=True)
    # only the linear schedule of the paper's code gives the last sublayer a step of 0
    assert (factors[-1] == 0) == (name == "linear-paper")


def test_values():
    assert [factor("constant", l) for l in (1, 4)] == [1, 1]
    assert [factor("sqrt", l) for l in (1, 4)] == [1, 0.5]
    assert [factor("harmonic", l) for l in (1, 4)] == [1, 0.25]
    assert [factor("linear", l, 4) for l in (1, 2, 4)] == [1, 0.75, 0.25]
    assert [factor("linear-paper", l, 4) for l in (1, 2, 4)] == [0.75, 0.5, 0]
