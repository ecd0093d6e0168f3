"""The statistics of a study: against least squares, against scipy, by algebra, and by simulation."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

from spheret.lab.seed_table import (
    mean_interval,
    pairs,
    seed_table,
    smallest_seen,
)
from spheret.lab.statistics import LEVEL, holm, over_seeds, quantile


def by_seed(table):
    """The losses as `seed_table` takes them, from rows of contestants and columns of seeds."""
    return {f"c{i}": {seed: float(loss) for seed, loss in enumerate(row)} for i, row in enumerate(np.asarray(table))}


def random_table(contestants, seeds, key=0):
    rng = np.random.default_rng(key)
    return 2.3 + rng.normal(0, 0.05, seeds) + rng.normal(0, 0.02, (contestants, seeds))


tables = st.tuples(st.integers(2, 6), st.integers(2, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(-10_000, 10_000), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: np.array(rows) / 1000)
)


class TestLayout:
    @pytest.mark.parametrize(("contestants", "seeds"), [(2, 2), (2, 5), (3, 3), (9, 3), (9, 5)])
    def test_it_is_the_least_squares_fit_of_contestants_and_seeds(self, contestants, seeds):
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
        for pair, (i, j) in zip(pairs(studied), combinations(range(contestants), 2), strict=True):
            contrast = np.eye(contestants + seeds)[i] - np.eye(contestants + seeds)[j]
            assert pair.estimate == pytest.approx(contrast @ solution, abs=1e-12)
            assert pair.error == pytest.approx(math.sqrt(contrast @ covariance @ contrast), rel=1e-9)
            assert pair.p == pytest.approx(2 * stats.t.sf(abs(pair.estimate) / pair.error, degrees), rel=1e-9)

    def test_only_complete_blocks_count(self):
        losses = by_seed(random_table(3, 4))
        del losses["c1"][2]
        losses["c0"][9] = 5.0
        studied = seed_table(losses)
        assert studied.seeds == (0, 1, 3)
        assert studied == seed_table({name: {s: row[s] for s in (0, 1, 3)} for name, row in losses.items()})

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_no_number_is_refused(self, loss):
        losses = by_seed(random_table(3, 3))
        losses["c1"][2] = loss
        with pytest.raises(ValueError, match=rf"c1 .*seed 2 .*{loss}"):
            seed_table(losses)

    def test_too_little_is_refused(self):
        with pytest.raises(ValueError, match="two or more contestants, not 1"):
            seed_table({"c0": {0: 1.0, 1: 2.0}})
        with pytest.raises(ValueError, match="two or more contestants, not 0"):
            seed_table({})
        with pytest.raises(ValueError, match="1 seeds in common"):
            seed_table({"c0": {0: 1.0, 1: 2.0}, "c1": {1: 2.0, 2: 3.0}})

    @given(tables, st.integers(-5, 5))
    def test_what_a_seed_does_to_all_contestants_is_taken_out(self, table, shift):
        before, after = seed_table(by_seed(table)), seed_table(by_seed(table + shift * np.arange(table.shape[1])))
        assert after.deviation == pytest.approx(before.deviation, abs=1e-9)
        for one, other in zip(pairs(before), pairs(after), strict=True):
            assert [other.estimate, other.low, other.high] == pytest.approx(
                [one.estimate, one.low, one.high], abs=1e-9
            )

    @given(tables, st.randoms(use_true_random=False))
    def test_the_order_does_not_matter(self, table, random):
        losses = by_seed(table)
        names, seeds = list(losses), list(range(table.shape[1]))
        random.shuffle(names)
        random.shuffle(seeds)
        before, after = seed_table(losses), seed_table({name: {s: losses[name][s] for s in seeds} for name in names})
        assert after.means == before.means
        assert after.seeds == before.seeds
        assert after.deviation == pytest.approx(before.deviation, abs=1e-12)
        known = {(pair.first, pair.second): pair for pair in pairs(before)}
        for pair in pairs(after):
            if twin := known.get((pair.first, pair.second)):
                assert pair.estimate == twin.estimate
            else:
                assert pair.estimate == -known[pair.second, pair.first].estimate


class TestPairs:
    @given(tables.filter(lambda table: table.shape[0] == 2))
    def test_two_contestants_give_the_paired_t_test(self, table):
        (pair,) = pairs(seed_table(by_seed(table)))
        paired = over_seeds((table[0] - table[1]).tolist())
        assert [pair.estimate, pair.low, pair.high] == pytest.approx(
            [paired.estimate, paired.low, paired.high], abs=1e-9
        )
        if np.ptp(table[0] - table[1]) > 1e-6:
            scipys = stats.ttest_rel(*table)
            assert pair.p == pytest.approx(scipys.pvalue, rel=1e-6, abs=1e-12)
            assert pair.adjusted == pair.p
            assert (pair.low, pair.high) == pytest.approx(tuple(scipys.confidence_interval(LEVEL)), abs=1e-9)

    @given(tables)
    def test_the_correction_is_holms_and_keeps_the_order(self, table):
        compared = sorted(pairs(seed_table(by_seed(table))), key=lambda pair: pair.p)
        assert [pair.adjusted for pair in compared] == holm([pair.p for pair in compared])
        assert all(a.adjusted <= b.adjusted for a, b in pairwise(compared))
        assert all(pair.p <= pair.adjusted <= 1 for pair in compared)
        for pair in compared:
            better = "first" if pair.estimate < 0 else "second"
            assert pair.verdict == (better if pair.adjusted < 1 - LEVEL else "none")

    def test_the_lower_loss_wins(self):
        table = [[2.50, 2.61, 2.40], [1.51, 1.60, 1.42], [2.51, 2.60, 2.41]]
        verdicts = {(pair.first, pair.second): pair.verdict for pair in pairs(seed_table(by_seed(table)))}
        assert verdicts == {("c0", "c1"): "second", ("c0", "c2"): "none", ("c1", "c2"): "first"}

    def test_one_contestant_under_several_names_has_no_difference_at_all(self):
        studied = seed_table(by_seed([[2.1, 2.3, 2.2]] * 3))
        assert (studied.deviation, smallest_seen(studied)) == (0.0, 0.0)
        for pair in pairs(studied):
            assert (pair.estimate, pair.low, pair.high, pair.p, pair.verdict) == (0.0, 0.0, 0.0, 1.0, "none")

    def test_intervals_that_do_not_overlap_belong_to_a_pair_that_differs(self):
        studied = seed_table(by_seed(random_table(9, 3, key=4)))
        for pair in pairs(studied):
            (low, high), (other_low, other_high) = (
                mean_interval(studied, name) for name in (pair.first, pair.second)
            )
            assert (low + high) / 2 == pytest.approx(studied.means[pair.first])
            assert (high - low) / 2 == pytest.approx((pair.high - pair.low) / 2 / math.sqrt(2))
            if high < other_low or other_high < low:
                assert not pair.low <= 0 <= pair.high


class Simulated:
    """`pairs` for many studies at once: (studies, contestants, seeds) in, one row per study out."""

    def __init__(self, losses):
        _, contestants, self.seeds = losses.shape
        self.first, self.second = np.triu_indices(contestants, 1)
        self.degrees = (contestants - 1) * (self.seeds - 1)
        rows, columns = losses.mean(2, keepdims=True), losses.mean(1, keepdims=True)
        residuals = losses - rows - columns + losses.mean((1, 2), keepdims=True)
        self.error = np.sqrt((residuals**2).sum((1, 2)) / self.degrees * 2 / self.seeds)[:, None]
        self.estimates = (rows[:, self.first] - rows[:, self.second])[:, :, 0]

    def covered(self, truth):
        return np.abs(self.estimates - truth) <= quantile(LEVEL, self.degrees) * self.error

    def p(self):
        return 2 * special.stdtr(self.degrees, -np.abs(self.estimates) / self.error)

    def adjusted(self):
        p = self.p()
        order, count = p.argsort(1), p.shape[1]
        steps = np.maximum.accumulate(np.take_along_axis(p, order, 1) * np.arange(count, 0, -1), 1)
        result = np.empty_like(p)
        np.put_along_axis(result, order, np.minimum(steps, 1), 1)
        return result


STUDIES = 4000


def studies(means, deviations, seeds):
    """Losses of many studies: contestants' means, a seed effect that dwarfs the noise, and noise."""
    means, deviations = np.asarray(means, float), np.asarray(deviations, float)
    rng = np.random.default_rng(seeds)
    noise = rng.standard_normal((STUDIES, len(means), seeds)) * deviations[:, None]
    return means[:, None] + 10 * rng.standard_normal((STUDIES, 1, seeds)) + noise


def simulation_error(probability):
    """Four standard errors of a simulated probability."""
    return 4 * math.sqrt(probability * (1 - probability) / STUDIES)


@pytest.mark.parametrize("seeds", [3, 5])
class TestSimulated:
    def test_the_simulation_is_pairs(self, seeds):
        losses = studies(np.linspace(0, 4, 9), np.ones(9), seeds)[:10]
        simulated = Simulated(losses)
        for row, (table, adjusted) in enumerate(zip(losses, simulated.adjusted(), strict=True)):
            compared = pairs(seed_table(by_seed(table)))
            assert [pair.estimate for pair in compared] == pytest.approx(simulated.estimates[row])
            assert [pair.p for pair in compared] == pytest.approx(simulated.p()[row])
            assert [pair.adjusted for pair in compared] == pytest.approx(adjusted)
            covered = [pair.low <= 1.5 <= pair.high for pair in compared]
            assert covered == simulated.covered(1.5)[row].tolist()

    # no difference at all, and two groups of equals that differ much
    @pytest.mark.parametrize("means", [[0] * 9, [0] * 5 + [9] * 4])
    def test_false_verdicts_are_as_rare_as_promised(self, seeds, means):
        simulated, means = Simulated(studies(means, np.ones(9), seeds)), np.array(means)
        null = means[simulated.first] == means[simulated.second]
        false = (simulated.adjusted()[:, null] < 0.05).any(1).mean()
        assert 0.01 < false <= 0.05 + simulation_error(0.05)

    def test_the_intervals_have_their_coverage(self, seeds):
        means = np.linspace(0, 3, 9)
        losses = studies(means, np.ones(9), seeds)
        simulated = Simulated(losses)
        coverage = simulated.covered(means[simulated.first] - means[simulated.second]).mean(0)
        assert coverage == pytest.approx(LEVEL, abs=simulation_error(LEVEL))

    def test_the_smallest_difference_is_seen_as_often_as_promised(self, seeds):
        # the promise for the true deviation, which a study only estimates
        studied = replace(seed_table(by_seed(random_table(9, seeds))), deviation=1.0)
        difference = smallest_seen(studied, power=0.8)
        losses = studies([-difference / 2, difference / 2] + [0] * 7, np.ones(9), seeds)
        simulated = Simulated(losses)
        at_the_first_step = (simulated.p()[:, 0] < 0.05 / 36) & (simulated.estimates[:, 0] < 0)
        assert at_the_first_step.mean() == pytest.approx(0.8, abs=simulation_error(0.8))
        assert (simulated.adjusted()[:, 0] < 0.05).mean() >= 0.8 - simulation_error(0.8)
        # why the noise is pooled: the t-test of the pair alone, with seeds - 1 degrees of freedom, seldom sees it
        alone = stats.ttest_rel(losses[:, 0], losses[:, 1], axis=1).pvalue < 0.05 / 36
        assert alone.mean() < {3: 0.05, 5: 0.25}[seeds]

    @pytest.mark.parametrize("noisy", [1, 2, 5])
    def test_the_damage_of_unequal_noise_is_bounded(self, seeds, noisy):
        simulated = Simulated(studies([0] * 9, [3] * noisy + [1] * (9 - noisy), seeds))
        coverage = simulated.covered(0).mean(0)
        # `pairs` states these bounds
        assert coverage.min() >= 0.71
        assert coverage.mean() >= 0.92
        assert (simulated.p().min(1) * 36 < 0.05).mean() <= 0.13


class TestSmallestSeen:
    @pytest.mark.parametrize(("contestants", "seeds"), [(2, 2), (2, 3), (3, 3), (9, 3), (9, 5), (40, 5)])
    @pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
    def test_it_has_the_power_by_direct_integration(self, contestants, seeds, power):
        studied = seed_table(by_seed(random_table(contestants, seeds)))
        shift = smallest_seen(studied, power) / (studied.deviation * math.sqrt(2 / seeds))
        degrees, count = studied.degrees, contestants * (contestants - 1) // 2
        threshold = stats.t.isf(0.05 / count / 2, degrees)

        def named(share):
            # the estimated deviation over the true one, at this share of its distribution
            ratio = math.sqrt(2 * special.gammaincinv(degrees / 2, share) / degrees)
            return special.ndtr(shift - threshold * ratio)

        assert integrate.quad(named, 0, 1, limit=200)[0] == pytest.approx(power, abs=1e-6)

    def test_more_power_and_stricter_levels_need_a_larger_difference(self):
        studied = seed_table(by_seed(random_table(9, 3)))
        assert smallest_seen(studied, 0.5) < smallest_seen(studied, 0.8) < smallest_seen(studied, 0.8, level=0.01)

    def test_more_seeds_see_a_smaller_difference(self):
        smallest = [
            smallest_seen(replace(seed_table(by_seed(random_table(9, seeds))), deviation=1.0))
            for seeds in (2, 3, 5, 10)
        ]
        assert smallest == sorted(smallest, reverse=True)


class TestNoisy:
    """A contestant that is much noisier than the others is left out of the pool, and hides nothing."""

    @pytest.mark.parametrize("seeds", [3, 5])
    def test_equal_noise_is_seldom_called_noisy(self, seeds):
        found = [bool(seed_table(by_seed(table)).noisy) for table in studies([0] * 9, np.ones(9), seeds)[:400]]
        # one in a hundred; 400 studies: four standard errors are 0.02
        assert np.mean(found) <= 0.03

    @pytest.mark.parametrize("ratio", [3, 10])
    def test_false_verdicts_stay_rare(self, ratio):
        losses = studies([0] * 9, [ratio] + [1] * 8, 5)[:400]
        false = [any(pair.verdict != "none" for pair in pairs(seed_table(by_seed(table)))) for table in losses]
        # 400 studies: two standard errors are 0.03
        assert np.mean(false) <= 0.1

    def test_the_others_differ_as_they_do_without_it(self):
        # of the true deviation, with the degrees of freedom of eight and the pairs of nine
        seen = smallest_seen(
            replace(seed_table(by_seed(studies([0] * 9, np.ones(9), 5)[0])), deviation=1.0, degrees=28)
        )
        losses = studies([0] * 8 + [seen], [20] + [1] * 8, 5)[:200]
        layouts = [seed_table(by_seed(table)) for table in losses]
        assert np.mean([studied.noisy == ("c0",) for studied in layouts]) >= 0.95
        told = [[pair for pair in pairs(studied) if (pair.first, pair.second) == ("c1", "c8")] for studied in layouts]
        # 200 studies: four standard errors are 0.11
        assert np.mean([pair.verdict == "first" for (pair,) in told]) >= 0.8 - 0.11

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
