"""The paper's tables with runs beside them: both corpora, other readings, and marks of what is not the paper's."""

import html
import re

import pytest
from report_helpers import cell, cells, write_evaluation, write_paper_run, write_run, write_tables

from spheret.cli import main
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.lab.runs import read_groups
from spheret.paper.numbers import CORPORA, FOOTNOTES
from spheret.paper.runs import PaperRun

SCHEMES = {"Pre-LN": "pre-ln", "1-SpheretNorm": "proj-spheretnorm"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Runs of two schemes on both corpora in one directory, as `reproduce --all` leaves them, and their report."""
    root = tmp_path_factory.mktemp("both")
    for corpus in CORPORA:
        for number, scheme in enumerate(SCHEMES.values()):
            recipe = PaperRun(corpus, "S", scheme)
            write_paper_run(root / "runs" / recipe.name, recipe, quality=0.02 * number + 0.3 * (corpus > "g"))
    assert main(["report", str(root / "runs"), "--out", str(root / "report")]) == 0
    return root


class TestBothCorpora:
    def test_each_corpus_has_its_own_tables(self, both):
        for corpus in CORPORA:
            rows = {c["row"] for c in cells(both / "report") if c["table"] == f"losses-{corpus}-gpt2"}
            assert rows == {"pre-ln", "proj-spheretnorm (exact_clamp=true)"}
        assert {c["table"] for c in cells(both / "report")} & {"losses", "settings"} == set()

    def test_the_paper_stands_beside_both(self, both):
        for corpus in CORPORA:
            for row, scheme in SCHEMES.items():
                here = cell(both / "report", f"paper-loss-{corpus}", row, "S val, here")
                assert here["source"] == f"{corpus}-S-{scheme}.val_loss"
                # no mark: the run follows the recipe
                assert re.fullmatch(r"\d\.\d{3}", here["text"])
        assert "settings that differ from the paper's" not in (both / "report" / "report.html").read_text()

    def test_one_corpus_prepared_in_two_ways(self, tmp_path):
        write_run(tmp_path / "a", data="a" * 64)
        write_run(tmp_path / "b", data="b" * 64)
        names = [group.name for group in read_groups([tmp_path])]
        assert names == ["sotu, bytes, manifest aaaaaaaaaaaa", "sotu, bytes, manifest bbbbbbbbbbbb"]


@pytest.mark.slow
class TestSizes:
    def test_each_of_the_papers_sizes_has_its_own_tables(self, tmp_path):
        for size in "SML":
            for scheme in SCHEMES.values():
                recipe = PaperRun("openwebtext", size, scheme)
                write_paper_run(tmp_path / "runs" / recipe.name, recipe)
        groups = read_groups([tmp_path / "runs"])
        assert [group.name for group in groups] == [f"openwebtext, gpt2, size {size}" for size in "SML"]
        for group in groups:
            # learning rates differ between sizes only, so no label needs them
            assert set(group.contestants) == {"pre-ln", "proj-spheretnorm (exact_clamp=true)"}
            assert group.differing == []
        write_tables([tmp_path / "runs"], tmp_path / "report")
        for size in "SML":
            here = cell(tmp_path / "report", "paper-loss-openwebtext", "Pre-LN", f"{size} val, here")
            assert here["source"] == f"openwebtext-{size}-pre-ln.val_loss"


class TestCells:
    def tables(self, tmp_path):
        write_tables([tmp_path / "runs"], tmp_path / "report")
        return tmp_path / "report"

    def test_no_run_of_the_papers_size(self, tmp_path):
        write_run(tmp_path / "runs" / "a", "geonorm")
        directory = self.tables(tmp_path)
        table = [c for c in cells(directory) if c["table"].startswith("paper-")]
        assert {c["text"] for c in table if c["column"].endswith("here")} == {"not run"}
        assert len([c for c in table if c["column"].endswith("paper")]) == 8 * (12 + 2 * 13)
        page = html.unescape((directory / "report.html").read_text())
        assert all(note in page for note in FOOTNOTES)

    def test_a_departure_is_marked_and_named_in_every_table(self, tmp_path):
        write_paper_run(tmp_path / "runs" / "a", PaperRun("openwebtext", "L", "keel"), warmup=0, clip=100.0)
        write_evaluation(tmp_path / "runs" / "a", 7, step=50_000)
        directory = self.tables(tmp_path)
        for table, column in (
            ("paper-loss-openwebtext", "L train, here"), ("paper-loss-openwebtext", "L val, here"),
            ("paper-zero-shot-openwebtext", "BoolQ acc, here"), ("paper-zero-shot-openwebtext", "average acc, here"),
        ):  # fmt: skip
            assert cell(directory, table, "Keel", column)["text"].endswith(" *"), table
        words = (
            "The run of Keel, OpenWebText L, has settings that differ from the paper's: "
            "warmup 0 instead of 2000; clip 100.0 instead of 1.0."
        )
        for file in ("tables.md", "report.html"):
            text = html.unescape((directory / file).read_text()).replace("\\_", "_")
            assert text.count(words) == 2, file

    def test_of_two_runs_the_one_that_departs_least_is_shown(self, tmp_path):
        recipe = PaperRun("openwebtext", "S", "keel")
        write_paper_run(tmp_path / "runs" / "a", recipe, clip=2.0, warmup=5)
        write_paper_run(tmp_path / "runs" / "b", recipe, quality=1.0, clip=3.0)
        directory = self.tables(tmp_path)
        here = cell(directory, "paper-loss-openwebtext", "Keel", "S val, here")
        assert here["source"] == "b.val_loss"

    @pytest.mark.slow
    def test_another_reading_has_a_row_of_its_own(self, tmp_path):
        other = "shifted-head"
        for reading in (None, other):
            recipe = PaperRun("fineweb-edu", "L", "proj-spheretnorm", reading=reading)
            write_paper_run(tmp_path / "runs" / recipe.name, recipe)
        directory = self.tables(tmp_path)
        rows = ("1-SpheretNorm", f"1-SpheretNorm, {other}")
        sources = [cell(directory, "paper-loss-fineweb-edu", row, "L val, here")["source"] for row in rows]
        assert [other in source for source in sources] == [False, True]
        rows = [c["row"] for c in cells(directory) if c["table"] == "paper-zero-shot-fineweb-edu"]
        assert f"1-SpheretNorm, {other}" in rows
        assert not [c for c in cells(directory) if c["table"].endswith("openwebtext") and other in c["row"]]
        page = html.unescape((directory / "report.html").read_text())
        assert f"Rows that end in {other} follow a different reading of the paper." in page
        # neither run departs from its recipe
        assert "settings that differ from the paper's" not in page


class TestZeroShot:
    @pytest.fixture(scope="class")
    def evaluated(self, tmp_path_factory):
        """Three runs of size L: evaluated in full, on some documents, and at an earlier step."""
        root = tmp_path_factory.mktemp("evaluated")
        for scheme, changes in (
            ("proj-spheretnorm", {}), ("pre-ln", {"limit": 100}), ("keel", {"step": 40_000, "limit": 5}),
        ):  # fmt: skip
            path = write_paper_run(root / "runs" / scheme, PaperRun("openwebtext", "L", scheme))
            write_evaluation(path, 7, **{"step": 50_000, **changes})
        write_tables([root / "runs"], root / "report")
        return root / "report"

    def test_every_column_is_there(self, evaluated):
        table = "paper-zero-shot-openwebtext"
        assert cell(evaluated, table, "1-SpheretNorm", "BoolQ acc, paper")["text"] == "61.04"
        for column in PAPER_COLUMNS:
            here = cell(evaluated, table, "1-SpheretNorm", f"{column.heading}, here")
            assert here["source"] == f"proj-spheretnorm/eval.json tasks.{column.task}.metrics.{column.metric}"
            assert here["text"] == "70.00" or not column.higher_is_better

    def test_the_average_is_a_column(self, evaluated):
        for corpus, average in (("openwebtext", "45.32"), ("fineweb-edu", "48.55")):
            paper = cell(evaluated, f"paper-zero-shot-{corpus}", "1-SpheretNorm", "average acc, paper")
            assert paper["text"] == average
        here = cell(evaluated, "paper-zero-shot-openwebtext", "1-SpheretNorm", "average acc, here")
        assert (here["text"], float(here["value"])) == ("70.00", pytest.approx(70.0))

    @pytest.mark.parametrize(("row", "mark"), [("Pre-LN", " (limit 100)"), ("Keel", " (limit 5, step 40000)")])
    def test_a_limit_and_an_earlier_step_are_marked_in_every_cell(self, evaluated, row, mark):
        here = [
            c["text"] for c in cells(evaluated)
            if (c["table"], c["row"]) == ("paper-zero-shot-openwebtext", row) and c["column"].endswith("here")
        ]  # fmt: skip
        assert len(here) == 13
        assert all(text.endswith(mark) for text in here)
