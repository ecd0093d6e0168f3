"""Runs that differ in their learning rate: each contestant at its best, its bowl, and no verdict at an edge."""

import json
import re
import shutil

import pytest
from report_helpers import cell, cells, recompute, write_run, write_tables

from spheret.lab.figures.runs import FIGURES
from spheret.lab.report import report
from spheret.lab.runs import read_group
from spheret.lab.sections.sections import ONE_SEED
from spheret.lab.verdicts import comparisons

RATES = (0.001, 0.002, 0.004)
# how much is subtracted from every loss, by rate
QUALITY = {"pre-ln": (0.0, 0.3, 0.1), "keel": (0.0, 0.1, 0.9), "proj-spheretnorm": (0.5, 0.8, -0.7)}
# the lowest loss first
CHOSEN = {"keel": 0.004, "proj-spheretnorm": 0.002, "pre-ln": 0.002}


def write_rate(path, rate, *arguments, **settings):
    return write_run(path, *arguments, steps=20, train={"lr": rate, "min_lr": rate / 10}, **settings)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Three schemes, three rates, three seeds. One has its best at an edge; one diverged once and collapsed."""
    root = tmp_path_factory.mktemp("rates")
    for name, qualities in QUALITY.items():
        for rate, quality in zip(RATES, qualities, strict=True):
            for seed in (1, 2, 3):
                spherical = name == "proj-spheretnorm"
                write_rate(
                    root / "runs" / f"{name}-lr{rate}-{seed}", rate, name, seed, quality=quality,
                    diverged=9 if spherical and (rate, seed) == (0.001, 2) else None,
                    alarm="token collapse" if spherical and rate == 0.004 else None,
                )  # fmt: skip
    report([root / "runs"], root / "report")
    return root


@pytest.fixture(scope="module")
def page(tuned):
    return (tuned / "report" / "report.html").read_text()


def text(tuned, row, column):
    return cell(tuned / "report", "learning-rates", row, column)["text"]


class TestChoice:
    def test_every_contestant_is_reported_at_its_best_rate(self, tuned):
        group = read_group([tuned / "runs"])
        assert {label: {run.rate for run in runs} for label, runs in group.contestants.items()} == {
            label: {rate} for label, rate in CHOSEN.items()
        }
        assert all(len(runs) == 3 for runs in group.contestants.values())
        assert group.rates == list(RATES)

    def test_no_other_run_is_in_the_other_tables(self, tuned):
        chosen = {f"{name}-lr{rate}-{seed}" for name, rate in CHOSEN.items() for seed in (1, 2, 3)}
        named = {
            run
            for c in cells(tuned / "report")
            if c["table"] in ("results", "comparisons", "stream")
            for run in re.findall(r"[\w.-]+-lr[\w.-]+", c["source"])
        }
        assert named == chosen
        # every run has its provenance
        runs = {c["row"] for c in cells(tuned / "report") if c["table"] == "runs"}
        assert runs == {path.name for path in (tuned / "runs").iterdir()}

    def test_the_table_has_every_rate(self, tuned):
        assert text(tuned, "proj-spheretnorm", "lr 0.001") == "diverged in 1 of 3 seeds"
        assert text(tuned, "proj-spheretnorm", "lr 0.004").endswith(" (collapsed in 3 of 3 seeds)")
        assert {row: text(tuned, row, "chosen rate") for row in CHOSEN} == {r: f"{x:g}" for r, x in CHOSEN.items()}
        assert text(tuned, "pre-ln", "place in the grid") == "inside"
        best = text(tuned, "pre-ln", "lr 0.002")
        assert best == cell(tuned / "report", "results", "pre-ln", "val loss")["text"]
        assert f"**{best}**" in (tuned / "report" / "tables.md").read_text()

    def test_one_seed_says_plainly_what_failed(self, tuned, tmp_path):
        write_tables(sorted((tuned / "runs").glob("*-2")), tmp_path / "report")
        assert cell(tmp_path / "report", "learning-rates", "proj-spheretnorm", "lr 0.001")["text"] == "diverged"
        assert cell(tmp_path / "report", "learning-rates", "proj-spheretnorm", "lr 0.004")["text"].endswith(
            " (collapsed)"
        )
        assert ONE_SEED in (tmp_path / "report" / "report.html").read_text()

    def test_every_number_has_its_source(self, tuned):
        traced = 0
        for c in cells(tuned / "report"):
            if c["value"] and not c["table"].startswith("paper-"):
                assert recompute(tuned / "runs", c["source"]) == pytest.approx(float(c["value"]), rel=1e-12), c
                traced += 1
        assert traced > 100

    def test_the_same_runs_give_the_same_bytes(self, tuned, tmp_path):
        shutil.copytree(tuned / "runs", tmp_path / "runs")
        report(sorted((tmp_path / "runs").iterdir(), reverse=True), tmp_path / "again")
        for path in (p for p in (tuned / "report").rglob("*") if p.is_file()):
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tuned / "report")).read_bytes(), path


class TestWords:
    def test_the_section_follows_the_results(self, page):
        titles = re.findall(r"<h2[^>]*>([^<]+)<", page)
        assert titles.index("Learning rates") == titles.index("Loss and perplexity") + 1

    def test_only_a_best_rate_at_an_edge_has_a_warning(self, tuned, page):
        warning = "keel: the best rate 0.004 is at the upper edge of the grid. Its best may lie beyond: no verdict."
        assert warning in page
        assert page.count("Its best may lie beyond") == 1
        assert cell(tuned / "report", "results", "keel", "lr")["text"] == "0.004 (edge)"
        assert cell(tuned / "report", "results", "pre-ln", "lr")["text"] == "0.002"

    def test_the_summary_says_how_the_rate_was_chosen_and_how_to_go_on(self, page):
        assert "Every contestant was trained at 3 learning rates (0.001, 0.002, 0.004)." in page
        assert "so it is slightly optimistic, equally for all." in page
        assert "To go on, run spheret study" in page
        # there are three seeds
        assert ONE_SEED not in page

    def test_no_verdict_at_an_edge(self, tuned):
        verdicts = {(c.first, c.second): c.verdict for c in comparisons(read_group([tuned / "runs"]))}
        edge = "no verdict: the best rate of keel is at the edge of the grid"
        assert verdicts == {
            ("keel", "proj-spheretnorm"): edge,
            ("keel", "pre-ln"): edge,
            ("proj-spheretnorm", "pre-ln"): "proj-spheretnorm is better",
        }


class TestFigure:
    def test_bowls_with_their_choice_and_failures(self, tuned):
        group = read_group([tuned / "runs"])
        upper, lower = FIGURES["bowls"][1](group).axes
        assert lower.get_xscale() == "log"
        assert [tick.get_text() for tick in lower.get_xticklabels()] == ["0.001", "0.002", "0.004"]
        chosen = [line for line in lower.lines if line.get_marker() == "o" and len(line.get_xdata())]
        assert [line.get_xdata()[0] for line in chosen] == [CHOSEN[label] for label in group.contestants]
        # one row for the only contestant that failed: a cross where it diverged, a triangle where it collapsed
        marks = {line.get_xdata()[0]: line.get_marker() for line in upper.lines}
        assert marks == {0.001: "x", 0.004: "^"}
        # a collapsed run does not set the scale
        assert lower.get_ylim()[1] < 3.5
        drawn = (tuned / "report" / "figures" / "bowls.svg").read_text()
        assert all(word in drawn for word in (*CHOSEN, "chosen rate", "collapsed", "diverged"))

    def test_without_failures_there_is_no_upper_panel(self, tmp_path):
        for rate in RATES:
            write_rate(tmp_path / f"{rate}", rate)
        (lower,) = FIGURES["bowls"][1](read_group([tmp_path])).axes
        assert lower.get_ylabel() == "validation loss (nats per token)"


class TestWhichRunsShareAContestant:
    def test_a_min_lr_that_follows_is_no_difference(self, tmp_path):
        write_run(tmp_path / "a", steps=20, train={"lr": 0.003, "min_lr": 0.003 / 10})
        write_run(tmp_path / "b", steps=20, train={"lr": 0.007, "min_lr": 0.007 / 10})
        group = read_group([tmp_path])
        assert list(group.contestants) == list(group.bowls) == ["pre-ln"]
        assert group.differing == ["lr", "min_lr"]

    @pytest.mark.parametrize("other", [{"min_lr": 1e-5}, {"clip": 2.0}])
    def test_any_other_difference_makes_two_contestants(self, tmp_path, other):
        write_rate(tmp_path / "a", 0.003)
        write_run(tmp_path / "b", steps=20, train={"lr": 0.007, "min_lr": 0.0007, **other})
        group = read_group([tmp_path])
        assert not group.bowls
        assert all("lr=0.00" in label for label in group.contestants)
        assert len(group.contestants) == 2

    def test_one_rate_has_no_section(self, tmp_path):
        write_run(tmp_path / "a", steps=20)
        write_tables([tmp_path / "a"], tmp_path / "report")
        assert "learning-rates" not in {c["table"] for c in cells(tmp_path / "report")}
        assert "lr" not in {c["column"] for c in cells(tmp_path / "report")}
        assert "To go on, run spheret study" not in (tmp_path / "report" / "report.html").read_text()


class TestEdges:
    def bowl(self, path, *runs):
        """The bowl of one contestant whose runs have these rates and settings."""
        for index, (rate, settings) in enumerate(runs):
            write_rate(path / f"run-{index}", rate, **settings)
        return read_group([path]).bowls["pre-ln"]

    def test_a_rate_that_diverged_is_a_bracket(self, tmp_path):
        bowl = self.bowl(tmp_path, (1, {}), (2, {"quality": 0.5}), (4, {"diverged": 5}))
        assert (bowl.best, bowl.edges) == (2, [])

    def test_a_rate_that_is_not_finished_is_none(self, tmp_path):
        bowl = self.bowl(tmp_path, (1, {}), (2, {"quality": 0.5}), (4, {"until": 5, "quality": 2.0}))
        assert (bowl.best, bowl.edges) == (2, ["upper"])

    def test_all_diverged(self, tmp_path):
        bowl = self.bowl(tmp_path / "runs", (1, {"diverged": 5}), (2, {"diverged": 9}), (4, {"diverged": 9}))
        # the one that came furthest, and of two the lower
        assert (bowl.best, bowl.reported, bowl.edges) == (None, 2, ["lower", "upper"])
        report([tmp_path / "runs"], tmp_path / "report")
        page = (tmp_path / "report" / "report.html").read_text()
        assert "pre-ln: no rate has a result yet, or all diverged. It is shown at 2: no verdict." in page
        assert not (tmp_path / "report" / "figures" / "bowls.svg").exists()

    def test_equal_losses_choose_the_lower_rate(self, tmp_path):
        bowl = self.bowl(tmp_path, (4, {}), (2, {}), (1, {"quality": -1.0}))
        assert (bowl.best, bowl.edges) == (2, [])

    def test_seeds_that_are_not_finished_do_not_count(self, tmp_path):
        bowl = self.bowl(
            tmp_path, (1, {}), (2, {"quality": 0.5}), (2, {"seed": 7, "until": 5}), (4, {"quality": 0.2})
        )
        assert bowl.best == 2
        line = json.loads((tmp_path / "run-1" / "metrics.jsonl").read_text().splitlines()[-1])
        assert bowl.loss(2) == line["val_loss"]
