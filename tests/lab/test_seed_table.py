"""The comparisons of a study: against least squares, against scipy, by algebra, and by simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import integrate, special, stats

from spheret.lab.seed_table import mean_interval, pairs, seed_table, smallest_seen
from spheret.lab.statistics import LEVEL, holm


def by_seed(table):
    """The losses as `seed_table` takes them, from rows of contestants and columns of seeds."""
    return {f"c{i}": {seed: float(loss) for seed, loss in enumerate(row)} for i, row in enumerate(np.asarray(table))}


def random_table(contestants, seeds, key=0):
    rng = np.random.default_rng(key)
    return 2.3 + rng.normal(0, 0.05, seeds) + rng.normal(0, 0.02, (contestants, seeds))


@pytest.mark.parametrize(("contestants", "seeds"), [(2, 2), (2, 5), (3, 3), (9, 3)])
def test_it_is_the_least_squares_fit_of_contestants_and_seeds(contestants, seeds):
    table = random_table(contestants, seeds)
    rows, columns = np.indices(table.shape).reshape(2, -1)
    design = np.hstack([np.eye(contestants)[rows], np.eye(seeds)[columns]])
    solution, _, rank, _ = np.linalg.lstsq(design, table.ravel(), rcond=None)
    residuals = (table.ravel() - design @ solution).reshape(table.shape)
    studied = seed_table(by_seed(table))
    degrees = table.size - rank
    variance = (residuals**2).sum() / degrees
    assert studied.degrees == degrees
    assert studied.deviation == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert list(studied.means.values()) == pytest.approx(table.mean(1), rel=1e-14)
    own = np.sqrt((residuals**2).sum(1) * contestants / degrees)
    assert list(studied.deviations.values()) == pytest.approx(own, rel=1e-9)
    covariance = np.linalg.pinv(design.T @ design) * variance
    compared = pairs(studied)
    for pair, (i, j) in zip(compared, combinations(range(contestants), 2), strict=True):
        contrast = np.eye(contestants + seeds)[i] - np.eye(contestants + seeds)[j]
        assert pair.estimate == pytest.approx(contrast @ solution, abs=1e-12)
        assert pair.error == pytest.approx(math.sqrt(contrast @ covariance @ contrast), rel=1e-9)
        assert pair.p == pytest.approx(2 * stats.t.sf(abs(pair.estimate) / pair.error, degrees), rel=1e-9)
        half_width = (pair.high - pair.low) / 2
        assert half_width == pytest.approx(stats.t.ppf((1 + LEVEL) / 2, degrees) * pair.error, rel=1e-9)
        # of two intervals of means that do not overlap, the difference is not zero
        low, high = mean_interval(studied, pair.first)
        assert (low + high) / 2 == pytest.approx(studied.means[pair.first])
        assert (high - low) / 2 == pytest.approx(half_width / math.sqrt(2))
    assert [pair.adjusted for pair in compared] == holm([pair.p for pair in compared])


def test_two_contestants_give_the_paired_t_test():
    table = random_table(2, 4)
    (pair,) = pairs(seed_table(by_seed(table)))
    expected = stats.ttest_rel(*table)
    assert pair.adjusted == pair.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (pair.low, pair.high) == pytest.approx(tuple(expected.confidence_interval(LEVEL)), abs=1e-9)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_refused(loss):
    losses = by_seed(random_table(3, 3))
    losses["c1"][2] = loss
    with pytest.raises(ValueError, match=rf"c1 .*seed 2 .*{loss}"):
        seed_table(losses)


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="two or more contestants, not 1"):
        seed_table({"c0": {0: 1.0, 1: 2.0}})
    with pytest.raises(ValueError, match="1 seeds in common"):
        seed_table({"c0": {0: 1.0, 1: 2.0}, "c1": {1: 2.0, 2: 3.0}})


def test_one_contestant_under_several_names_has_no_difference_at_all():
    studied = seed_table(by_seed([[2.1, 2.3, 2.2]] * 3))
    assert (studied.deviation, smallest_seen(studied)) == (0.0, 0.0)
    for pair in pairs(studied):
        assert (pair.estimate, pair.low, pair.high, pair.p, pair.verdict) == (0.0, 0.0, 0.0, 1.0, "none")


@pytest.mark.parametrize(("contestants", "seeds", "power"), [(2, 2, 0.8), (9, 3, 0.5), (9, 5, 0.8), (40, 5, 0.95)])
def test_the_smallest_difference_has_the_power_by_direct_integration(contestants, seeds, power):
    studied = seed_table(by_seed(random_table(contestants, seeds)))
    shift = smallest_seen(studied, power) / (studied.deviation * math.sqrt(2 / seeds))
    degrees, count = studied.degrees, contestants * (contestants - 1) // 2
    threshold = stats.t.isf(0.05 / count / 2, degrees)

    def named(share):
        # the estimated deviation over the true one, at this share of its distribution
        ratio = math.sqrt(2 * special.gammaincinv(degrees / 2, share) / degrees)
        return special.ndtr(shift - threshold * ratio)

    assert integrate.quad(named, 0, 1, limit=200)[0] == pytest.approx(power, abs=1e-6)


class TestNoisy:
    """A contestant that is much noisier than the others is left out of the pool, and hides nothing."""

    # how much noisier the first of nine is, and how often one may be called noisy: by chance one in a hundred
    @pytest.mark.parametrize(("ratio", "most_noisy"), [(1, 0.03), (3, 1.0), (10, 1.0)])
    def test_false_verdicts_stay_rare(self, ratio, most_noisy):
        rng = np.random.default_rng(5)
        noise = rng.standard_normal((400, 9, 5)) * np.array([ratio] + [1] * 8)[:, None]
        # a seed effect that dwarfs the noise
        tables = [seed_table(by_seed(losses)) for losses in noise + 10 * rng.standard_normal((400, 1, 5))]
        assert np.mean([bool(table.noisy) for table in tables]) <= most_noisy
        # 400 studies: two standard errors are 0.03
        assert np.mean([any(pair.significant for pair in pairs(table)) for table in tables]) <= 0.1

    def test_its_own_pairs_are_paired_t_tests(self):
        table = random_table(4, 5)
        table[1] += [0, 0, 3, 0, 0]
        studied = seed_table(by_seed(table))
        assert studied.noisy == ("c1",)
        without = seed_table(by_seed(table[[0, 2, 3]]))
        assert (studied.deviation, studied.degrees) == (pytest.approx(without.deviation), without.degrees)
        for pair in pairs(studied):
            if "c1" in (pair.first, pair.second):
                first, second = (list(by_seed(table)[name].values()) for name in (pair.first, pair.second))
                assert pair.p == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-9)
        low, high = mean_interval(studied, "c1")
        assert high - low > 10 * (mean_interval(studied, "c0")[1] - mean_interval(studied, "c0")[0])
