"""The paper's numbers: they agree with each other, and with what its prose and our footnotes say of them."""

import math

import pytest

from spheret.connections import PAPER_SCHEMES
from spheret.race import recipe
from spheret.report import published
from spheret.report.published import CORPORA, LOSSES, METRICS, OURS, ROWS, SIZES, ZERO_SHOT

BASELINES = [row for row in ROWS if row not in OURS]


def half_unit(text):
    """Half a unit of the last printed digit."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def number(row, corpus, size, field="val"):
    return float(getattr(LOSSES[row, corpus, size], field))


def score(corpus, row, column):
    value = float(ZERO_SHOT[corpus][row][column])
    return value if METRICS[column].higher_is_better else -value


def test_every_cell_is_there():
    assert set(LOSSES) == {(row, corpus, size) for row in ROWS for corpus in CORPORA for size in SIZES}
    assert len(LOSSES) == 48
    for table in ZERO_SHOT.values():
        assert list(table) == list(ROWS)
        assert {len(cells) for cells in table.values()} == {12} == {len(METRICS)}
    assert set(ZERO_SHOT) == set(CORPORA)


def test_numbers_are_as_printed():
    for loss in LOSSES.values():
        assert [len(text.partition(".")[2]) for text in loss[:2]] == [3, 3]
        assert len(loss.perplexity.partition(".")[2]) == (0 if loss.perplexity == "2081" else 2)
    for table in ZERO_SHOT.values():
        assert all(len(cell.partition(".")[2]) == 2 for cells in table.values() for cell in cells)


@pytest.mark.parametrize("key", LOSSES, ids="-".join)
def test_a_perplexity_is_the_exponential_of_its_loss(key):
    loss = LOSSES[key]
    low, high = (math.exp(float(loss.val) + sign * half_unit(loss.val)) for sign in (-1, 1))
    assert low - half_unit(loss.perplexity) <= float(loss.perplexity) <= high + half_unit(loss.perplexity)


def test_rows_are_schemes_of_the_paper():
    assert set(ROWS.values()) < set(PAPER_SCHEMES)
    assert (set(ROWS.values()), tuple(CORPORA), SIZES) == (set(recipe.SCHEMES), recipe.DATASETS, recipe.SIZES)


class TestWhatThePaperSays:
    """Sentences of its prose, which state some of the numbers a second time."""

    def test_small_is_won_by_pre_ln(self):
        for corpus in CORPORA:
            for field in ("train", "val"):
                assert min(ROWS, key=lambda row, c=corpus, f=field: number(row, c, "S", f)) == "Pre-LN"
        best = [min(LOSSES[row, corpus, "S"].perplexity for row in OURS) for corpus in CORPORA]
        assert best == ["21.88", "21.79"]

    @pytest.mark.parametrize(
        ("size", "peri", "ours"),
        [("M", ["19.09", "19.55"], ["16.81", "19.18"]), ("L", ["17.18", "17.29"], ["16.98", "16.81"])],
    )
    def test_larger_sizes_are_won_by_the_projection(self, size, peri, ours):
        assert [LOSSES["Peri-LN", corpus, size].perplexity for corpus in CORPORA] == peri
        assert [LOSSES["1-SpheretNorm", corpus, size].perplexity for corpus in CORPORA] == ours
        for corpus in CORPORA:
            assert min(ROWS, key=lambda row, c=corpus: number(row, c, size)) == "1-SpheretNorm"
            assert min(BASELINES, key=lambda row, c=corpus: number(row, c, size)) == "Peri-LN"

    def test_the_variants_lie_within_four_hundredths(self):
        for corpus in CORPORA:
            for size in SIZES:
                values = [number(row, corpus, size) for row in OURS]
                assert max(values) - min(values) <= 0.04

    def test_zero_shot_wins(self):
        wins = {}
        for corpus in CORPORA:
            best = [max(ROWS, key=lambda row, c=corpus, m=m: (score(c, row, m), row in OURS)) for m in range(12)]
            wins[corpus] = [METRICS[m].heading for m in range(12) if best[m] not in OURS]
        expected = {"fineweb-edu": ["SocialIQa acc"], "openwebtext": ["HellaSwag acc_n", "SocialIQa acc"]}
        assert wins == expected

    def test_lambada(self):
        lambada = [metric.heading for metric in METRICS].index("LMB. ppl")
        best = min(float(ZERO_SHOT["fineweb-edu"][row][lambada]) for row in BASELINES)
        assert best == 59.55
        assert 1 - 46.74 / best == pytest.approx(0.215, abs=5e-4)


class TestFootnotes:
    def test_medium_beats_large_only_for_spheretnorm(self):
        for row in ROWS:
            better = number(row, "fineweb-edu", "M") < number(row, "fineweb-edu", "L")
            assert better == (row in OURS)
        ranges = [sorted(number(row, "fineweb-edu", size) for row in OURS) for size in "ML"]
        assert [(r[0], r[-1]) for r in ranges] == [(2.822, 2.828), (2.832, 2.834)]

    def test_geonorm_is_beaten_by_the_best_variant_only(self):
        for corpus in CORPORA:
            for m in range(12):
                assert max(score(corpus, row, m) for row in OURS) > score(corpus, "GeoNorm", m)
            losers = [
                row for row in OURS if any(score(corpus, row, m) <= score(corpus, "GeoNorm", m) for m in range(12))
            ]
            assert losers
        everywhere = [
            row for row in OURS
            if all(score(corpus, row, m) > score(corpus, "GeoNorm", m) for corpus in CORPORA for m in range(12))
        ]  # fmt: skip
        assert everywhere == []

    def test_eleven_counts_a_tie(self):
        sciq = [metric.task for metric in METRICS].index("sciq")
        table = ZERO_SHOT["fineweb-edu"]
        assert table["2-SpheretNorm"][sciq] == table["Peri-LN"][sciq] == "82.60"

    def test_they_say_what_is_needed(self):
        text = " ".join(published.FOOTNOTES)
        for word in ("exp(", "one seed", "2.822", "GeoNorm", "tie", "lambada_openai", "word perplexity"):
            assert word in text
