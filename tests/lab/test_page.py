"""What the page of runs adds to the tables: charts, samples, links, and what differs."""

import json
import re
import shutil
from html import unescape

import pytest
from report_helpers import cell, cells, read_group, write_run, write_tables

from spheret.lab.figures.lines import MOST_POINTS
from spheret.lab.page.page import FOLDER, page
from spheret.lab.report import charts_of, report_files, run_findings
from spheret.lab.runs import read_groups
from spheret.lab.statistics import mean_and_deviation
from spheret.lab.words import answer_sentence
from spheret.support.figure_style import PALETTE, Drawing

# the figure of the validation losses
CURVES = "sotu-bytes-curves"
SCHEMES = {"pre-ln": 0.0, "post-ln": 0.001, "keel": 0.6, "proj-spheretnorm": 0.9}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Four schemes with three seeds each, and a fifth that diverged."""
    root = tmp_path_factory.mktemp("page")
    for name, quality in SCHEMES.items():
        for seed in (1, 2, 3):
            write_run(root / "runs" / f"{name}-{seed}", name, seed, quality=quality, sample=f"{name} says")
    write_run(root / "runs" / "geonorm-1", "geonorm", 1, quality=2.0, diverged=45)
    write_tables([root / "runs"], root / "report")
    return root


@pytest.fixture(scope="module")
def group(seeds):
    return read_group([seeds / "runs"])


def charts(group):
    return charts_of(run_findings([group]))


def text_of(root):
    return unescape((root / "report" / "report.html").read_text())


class TestOrder:
    def test_the_lowest_loss_first_and_what_diverged_last(self, seeds, group):
        order = list(group.contestants)
        assert order[:2] == ["proj-spheretnorm", "keel"]
        assert order[-1] == "geonorm"
        for table in ("losses-sotu-bytes", "results", "stream"):
            assert list(dict.fromkeys(c["row"] for c in cells(seeds / "report") if c["table"] == table)) == order
        assert [series["label"] for series in charts(group)[CURVES]["series"]] == order

    def test_unfinished_ones_follow_those_with_a_loss(self, tmp_path):
        write_run(tmp_path / "a", "pre-ln", until=45, quality=1.0)
        write_run(tmp_path / "b", "keel", diverged=20)
        write_run(tmp_path / "c", "post-ln")
        assert list(read_group([tmp_path]).contestants) == ["post-ln", "pre-ln", "keel"]


class TestCharts:
    def test_the_last_value_is_that_of_the_table(self, seeds, group):
        for series in charts(group)[CURVES]["series"][:-1]:
            (line,) = series["lines"]
            shown = cell(seeds / "report", "results", series["label"], "val loss")["text"]
            assert f"{line['y'][-1]:.3f}" == shown.split()[0]
            assert line["low"][-1] <= line["y"][-1] <= line["high"][-1]

    def test_lines_have_the_colours_and_dashes_of_the_figures(self, group):
        for series in charts(group)[CURVES]["series"]:
            assert 0 <= series["colour"] < len(PALETTE)
            assert all(length > 0 for length in series["dash"])

    def test_a_diverged_run_ends_where_it_diverged(self, group):
        chart = charts(group)["training"]
        (last,) = [series for series in chart["series"] if series["diverged"]]
        (line,) = last["lines"]
        assert chart["xs"][line["x"]][-1] == 44
        # it does not set the scale
        assert chart["range"][0] > 1.0

    def test_long_runs_are_averaged_to_what_a_screen_shows(self, tmp_path):
        write_run(tmp_path / "a", steps=2 * MOST_POINTS + 100, eval_every=400)
        chart = charts(read_group([tmp_path]))["training"]
        (line,) = chart["series"][0]["lines"]
        assert len(line["y"]) <= MOST_POINTS
        assert "each point the mean of 3 steps" in chart["y"]
        losses = [json.loads(text)["loss"] for text in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
        assert line["y"][0] == pytest.approx(mean_and_deviation(losses[:3])[0], abs=0.0006)
        assert chart["xs"][line["x"]][0] == 3

    def test_without_a_second_point_there_is_no_chart(self, tmp_path):
        write_run(tmp_path / "a", until=1)
        assert charts(read_group([tmp_path])) == {}

    def test_seeds_that_end_at_different_steps_are_lines_of_their_own(self, tmp_path):
        write_run(tmp_path / "a", seed=1)
        write_run(tmp_path / "b", seed=2, until=45)
        lines = charts(read_group([tmp_path]))["training"]["series"][0]["lines"]
        assert [set(line) for line in lines] == [{"x", "y"}] * 2

    def test_the_library_is_in_the_page_once_and_only_with_a_chart(self, group):
        drawing = Drawing(CURVES, "caption", '<svg width="1pt" height="1pt"></svg>', b"")
        with_chart = report_files(run_findings([group]), [drawing])["report.html"].decode()
        library = (FOLDER / "vendor" / "uPlot.iife.min.js").read_text()
        assert with_chart.count(library) == 1
        assert library not in page("t", [], [])
        policy = re.search(r"Content-Security-Policy\"\s+content=\"([^\"]*)\"", with_chart).group(1)
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert policy.count("sha256-") == 3
        assert "unsafe-inline" not in policy.split("style-src")[0]


class TestVerdict:
    def test_it_is_the_first_paragraph(self, seeds, group):
        page = text_of(seeds)
        sentence = answer_sentence(group.answer)
        assert group.answer.standing.winner == "proj-spheretnorm"
        assert page.index(sentence) < page.index("<table")
        # who failed is part of it
        assert sentence.endswith("geonorm at 0.003.")
        assert f"{group.answer.seen:.3f}" in page

    def test_one_seed_has_no_p(self, seeds, tmp_path):
        write_tables(sorted((seeds / "runs").glob("*-1")), tmp_path / "report")
        columns = {c["column"] for c in cells(tmp_path / "report") if c["table"] == "losses-sotu-bytes"}
        assert "minus pre-ln" in columns
        assert columns.isdisjoint({"p", "95% interval"})
        assert "wins" not in text_of(tmp_path)


class TestSamples:
    def test_each_contestant_has_its_own(self, seeds):
        page = text_of(seeds)
        quotes = re.findall(r"<blockquote>(.*?)</blockquote>", page)
        assert quotes == ["proj-spheretnorm says", "keel says", *quotes[2:]]
        assert sorted(quotes) == sorted(f"{name} says" for name in SCHEMES)
        assert "no prompt, 128 tokens, temperature 0.8, seed 1337" in page
        assert 'title="keel-1/sample.json[text]"' in page

    def test_without_samples_there_is_no_section(self, tmp_path):
        write_run(tmp_path / "a")
        write_tables([tmp_path / "a"], tmp_path / "report")
        assert 'id="samples"' not in text_of(tmp_path)

    def test_it_is_text_of_the_last_step(self, tmp_path):
        run = write_run(tmp_path / "a", sample="<script>\x00\x1b[2J\nline")
        write_tables([run], tmp_path / "report")
        raw = (tmp_path / "report" / "report.html").read_text()
        assert "&lt;script&gt;\ufffd\ufffd[2J\nline" in raw
        sample = json.loads((run / "sample.json").read_text())
        (run / "sample.json").write_text(json.dumps({**sample, "step": 40}))
        write_tables([run], tmp_path / "report")
        assert 'id="samples"' not in text_of(tmp_path)


class TestLinks:
    def hrefs(self, root, out):
        files = report_files(run_findings(read_groups([root / "runs"])), [], out)
        found = re.findall(r'<a href="([^"#]*)"', files["report.html"].decode())
        return files, sorted(set(found))

    def test_runs_beside_the_report_are_linked(self, tmp_path):
        run = write_run(tmp_path / "runs" / "a b&c", "pre-ln")
        write_run(tmp_path / "runs" / "d", "keel")
        (tmp_path / "runs" / "d.log").write_text("it failed\n")
        files, links = self.hrefs(tmp_path, tmp_path / "report")
        assert links == [
            "../runs/a%20b%26c/",
            "../runs/a%20b%26c/config.json",
            "../runs/a%20b%26c/metrics.jsonl",
            "../runs/d.log",
            "../runs/d/",
            "../runs/d/config.json",
        ]
        assert run.is_dir()
        # moved together, the page is the same
        shutil.copytree(tmp_path / "runs", tmp_path / "moved" / "runs")
        assert self.hrefs(tmp_path / "moved", tmp_path / "moved" / "out")[0] == files

    def test_runs_elsewhere_are_not(self, tmp_path):
        write_run(tmp_path / "far" / "runs" / "a")
        shutil.copytree(tmp_path / "far", tmp_path / "farther")
        files, links = self.hrefs(tmp_path / "far", tmp_path / "some" / "report")
        assert links == []
        # and the page does not depend on where they are
        assert self.hrefs(tmp_path / "farther", tmp_path / "other" / "report")[0] == files


def test_what_differs_between_the_contestants(tmp_path):
    write_run(tmp_path / "a", "pre-ln")
    write_run(tmp_path / "b", "keel")
    write_run(tmp_path / "c", "proj-spheretnorm")
    write_run(tmp_path / "d", "proj-spheretnorm", options={"schedule": "constant"})
    write_tables([tmp_path / name for name in "abcd"], tmp_path / "report")
    table = {(c["row"], c["column"]): c["text"] for c in cells(tmp_path / "report") if c["table"] == "contestants"}
    assert {column for _, column in table} == {"norm", "schedule"}
    assert table["pre-ln", "norm"] == "layernorm"
    assert table["keel", "norm"] == "rmsnorm"
    assert table["pre-ln", "schedule"] == "-"
    assert table["proj-spheretnorm", "schedule"] == "sqrt"
    assert table["proj-spheretnorm (schedule=constant)", "schedule"] == "constant"


def test_the_papers_tables_are_folded_until_something_was_run_beside_them(seeds):
    raw = (seeds / "report" / "report.html").read_text()
    assert re.search(r'<section id="paper">\s*<details>', raw)
