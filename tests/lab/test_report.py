"""Reports: the same bytes each time, every number traced to lines of metrics, one clear sentence per error."""

import html
import json
import re
import shutil

import pytest
from report_helpers import cell, cells, read_group, write_run, write_tables

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES
from spheret.lab.page.page import FOLDER, page, payload
from spheret.lab.page.section import Section, Table, TableCell, to_markdown
from spheret.lab.report import report, run_findings, sections_of

# the corpus and the tokenizer of all runs, as file names have them
GROUP = "sotu-bytes"
LOSSES = f"losses-{GROUP}"
# the figure of the validation losses
CURVES = f"{GROUP}-curves"
SCHEMES = {"pre-ln": 0.0, "post-ln": 0.001, "keel": 0.6, "proj-spheretnorm": 0.9}


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    """The paper's nine schemes with one seed, one of them diverged: runs and report."""
    root = tmp_path_factory.mktemp("one-seed")
    for index, name in enumerate(PAPER_SCHEMES):
        write_run(root / "runs" / name, name, quality=0.02 * index, diverged=45 if name == "keel" else None, steps=60)
    report([root / "runs"], root / "report")
    return root


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Four schemes with three seeds each, and a fifth that diverged: runs and tables."""
    root = tmp_path_factory.mktemp("seeds")
    for name, quality in SCHEMES.items():
        for seed in (1, 2, 3):
            write_run(root / "runs" / f"{name}-{seed}", name, seed, quality=quality)
    write_run(root / "runs" / "geonorm-1", "geonorm", 1, quality=2.0, diverged=45)
    write_tables([root / "runs"], root / "report")
    return root


@pytest.fixture(scope="module")
def group(seeds):
    return read_group([seeds / "runs"])


def charts(group):
    return {chart.name: payload(chart) for each in sections_of(run_findings([group])) for chart in each.charts}


def contents_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_runs_give_the_same_files(one_seed, tmp_path):
    written = contents_of(one_seed / "report")
    # one seed has no means and no pairs, and one rate has no bowl
    assert written.keys() == {
        "report.html",
        "tables.md",
        "files.txt",
        f"figures/{CURVES}.svg",
        f"figures/{CURVES}.png",
    }
    # in another order; runs and report were moved together
    shutil.copytree(one_seed / "runs", tmp_path / "runs")
    report(sorted((tmp_path / "runs").iterdir(), reverse=True), tmp_path / "again")
    assert contents_of(tmp_path / "again") == written


class TestCharts:
    def test_the_last_value_is_that_of_the_table(self, seeds, group):
        for series in charts(group)[CURVES]["series"][:-1]:
            (line,) = series["lines"]
            shown = cell(seeds / "report", LOSSES, series["label"], "val loss")["value"]
            assert line["y"][-1] == pytest.approx(float(shown), abs=5.1e-4)
            assert line["low"][-1] <= line["y"][-1] <= line["high"][-1]

    def test_the_library_is_in_the_page_once_and_only_with_a_chart(self, group):
        with_chart = page("runs", sections_of(run_findings([group])))
        library = (FOLDER / "vendor" / "uPlot.iife.min.js").read_text()
        assert with_chart.count(library) == 1
        assert library not in page("t", [])
        policy = re.search(r"Content-Security-Policy\"\s+content=\"([^\"]*)\"", with_chart).group(1)
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert policy.count("sha256-") == 3
        assert "unsafe-inline" not in policy.split("style-src")[0]


class TestEveryNumberIsTraced:
    @pytest.mark.parametrize("fixture", ["one_seed", "seeds"])
    def test_to_lines_of_metrics(self, fixture, request):
        root = request.getfixturevalue(fixture)
        traced = 0
        for c in cells(root / "report"):
            if (c["table"], c["column"]) == (LOSSES, "val loss") and c["value"]:
                runs = re.findall(r"([^\s,(]+)\.val_loss", c["source"])
                files = [root / "runs" / name / "metrics.jsonl" for name in runs]
                losses = [json.loads(path.read_text().splitlines()[-1])["val_loss"] for path in files]
                assert float(c["value"]) == pytest.approx(sum(losses) / len(losses), rel=1e-12), c
                traced += len(runs)
            assert c["source"] or not c["value"], c
        assert traced >= 8


class TestBadInput:
    """Each case ends with one sentence and exit code 2."""

    def error(self, capsys, *arguments):
        assert main(["report", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("spheret report: ")
        assert captured.err.count("\n") == 1
        return captured.err

    def test_different_windows(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        path = write_run(tmp_path / "b", "keel") / "metrics.jsonl"
        *lines, last = path.read_text().splitlines()
        line = json.loads(last)
        line["val_documents"][0][1] += 1
        path.write_text("\n".join([*lines, json.dumps(line)]) + "\n")
        assert "validated on different windows" in self.error(capsys, tmp_path / "a", tmp_path / "b")

    def test_two_runs_of_one_contestant_and_seed(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        write_run(tmp_path / "b")
        error = self.error(capsys, tmp_path / "a", tmp_path / "b")
        assert "a and b are both pre-ln with seed 1337" in error
        # the same path twice is one run
        assert main(["report", str(tmp_path / "a"), str(tmp_path / "a"), "--out", str(tmp_path / "report")]) == 0


def test_an_unfinished_run_is_named(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", "keel", until=45, quality=1.0)
    write_tables([tmp_path / "a", tmp_path / "b"], tmp_path / "report")
    assert "b (step 45 of 60)" in (tmp_path / "report" / "report.html").read_text()


class TestStringsOfARun:
    NASTY = '<script>alert("x")</script>&amp;|`$\\frac{1}{2}$_%#{}^~*'

    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory):
        tmp_path, nasty = tmp_path_factory.mktemp("nasty"), self.NASTY
        write_run(
            tmp_path / "a<b>&c",
            alarm=nasty,
            environment={"command": nasty, "processor": nasty},
            train={"init_from": nasty},
        )
        write_run(tmp_path / "b", "proj-spheretnorm", train={"init_from": "x"})
        report([tmp_path / "a<b>&c", tmp_path / "b"], tmp_path / "report")
        return tmp_path / "report"

    def test_are_text_in_the_page(self, directory):
        text = (directory / "report.html").read_text()
        # the three scripts of every page, and the numbers of its charts
        assert text.count("<script") == 4
        data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL).group(1)
        assert not re.search("[<>&]", data)
        labels = {series["label"] for chart in json.loads(data).values() for series in chart["series"]}
        assert f"pre-ln, init_from={self.NASTY}" in labels
        assert self.NASTY not in text
        assert self.NASTY in html.unescape(text)
        assert (LOSSES, f"pre-ln, init_from={self.NASTY}") in {(c["table"], c["row"]) for c in cells(directory)}

    def test_are_text_in_markdown(self):
        table = Table("t", "c", ["n", "x"], [[TableCell(self.NASTY), TableCell("a\nb|c")]])
        markdown = to_markdown([table])
        assert "<script" not in markdown
        assert markdown.count("\n") == 5
        assert len(re.findall(r"(?<!\\)\|", markdown.splitlines()[-1])) == 3
        assert page("t", [Section("s", "s", [self.NASTY], [table])]).count("<script") == 1


def test_a_report_that_was_killed_half_way_is_written_again(tmp_path):
    run, out = write_run(tmp_path / "runs", "pre-ln"), tmp_path / "out"
    report([run], out)
    whole = contents_of(out)
    for name in whole.keys() - {"tables.md", "files.txt"}:
        (out / name).unlink()
    report([run], out)
    assert contents_of(out) == whole


@pytest.mark.parametrize("name", ["report.html", "figures/sotu-bytes-curves.svg"])
def test_files_that_are_not_ours_are_not_overwritten(name, tmp_path):
    run = write_run(tmp_path / "runs", "pre-ln")
    own = tmp_path / "out" / name
    own.parent.mkdir(parents=True)
    own.write_text("a user's")
    with pytest.raises(FileExistsError):
        report([run], tmp_path / "out")
    assert own.read_text() == "a user's"
    assert contents_of(tmp_path / "out").keys() == {name}


@pytest.mark.parametrize("damage", ["no config", "a dangling link", "a folder"])
def test_a_run_that_cannot_be_read_is_named(damage, tmp_path, capsys):
    for name in ("pre-ln", "keel"):
        write_run(tmp_path / "runs" / name, name, steps=20)
    config = tmp_path / "runs" / "keel" / "config.json"
    config.unlink()
    if damage == "a dangling link":
        config.symlink_to(tmp_path / "nowhere")
    if damage == "a folder":
        config.mkdir()
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    assert str(config.parent) in capsys.readouterr().err
