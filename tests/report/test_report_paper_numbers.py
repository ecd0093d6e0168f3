"""The paper's numbers agree with each other, with the paper's prose and with our footnotes."""

import math

import pytest

from spheret.connections import PAPER_SCHEMES
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.report.paper_numbers import (
    CORPORA,
    FOOTNOTES,
    LOSSES,
    ROWS,
    SIZES,
    ZERO_SHOT,
)
from spheret.runs import paper_runs
from spheret.runs.assumptions import DATASETS, TABLE_SCHEMES

SPHERETNORMS = ("0.5-SpheretNorm", "1-SpheretNorm", "2-SpheretNorm")
ZERO_SHOT_COLUMNS = tuple(column.heading for column in PAPER_COLUMNS)
BASELINES = [row for row in ROWS if row not in SPHERETNORMS]


def half_unit(text):
    """Half a unit of the last printed digit."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def number(row, corpus, size, field="val"):
    return float(getattr(LOSSES[row, corpus, size], field))


def score(corpus, row, column):
    """A zero-shot number with the sign that makes higher better."""
    value = float(ZERO_SHOT[corpus][row][column])
    return value if PAPER_COLUMNS[column].higher_is_better else -value


def test_every_cell_is_there():
    assert set(LOSSES) == {(row, corpus, size) for row in ROWS for corpus in CORPORA for size in SIZES}
    assert len(LOSSES) == 48
    for table in ZERO_SHOT.values():
        assert list(table) == list(ROWS)
        assert {len(cells) for cells in table.values()} == {12} == {len(ZERO_SHOT_COLUMNS)}
    assert set(ZERO_SHOT) == set(CORPORA)


def test_columns_are_as_printed():
    assert ZERO_SHOT_COLUMNS == (
        "ARC-C acc_n", "ARC-E acc_n", "BoolQ acc", "HellaSwag acc_n", "LMB. acc", "OBQA acc_n", "PIQA acc_n",
        "SciQ acc", "SocialIQa acc", "WinoGrande acc", "LMB. ppl", "Wiki. ppl",
    )  # fmt: skip


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
    assert (set(ROWS.values()), tuple(CORPORA), SIZES) == (set(TABLE_SCHEMES), DATASETS, paper_runs.SIZES)


class TestWhatThePaperSays:
    """Sentences of the paper's prose that repeat some of the numbers."""

    def test_small_is_won_by_pre_ln(self):
        for corpus in CORPORA:
            for field in ("train", "val"):
                assert min(ROWS, key=lambda row, c=corpus, f=field: number(row, c, "S", f)) == "Pre-LN"
        best = [min(LOSSES[row, corpus, "S"].perplexity for row in SPHERETNORMS) for corpus in CORPORA]
        assert best == ["21.88", "21.79"]

    @pytest.mark.parametrize(
        ("size", "peri_ln", "projection"),
        [("M", ["19.09", "19.55"], ["16.81", "19.18"]), ("L", ["17.18", "17.29"], ["16.98", "16.81"])],
    )
    def test_larger_sizes_are_won_by_the_projection(self, size, peri_ln, projection):
        assert [LOSSES["Peri-LN", corpus, size].perplexity for corpus in CORPORA] == peri_ln
        assert [LOSSES["1-SpheretNorm", corpus, size].perplexity for corpus in CORPORA] == projection
        for corpus in CORPORA:
            assert min(ROWS, key=lambda row, c=corpus: number(row, c, size)) == "1-SpheretNorm"
            assert min(BASELINES, key=lambda row, c=corpus: number(row, c, size)) == "Peri-LN"

    def test_the_variants_lie_within_four_hundredths(self):
        for corpus in CORPORA:
            for size in SIZES:
                values = [number(row, corpus, size) for row in SPHERETNORMS]
                assert max(values) - min(values) <= 0.04

    def test_zero_shot_wins(self):
        wins = {}
        for corpus in CORPORA:
            best = [
                max(ROWS, key=lambda row, c=corpus, m=m: (score(c, row, m), row in SPHERETNORMS)) for m in range(12)
            ]
            wins[corpus] = [ZERO_SHOT_COLUMNS[m] for m in range(12) if best[m] not in SPHERETNORMS]
        expected = {"fineweb-edu": ["SocialIQa acc"], "openwebtext": ["HellaSwag acc_n", "SocialIQa acc"]}
        assert wins == expected

    def test_lambada(self):
        lambada = ZERO_SHOT_COLUMNS.index("LMB. ppl")
        best = min(float(ZERO_SHOT["fineweb-edu"][row][lambada]) for row in BASELINES)
        assert best == 59.55
        assert 1 - 46.74 / best == pytest.approx(0.215, abs=5e-4)


class TestFootnotes:
    def test_medium_beats_large_only_for_spheretnorm(self):
        for row in ROWS:
            better = number(row, "fineweb-edu", "M") < number(row, "fineweb-edu", "L")
            assert better == (row in SPHERETNORMS)
        ranges = [sorted(number(row, "fineweb-edu", size) for row in SPHERETNORMS) for size in "ML"]
        assert [(r[0], r[-1]) for r in ranges] == [(2.822, 2.828), (2.832, 2.834)]

    def test_geonorm_is_beaten_by_the_best_variant_only(self):
        for corpus in CORPORA:
            for m in range(12):
                assert max(score(corpus, row, m) for row in SPHERETNORMS) > score(corpus, "GeoNorm", m)
            losers = [
                row
                for row in SPHERETNORMS
                if any(score(corpus, row, m) <= score(corpus, "GeoNorm", m) for m in range(12))
            ]
            assert losers
        everywhere = [
            row for row in SPHERETNORMS
            if all(score(corpus, row, m) > score(corpus, "GeoNorm", m) for corpus in CORPORA for m in range(12))
        ]  # fmt: skip
        assert everywhere == []

    def test_eleven_counts_a_tie(self):
        sciq = ZERO_SHOT_COLUMNS.index("SciQ acc")
        table = ZERO_SHOT["fineweb-edu"]
        assert table["2-SpheretNorm"][sciq] == table["Peri-LN"][sciq] == "82.60"

    def test_they_name_what_a_reader_needs(self):
        text = " ".join(FOOTNOTES)
        for word in ("exp(", "one seed", "2.822", "GeoNorm", "tie", "lambada_openai", "word perplexity"):
            assert word in text
