"""Numbers that come from a user."""

import math

import pytest

from spheret.support.ranges import (
    MOST,
    bytes_in_words,
    check_above_zero,
    check_count,
    check_counts,
    counts,
    divisors,
    nearest,
)
from spheret.support.threads import check_threads, most_threads


def test_a_count_has_two_ends():
    assert [check_count("--n", n) for n in (1, MOST)] == [1, MOST]
    for bad, message in ((0, "at least 1, got 0"), (MOST + 1, "at most 1,000,000,000,000, got 1000000000001")):
        with pytest.raises(ValueError, match=f"--n must be {message}"):
            check_count("--n", bad)
    # more digits than Python writes
    with pytest.raises(ValueError, match="10001 digits"):
        check_count("--n", 10**10000)
    check_counts(0, batch_size=0, step=None)
    with pytest.raises(ValueError, match=r"--batch-size .*1"):
        check_counts(batch_size=0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 11.0])
def test_a_number_above_zero(value):
    with pytest.raises(ValueError, match=r"--x .* 0 .* 10"):
        check_above_zero("--x", value, most=10)
    assert check_above_zero("--x", 10.0, most=10) == 10.0


def test_a_list_of_counts():
    assert counts("--batches", "1, 8") == [1, 8]
    for bad in ("", "1,", "1,two", "-1", "1.5", "٣", "9" * 5000):
        with pytest.raises(ValueError, match=r"--batches .*1"):
            counts("--batches", bad)


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


def test_threads():
    assert check_threads("--threads", 1) == 1
    for bad in (0, -1, most_threads() + 1):
        with pytest.raises(ValueError, match=r"--threads .* 1 "):
            check_threads("--threads", bad)
