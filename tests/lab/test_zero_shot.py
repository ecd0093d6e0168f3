"""The section on zero-shot evaluations, from the files that spheret eval writes."""

import pytest
from report_helpers import write_evaluation, write_run, write_tables


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, name) for name in ("pre-ln", "proj-spheretnorm")]


def test_there_is_no_section_without_its_files(runs, tmp_path):
    write_tables(runs, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert 'id="zero-shot"' not in page
    assert 'id="certificates"' not in page


class TestZeroShot:
    def test_tables(self, runs, tmp_path):
        write_evaluation(runs[0], 4)
        write_evaluation(runs[1], 7)
        write_tables(runs, tmp_path / "report")
        table = (tmp_path / "report" / "tables.csv").read_text()
        assert "zero-shot,pre-ln,BoolQ acc,40.00 \u00b1 " in table
        assert "zero-shot,proj-spheretnorm,average accuracy,70.00" in table
        assert "proj-spheretnorm/eval.json tasks.boolq.metrics.acc" in table
        assert "zero-shot-comparisons,BoolQ acc: proj-spheretnorm - pre-ln,difference,+30.00" in table

    def test_a_limit_and_a_step_are_said(self, runs, tmp_path):
        write_evaluation(runs[0], 4, step=40, limit=100)
        write_evaluation(runs[1], 7)
        write_tables(runs, tmp_path / "report")
        text = (tmp_path / "report" / "tables.md").read_text()
        assert "pre-ln was evaluated with limit 100, step 40." in text
        assert "proj-spheretnorm was evaluated with" not in text
