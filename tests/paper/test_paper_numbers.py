"""The paper's numbers agree with its source, with each other, with the paper's prose and with our footnotes."""

import hashlib
import math

import pytest

from spheret.connections import PAPER_SCHEMES
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.model.gpt import PRESETS
from spheret.paper.assumptions import DATASETS, TABLE_SCHEMES
from spheret.paper.numbers import (
    AVERAGE_ACCURACIES,
    CORPORA,
    FOOTNOTES,
    LOSSES,
    ROWS,
    SIZES,
    ZERO_SHOT,
    format_average,
)

SPHERETNORMS = ("0.5-SpheretNorm", "1-SpheretNorm", "2-SpheretNorm")
ZERO_SHOT_COLUMNS = tuple(column.heading for column in PAPER_COLUMNS)
BASELINES = [row for row in ROWS if row not in SPHERETNORMS]


# a second transcription, made from the LaTeX source of the paper by a script. For each row of a table: the start of
# the SHA-256 of its cells with spaces between them, and its marks (1 is bold, the best; 2 is underlined, the second)
PRINTED = {
    "losses": {
        "Pre-LN": ("cadd3d85f12f", "11....11...."),
        "Pre-DyT": ("ed4fed4950d4", "............"),
        "Peri-LN": ("e87044a6a2d2", "............"),
        "Keel": ("103a69bcde2b", "............"),
        "GeoNorm": ("4170c2d3129a", "............"),
        "0.5-SpheretNorm": ("8b85e62a8827", "22..22..2222"),
        "1-SpheretNorm": ("efe4d132ff41", "..1111..1111"),
        "2-SpheretNorm": ("d055e604a342", "..22..2212.."),
    },
    "perplexities": {
        "Pre-LN": ("fe3a83b7787e", "1..1.."),
        "Pre-DyT": ("8f0927ae0ac7", "......"),
        "Peri-LN": ("0afd4a4ae2a5", "......"),
        "Keel": ("838e52f47c93", "......"),
        "GeoNorm": ("9406ffbeed24", "......"),
        "0.5-SpheretNorm": ("47b197fc7430", "2.2.22"),
        "1-SpheretNorm": ("ac8562991be4", ".11.11"),
        "2-SpheretNorm": ("c13213761b61", ".2.22."),
    },
    "fineweb-edu": {
        "Pre-LN": ("e604d6df59ee", "............"),
        "Pre-DyT": ("4231d3ffebc7", ".......21..."),
        "Peri-LN": ("b1249567b9e7", "...2...12..."),
        "Keel": ("fe2501941ff5", "............"),
        "GeoNorm": ("817b143f122d", "..2........."),
        "0.5-SpheretNorm": ("5965e225b67a", "2....22..122"),
        "1-SpheretNorm": ("4efd41b0f4ae", "11111...2.11"),
        "2-SpheretNorm": ("3638d4887e10", "22..2111.2.."),
    },
    "openwebtext": {
        "Pre-LN": ("e0da065eb7ea", "............"),
        "Pre-DyT": ("8a70a36720a9", "2.......2..."),
        "Peri-LN": ("83f1c2238ddf", "...1....1..."),
        "Keel": ("313a4f2f9485", "............"),
        "GeoNorm": ("bb841e313de5", "..2........."),
        "0.5-SpheretNorm": ("92908f09b73f", ".2.22....122"),
        "1-SpheretNorm": ("f2c62bd09a86", "111.1221.211"),
        "2-SpheretNorm": ("61c381e7eaac", ".....112...."),
    },
}
# the paper underlines one of two equal numbers: train loss of 0.5- and 2-SpheretNorm, FineWeb-Edu L
TIE_WITHOUT_MARK = ("losses", "2-SpheretNorm", 4)


def table_cells(table, row):
    """The cells of a row as the paper prints them."""
    if table in ZERO_SHOT:
        return ZERO_SHOT[table][row]
    losses = [LOSSES[row, corpus, size] for corpus in CORPORA for size in SIZES]
    if table == "perplexities":
        return tuple(loss.perplexity for loss in losses)
    return tuple(text for loss in losses for text in (loss.train, loss.val))


@pytest.mark.parametrize("table", PRINTED)
@pytest.mark.parametrize("row", ROWS)
def test_no_number_is_altered(table, row):
    text = " ".join(table_cells(table, row))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == PRINTED[table][row][0]


def test_the_second_transcription_has_every_row():
    assert [list(rows) for rows in PRINTED.values()] == [list(ROWS)] * 4
    assert sum(len(marks) for rows in PRINTED.values() for _, marks in rows.values()) == 336


@pytest.mark.parametrize("table", PRINTED)
def test_bold_and_underlined_are_the_best_two(table):
    for index in range(len(table_cells(table, "Keel"))):
        largest = table in ZERO_SHOT and PAPER_COLUMNS[index].higher_is_better
        column = {row: float(table_cells(table, row)[index]) for row in ROWS}
        best_two = sorted(set(column.values()), reverse=largest)[:2]
        ranks = {row: str(1 + best_two.index(value)) if value in best_two else "." for row, value in column.items()}
        marks = {row: PRINTED[table][row][1][index] for row in ROWS}
        if (table, index) == TIE_WITHOUT_MARK[::2]:
            assert ranks.pop(TIE_WITHOUT_MARK[1]) == "2"
            assert marks.pop(TIE_WITHOUT_MARK[1]) == "."
        assert ranks == marks, index


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
    assert (set(ROWS.values()), tuple(CORPORA), SIZES) == (set(TABLE_SCHEMES), DATASETS, tuple(PRESETS))


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

    def test_the_highest_average_accuracy(self):
        """Contribution 4 of the paper: the highest average zero-shot accuracy on both corpora."""
        expected = {
            "fineweb-edu": (["48.06", "48.55", "48.47"], "Pre-DyT", "47.30"),
            "openwebtext": (["45.02", "45.32", "44.92"], "Peri-LN", "44.58"),
        }
        for corpus, (ours, best, theirs) in expected.items():
            averages = AVERAGE_ACCURACIES[corpus]
            assert list(averages) == list(ROWS)
            assert [format_average(averages[row]) for row in SPHERETNORMS] == ours
            assert max(BASELINES, key=averages.__getitem__) == best
            assert format_average(averages[best]) == theirs
            assert min(averages[row] for row in SPHERETNORMS) > averages[best]

    def test_an_average_is_over_the_ten_accuracies(self):
        for corpus, table in ZERO_SHOT.items():
            for row, texts in table.items():
                assert float(AVERAGE_ACCURACIES[corpus][row]) == pytest.approx(math.fsum(map(float, texts[:10])) / 10)

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

    def test_four_hundredths_do_not_hold_for_the_training_loss(self):
        spreads = {}
        for corpus in CORPORA:
            for size in SIZES:
                values = [number(row, corpus, size, "train") for row in SPHERETNORMS]
                spreads[corpus, size] = round(max(values) - min(values), 3)
        assert {place for place, spread in spreads.items() if spread > 0.04} == {("openwebtext", "L")}
        assert spreads["openwebtext", "L"] == 0.046

    def test_keels_perplexity_is_printed_in_two_ways(self):
        loss = LOSSES["Keel", "fineweb-edu", "S"]
        low, high = (math.exp(float(loss.val) + sign * half_unit(loss.val)) for sign in (-1, 1))
        assert loss.perplexity == "2081"
        assert low < 2081.0 < 2081.5 < high

    def test_they_give_every_average(self):
        text = " ".join(FOOTNOTES)
        for corpus, averages in AVERAGE_ACCURACIES.items():
            for row in (*SPHERETNORMS, max(BASELINES, key=averages.__getitem__)):
                assert format_average(averages[row]) in text, (corpus, row)
