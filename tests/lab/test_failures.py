"""A page on a run that diverged: the step, the sublayer, and what to try. The runs really diverge."""

import json

import pytest
from report_helpers import read_group, write_run

from spheret.cli import main
from spheret.lab.report import run_findings, sections_of
from spheret.observe.inspect.failure import failure_of
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
        failure = failure_of(open_run(runs / name))
        (line,) = (line for line in lines_of(runs / name) if "events" in line)
        (event,) = line["events"]
        assert (failure.event.kind, failure.event.step) == (what, line["step"])
        assert failure.event.sentence == event["sentence"]
        # the sublayer that the judge named, with its block
        assert failure.event.where in event["sentence"]
        assert failure.event.where.startswith("sublayer ")
        assert failure.lowest == (1, lines_of(runs / name)[0]["loss"])
        assert [each.flags for each in failure.advice][:2] == ["--lr 0.001", "--warmup 8"]


def test_the_page_says_why(runs):
    for name in ("finite", "infinite"):
        every = sections_of(run_findings([read_group([runs / name])]))
        ((row,),) = (table.rows for each in every if each.name == "failures" for table in each.tables)
        event = failure_of(open_run(runs / name)).event
        texts = [cell.text for cell in row]
        assert texts[0] == name
        assert texts[-1].startswith(f"step {event.step}: {event.sentence}")


def advice(tmp_path, event, scheme="pre-ln", **more):
    path = write_run(tmp_path / "run", scheme, steps=6, **more)
    lines = lines_of(path)
    lines[-1]["events"] = [{"step": 6, "where": "sublayer 3", "sentence": "what the judge wrote", **event}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [each.flags for each in failure_of(open_run(path)).advice]


def test_advice_follows_what_the_guard_saw(tmp_path):
    moved = {"kind": "diverged", "sublayer": 3, "since": 2}
    turned = {**moved, "measured": "angle", "before": 0.1}
    longer = {**moved, "measured": "norm factor", "before": 1.1, "now": 40.0}
    collapsed = {"kind": "collapsed", "sublayer": 3, "measured": "cosine", "now": 1.0}
    cap, sphere = "--set max_angle=0.5", "--scheme proj-spheretnorm"
    head, bias = "--head shifted", "--head-bias unigram"
    assert cap in advice(tmp_path / "a", {**turned, "now": 1.4}, scheme="proj-spheretnorm")
    # it turns less, or has no cap
    assert cap not in advice(tmp_path / "b", {**turned, "now": 0.01}, scheme="proj-spheretnorm")
    assert cap not in advice(tmp_path / "c", {**turned, "now": 1.4})
    assert sphere in advice(tmp_path / "d", longer)
    assert sphere not in advice(tmp_path / "e", longer, scheme="proj-spheretnorm")
    assert advice(tmp_path / "f", collapsed, model={"head_bias": "none", "head": "tied"}) == [
        bias,
        head,
        "--lr 0.001",
    ]
    assert advice(tmp_path / "g", collapsed, model={"head": "tied"}, train={"warmup": 2, "clip": 5}) == [
        head,
        "--warmup 3",
        "--lr 0.001",
        "--set train.clip=1",
    ]
