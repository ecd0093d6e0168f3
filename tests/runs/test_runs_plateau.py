"""The plateau: how many updates of a run had the loss of token frequencies."""

import pytest

from spheret.runs.metrics import MetricsRecord
from spheret.runs.plateau import plateau_updates
from spheret.watching.losses import PLATEAU_WINDOW, on_plateau


def lines(*losses):
    return [MetricsRecord(step=step, loss=loss, stopped="") for step, loss in enumerate(losses, start=1)]


def test_the_median_of_a_window_is_compared_with_the_entropy():
    assert not on_plateau([3.0] * (PLATEAU_WINDOW - 1), 3.0)
    assert on_plateau([9.0] * 50 + [3.0] * PLATEAU_WINDOW, 3.0)
    assert on_plateau([3.0] * (PLATEAU_WINDOW - 2) + [9.0, 1.0], 3.0)
    assert [on_plateau([loss] * PLATEAU_WINDOW, 3.0) for loss in (3.089, 3.091, 2.911, 2.909)] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("losses", "updates"),
    [
        ([3.0] * 100, 100 - PLATEAU_WINDOW + 1),
        ([3.0] * (PLATEAU_WINDOW - 1), 0),
        ([2.0] * 100, 0),
        # it passes
        ([6.0] * 20 + [3.0] * 4 + [2.0] * 50, 3),
        # the median follows the loss by half a window at both ends
        ([6.0] * 20 + [3.0] * 40 + [2.0] * 50, 40 - 1),
        # a run that a guard stopped has a line without a loss
        ([3.0] * 30 + [None], 30 - PLATEAU_WINDOW + 1),
        ([], 0),
    ],
)
def test_updates_are_counted_after_the_plateau_was_reached(losses, updates):
    assert plateau_updates(lines(*losses), 3.0) == updates
