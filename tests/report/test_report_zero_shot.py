"""The section on zero-shot evaluations, from the files that spheret eval writes."""

import json

import pytest
from report_helpers import write_run, write_tables

from spheret.evaluate import eval_json
from spheret.evaluate.tasks import PAPER_COLUMNS
from spheret.runs.layout import EVAL, EVAL_SAMPLES


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, name) for name in ("pre-ln", "proj-spheretnorm")]


def test_there_is_no_section_without_its_files(runs, tmp_path):
    write_tables(runs, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert 'id="zero-shot"' not in page
    assert 'id="certificates"' not in page


class TestZeroShot:
    def evaluate(self, run, right):
        """Write the files of spheret eval: the summary, and one line per document and task."""
        lines, tasks = [], {}
        for _, task, metric in PAPER_COLUMNS:
            values = [float(i < right) if eval_json.is_accuracy(metric) else -2.0 - 0.01 * i for i in range(10)]
            if metric == "word_perplexity":
                values = [[10 * value, 10] for value in values]
            counts = {"requests": 20, "truncated": 0, "documents": 10}
            hashes = {"version": 1, "hash": "a" * 64, "data_sha256": None}
            entry = tasks.setdefault(task, {**counts, **hashes, "metrics": {}})
            entry["metrics"][metric] = eval_json.summary(metric, values)
            lines += [(task, i, metric, value) for i, value in enumerate(values)]
        merged = {}
        for task, document, metric, value in lines:
            merged.setdefault((task, document), {})[metric] = value
        document = {
            "format": "spheret-eval", "version": 1, "run": run.name, "step": 60, "limit": None,
            "precision": "float32", "device": "cpu", "batch_size": "auto", "seconds": 1.5, "versions": {},
            "tasks": tasks, "requests": 20 * len(tasks), "truncated": 0,
        }  # fmt: skip
        (run / EVAL).write_text(json.dumps(document))
        (run / EVAL_SAMPLES).write_text(
            "".join(
                json.dumps({"task": task, "document": i, "hash": f"h{i}", "metrics": metrics, "responses": []}) + "\n"
                for (task, i), metrics in merged.items()
            )
        )

    def test_tables(self, runs, tmp_path):
        self.evaluate(runs[0], 4)
        self.evaluate(runs[1], 7)
        write_tables(runs, tmp_path / "report")
        table = (tmp_path / "report" / "tables.csv").read_text()
        assert "zero-shot,pre-ln,BoolQ acc,40.00 \u00b1 " in table
        assert "zero-shot,proj-spheretnorm,average accuracy,70.00" in table
        assert "proj-spheretnorm/eval.json tasks.boolq.metrics.acc" in table
        assert "zero-shot-comparisons,BoolQ acc: pre-ln - proj-spheretnorm,difference,-30.00" in table

    def test_comparison_with_the_paper(self, runs, tmp_path):
        config = json.loads((runs[1] / "config.json").read_text())
        config["data"]["corpus"]["name"] = "openwebtext"
        config["model"] |= {"layers": 36, "heads": 20, "width": 1280}
        (runs[1] / "config.json").write_text(json.dumps(config))
        self.evaluate(runs[1], 7)
        write_tables(runs[1:], tmp_path / "report")
        table = (tmp_path / "report" / "tables.csv").read_text()
        assert 'paper-zero-shot-openwebtext,1-SpheretNorm,"BoolQ acc, here",70.00' in table
        assert 'paper-zero-shot-openwebtext,1-SpheretNorm,"BoolQ acc, paper",61.04' in table
