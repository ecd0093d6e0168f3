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
PRINTED_TABLES = ("losses", "perplexities", "fineweb-edu", "openwebtext")
PRINTED_ROWS = """
Pre-LN          cadd3d85f12f 11....11....  fe3a83b7787e 1..1..  e604d6df59ee ............  e0da065eb7ea ............
Pre-DyT         ed4fed4950d4 ............  8f0927ae0ac7 ......  4231d3ffebc7 .......21...  8a70a36720a9 2.......2...
Peri-LN         e87044a6a2d2 ............  0afd4a4ae2a5 ......  b1249567b9e7 ...2...12...  83f1c2238ddf ...1....1...
Keel            103a69bcde2b ............  838e52f47c93 ......  fe2501941ff5 ............  313a4f2f9485 ............
GeoNorm         4170c2d3129a ............  9406ffbeed24 ......  817b143f122d ..2.........  bb841e313de5 ..2.........
0.5-SpheretNorm 8b85e62a8827 22..22..2222  47b197fc7430 2.2.22  5965e225b67a 2....22..122  92908f09b73f .2.22....122
1-SpheretNorm   efe4d132ff41 ..1111..1111  ac8562991be4 .11.11  4efd41b0f4ae 11111...2.11  f2c62bd09a86 111.1221.211
2-SpheretNorm   d055e604a342 ..22..2212..  c13213761b61 .2.22.  3638d4887e10 22..2111.2..  61c381e7eaac .....112....
"""
PRINTED: dict[str, dict[str, tuple[str, str]]] = {table: {} for table in PRINTED_TABLES}
for name, *cells in map(str.split, PRINTED_ROWS.strip().splitlines()):
    for number, table in enumerate(PRINTED_TABLES):
        PRINTED[table][name] = cells[2 * number], cells[2 * number + 1]
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


def test_columns_are_as_printed():
    assert ZERO_SHOT_COLUMNS == (
        "ARC-C acc_n", "ARC-E acc_n", "BoolQ acc", "HellaSwag acc_n", "LMB. acc", "OBQA acc_n", "PIQA acc_n",
        "SciQ acc", "SocialIQa acc", "WinoGrande acc", "LMB. ppl", "Wiki. ppl",
    )  # fmt: skip


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


class TestFootnotes:
    def test_they_give_every_average(self):
        text = " ".join(FOOTNOTES)
        for corpus, averages in AVERAGE_ACCURACIES.items():
            for row in (*SPHERETNORMS, max(BASELINES, key=averages.__getitem__)):
                assert format_average(averages[row]) in text, (corpus, row)
