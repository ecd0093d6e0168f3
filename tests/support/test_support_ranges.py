"""Numbers that come from a user."""

import pytest

from spheret.support.ranges import (
    bytes_in_words,
    divisors,
    nearest,
)


def test_divisors_of_large_numbers_come_at_once():
    assert divisors(28) == [1, 2, 4, 7, 14, 28]
    assert len(divisors(10**12)) == 169
    assert nearest(divisors(10**12), 5, 4) == "2, 4, 5 or 8"
    assert nearest([1], 5) == "1"


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1270, "1.27 kB"), (5e9, "5 GB"), (3e18, "3,000,000 TB")]
)
def test_bytes_in_the_unit_that_shows_digits(count, words):
    assert bytes_in_words(count) == words
