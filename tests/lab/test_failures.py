"""A page on a run that diverged: the step, the sublayer, and what to try. The runs really diverge."""

import json

import pytest
from report_helpers import read_group, write_run

from spheret.analysis.failure import failure_of
from spheret.analysis.inspect import inspect_command
from spheret.cli import main
from spheret.lab.report import run_findings, sections_of
from spheret.runs.run import open_run

TINY = ["--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """One run that ends at a finite loss near 70, and one whose second update is not finite."""
    root = tmp_path_factory.mktemp("hot")
    for name, rate, code in (("finite", "6", 0), ("infinite", "1e30", 3)):
        words = ["--scheme", "pre-ln", "--data", str(prepared), "--steps", "16", "--lr", rate, "--min-lr", rate]
        quiet = ["--eval-every", "0", "--no-tensorboard", "--quiet", "--out", str(root / name)]
        assert main(["train", *words, *TINY, *quiet]) == code
    return root


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_names_the_step_and_the_sublayer(runs):
    for name, what, key in (("finite", "diverged", "diverged"), ("infinite", "not finite", "stopped")):
        failure = failure_of(open_run(runs / name))
        (line,) = (line for line in lines_of(runs / name) if key in line)
        assert (failure.what, failure.step) == (what, line["step"])
        assert failure.reason == line[key]
        # the sublayer that the guard named, with its block
        assert failure.place in line[key]
        assert failure.place.startswith("sublayer ")
        assert failure.lowest == (1, lines_of(runs / name)[0]["loss"])
        assert [each.flags for each in failure.advice][:2] == ["--lr 0.001", "--warmup 8"]


def failures_of(path):
    """The section on failures of the page of a run."""
    (section,) = (each for each in sections_of(run_findings([read_group([path])])) if each.name == "failures")
    return section


def test_the_page_says_what_to_try(runs):
    for name in ("finite", "infinite"):
        section = failures_of(runs / name)
        ((row,),) = (table.rows for table in section.tables)
        cells = dict(zip(section.tables[0].columns, (cell.text for cell in row), strict=True))
        failure = failure_of(open_run(runs / name))
        assert (cells["run"], cells["state"]) == (name, "diverged")
        assert cells["why"].startswith(f"step {failure.step}: {failure.reason}")
        text = " ".join(section.paragraphs)
        assert failure.sentence in text
        assert failure.what_to_try in text
        assert "--lr 0.001" in text


def test_inspect_says_it_too(runs, tmp_path, capsys):
    assert inspect_command(str(runs / "finite"), windows=1, out=str(tmp_path)) == 0
    assert failure_of(open_run(runs / "finite")).what_to_try in capsys.readouterr().out.replace("\n", " ")


def advice(tmp_path, event, key="diverged", scheme="pre-ln", **more):
    path = write_run(tmp_path / "run", scheme, steps=6, **more)
    lines = lines_of(path)
    lines[-1] |= {key: "what the guard wrote", **({"events": [event]} if event else {})}
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
    assert advice(tmp_path / "f", collapsed, "alarm", model={"head_bias": "none"}) == [head, bias, "--lr 0.001"]
    assert advice(tmp_path / "g", collapsed, "alarm", train={"warmup": 2, "clip": 5}) == [
        head,
        "--warmup 3",
        "--lr 0.001",
        "--clip 1",
    ]
    assert failure_of(open_run(tmp_path / "f" / "run")).place == "sublayer 3 (attention of block 2)"
    # a run of an older version has the sentence alone
    assert "--lr 0.001" in advice(tmp_path / "h", None)
    assert failure_of(open_run(tmp_path / "h" / "run")).place == "not recorded"


def test_a_good_run_has_nothing_to_try(tmp_path):
    write_run(tmp_path / "run", steps=6, quality=3.0)
    section = failures_of(tmp_path)
    assert (len(section.paragraphs), section.tables) == (1, ())
