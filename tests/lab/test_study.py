"""A study: real trainings in child processes, killed, continued, shared between parts, and reported at any moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drill import timeless
from planted import planted

from spheret.cli import main
from spheret.lab.rows import read_rows
from spheret.runs.run import open_run

# small, hot and short: a run takes as long as its process needs to start
PLAN = """
title = "A trial"
[model]
layers = 1
heads = 2
width = 16
block = 16
[train]
steps = 12
batch_size = 2
[evaluation]
eval_every = 4
eval_windows = 8
[[parts]]
name = "two"
contestants = ["pre-ln", "proj-spheretnorm:schedule=sqrt"]
rates = [1e-2, 1e-1]
seeds = 2
extend = 0
# the same scheme under its plain name: its runs are those of the part above
[[parts]]
name = "again"
contestants = ["proj-spheretnorm"]
rates = [1e-2, 1e-1]
seeds = 0
extend = 0
"""


def study(*arguments):
    return main(["study", *map(str, arguments)])


def results(out):
    """What every run gave, without the cost of a step, which a busy machine leaves out."""
    return {key: row.result for key, row in read_rows(out / "results.jsonl").items()}


def lines(path):
    """What the runs of a study say, apart from what the clock says."""
    return {run.name: timeless(open_run(run).metrics()) for run in sorted((path / "runs").iterdir())}


@pytest.fixture(scope="module")
def plan(tmp_path_factory, prepared):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(f'{PLAN}\n[data]\npath = "{prepared}"\n')
    return path


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    with planted(out.parent / "corpus"):
        assert study(plan, "--out", out, "--quiet") == 0
    return out


def test_two_parts_share_their_runs(finished):
    rows = read_rows(finished / "results.jsonl")
    assert len(rows) == 6
    shared = [row for row in rows.values() if row.contestant.startswith("proj")]
    assert len({row.run for row in shared}) == 2
    assert len({(row.rate, row.val_loss) for row in shared}) == 2


def test_a_second_time_it_costs_nothing(finished, plan, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("*")}
    rows = results(finished)
    assert study(plan, "--out", finished) == 0
    assert {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("*")} == before
    assert results(finished) == rows
    printed = capsys.readouterr()
    # before it starts it says what there is to do
    assert "6 runs are done" in printed.err
    # with two rates no best one is bracketed
    page = str(finished / "report" / "report.html")
    assert page in printed.out.splitlines()
    assert "no winner" in printed.out
    assert study(plan, "--out", finished, "--quiet") == 0
    assert capsys.readouterr().out.splitlines() == [page]


def test_rows_that_a_plan_no_longer_asks_for_are_kept(finished, plan, tmp_path):
    out, shorter = tmp_path / "out", tmp_path / "shorter.toml"
    shutil.copytree(finished, out)
    text = plan.read_text()
    shorter.write_text(text[: text.index("# the same scheme")] + text[text.index("[data]") :])
    assert study(shorter, "--out", out, "--quiet") == 0
    assert (out / "results.jsonl").read_bytes() == (finished / "results.jsonl").read_bytes()


def test_a_changed_plan_is_refused_before_anything_is_trained(finished, plan, tmp_path, capsys):
    """Also if the study was stopped before it wrote its rows."""
    out, changed = tmp_path / "out", tmp_path / "changed.toml"
    shutil.copytree(finished, out)
    (out / "results.jsonl").unlink()
    changed.write_text(plan.read_text().replace("steps = 12", "steps = 13"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert study(changed, "--out", out, "--quiet") == 2
    assert str(out / "plan.toml") in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["configs", "report/figures", "results.jsonl"])
def test_nothing_is_written_through_a_link(name, finished, plan, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(finished, out)
    if (out / name).is_dir():
        shutil.rmtree(out / name)
    (out / name).unlink(missing_ok=True)
    other.mkdir()
    (out / name).symlink_to(other)
    assert study(plan, "--out", out, "--quiet") == 2
    assert str(out / name) in capsys.readouterr().err
    assert not any(other.iterdir())


class TestOnlyAReport:
    """--minutes 0 writes a report, and never results.jsonl."""

    def pages(self, folder):
        return {path.name: path.read_bytes() for path in (folder / "report").rglob("*") if path.is_file()}

    @pytest.mark.parametrize("case", ["joined rows", "no runs", "another plan"])
    def test_it_leaves_the_rows(self, case, finished, plan, tmp_path, capsys):
        out, words = tmp_path / "out", [plan]
        shutil.copytree(finished, out)
        rows = (out / "results.jsonl").read_bytes()
        if case == "joined rows":
            shutil.move(out / "results.jsonl", tmp_path / "joined.jsonl")
            (out / "results.jsonl").write_bytes(rows := rows.splitlines(keepends=True)[0])
            words += ["--join", tmp_path / "joined.jsonl"]
        if case == "another plan":
            words = [tmp_path / "other.toml"]
            words[0].write_text(plan.read_text().replace("steps = 12", "steps = 13"))
        else:
            shutil.rmtree(out / "runs")
        shutil.rmtree(out / "report")
        assert study(*words, "--out", out, "--minutes", "0", "--quiet") == 0
        assert (out / "results.jsonl").read_bytes() == rows
        # what the file held, or what was joined, counts as done
        assert (self.pages(out) == self.pages(finished)) == (case != "another plan")


def changed(path, **fields):
    """The first row of a file with other values."""
    first, *others = path.read_text().splitlines()
    return "\n".join([json.dumps({**json.loads(first), **fields}), *others]) + "\n"


def test_joined_rows_that_contradict_the_own_ones_are_refused(finished, plan, tmp_path, capsys):
    out, joined = tmp_path / "out", tmp_path / "joined.jsonl"
    shutil.copytree(finished, out)
    joined.write_text(changed(finished / "results.jsonl", val_loss=0.5))
    assert study(plan, "--out", out, "--join", joined, "--quiet") == 2
    assert "0.5" in capsys.readouterr().err
    # another processor may give other bits: the own row counts
    joined.write_text(changed(finished / "results.jsonl", val_loss=0.5, processor="another"))
    assert study(plan, "--out", out, "--join", joined, "--quiet", "--minutes", "0") == 0


def start(plan, out):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    words = [sys.executable, "-m", "spheret", "study", str(plan), "--out", str(out), "--jobs", "1"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_it_goes_on(number, finished, plan, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    # one is still to be trained
    missing = sorted((out / "runs").iterdir())[0]
    shutil.rmtree(missing)
    (out / "results.jsonl").unlink()
    process = start(plan, out)
    deadline = time.monotonic() + 60
    while not list((out / "logs").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # somewhere between the start of the training and its end
    time.sleep(1.5)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert study(plan, "--out", out, "--quiet") == 0
    assert lines(out) == lines(finished)
    assert not list((out / "logs").iterdir())
