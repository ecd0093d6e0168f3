"""A page on a run that diverged: the step, the sublayer, and what happened. The runs really diverge."""

import json

import pytest
from report_helpers import read_group

from spheret.cli import main
from spheret.lab.report import run_findings, sections_of
from spheret.observe.inspect.command import failure_of
from spheret.runs.run import open_run

TINY = ["--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """One run that ends at a finite loss near 70, and one whose second update is not finite."""
    root = tmp_path_factory.mktemp("hot")
    for name, rate, code in (("finite", "6", 0), ("infinite", "1e30", 3)):
        words = ["--scheme", "pre-ln", "--data", str(prepared), "--steps", "16", "--lr", rate]
        words += ["--set", f"train.min_lr={rate}"]
        quiet = ["--eval-every", "0", "--quiet", "--out", str(root / name)]
        assert main(["train", *words, *TINY, *quiet]) == code
    return root


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_names_the_step_and_the_sublayer(runs):
    for name, what in (("finite", "diverged"), ("infinite", "not finite")):
        found = failure_of(open_run(runs / name))
        (line,) = (line for line in lines_of(runs / name) if "events" in line)
        (event,) = line["events"]
        assert (found.kind, found.step) == (what, line["step"])
        assert found.sentence == event["sentence"]
        # the sublayer that the judge named, with its block
        assert found.where in event["sentence"]
        assert found.where.startswith("sublayer ")
        assert found.remedy


def test_the_page_says_why(runs):
    for name in ("finite", "infinite"):
        every = sections_of(run_findings([read_group([runs / name])]))
        ((row,),) = (table.rows for each in every if each.name == "failures" for table in each.tables)
        event = failure_of(open_run(runs / name))
        texts = [cell.text for cell in row]
        assert texts[0] == name
        assert texts[-1].startswith(f"step {event.step}: {event.sentence}")
