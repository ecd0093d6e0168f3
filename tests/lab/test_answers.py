"""What rows that were never trained say, through every door, on the page and in words; and what they must not say."""

import html
import re
from pathlib import Path

import pytest
from report_helpers import read_group, write_run
from study_helpers import TWO, bowl, plan_of, row, run_all

from spheret.lab.answers import group_answers
from spheret.lab.outcome import print_outcome
from spheret.lab.page.page import page as page_of
from spheret.lab.race import race_plan
from spheret.lab.report import sections_of, study_findings, write_report
from spheret.lab.rows import Key
from spheret.lab.stages import wanted
from spheret.lab.words import answer_sentence, limits

FOUR = """
[[parts]]
name = "four"
title = "Four of them"
contestants = ["pre-ln", "post-ln", "keel", "peri-ln"]
rates = [1e-3, 2e-3, 4e-3]
seeds = 3
"""
# how far a contestant lies from the others
SHIFT = {"pre-ln": 0.0, "post-ln": -0.2, "keel": -0.3, "peri-ln": 0.1}


def loss_of(key):
    return bowl(2e-3, 2.0 + SHIFT.get(key.contestant, 0.0))(key)


def answered(plan, rows):
    return {answer.group.name: answer for answer in group_answers(plan, rows)}


def undrawn(plan, rows):
    """The text of the page, without its figures, which take most of the time."""
    return plain(page_of(plan.title, sections_of(study_findings(plan, rows))))


def study_report(plan, rows, out):
    return write_report(study_findings(plan, rows), out)


def text_of(path):
    return plain(path.read_text())


def plain(page):
    page = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A study that is done, and one of whose contestants collapsed with two of three fresh seeds."""
    plan = plan_of(tmp_path_factory.mktemp("plan"), FOUR)

    def collapsing(key):
        bad = key.contestant == "keel" and key.seed in (101, 103)
        return row(key, 3.0, "collapsed") if bad else loss_of(key)

    return plan, run_all(plan, collapsing)[0]


@pytest.fixture(scope="module")
def page(four, tmp_path_factory):
    return study_report(*four, tmp_path_factory.mktemp("report"))


class TestAnswer:
    def test_the_sentence_says_who_wins_and_who_collapsed(self, four, page):
        answer = answered(*four)["four"]
        sentence, gap = answer_sentence(answer), answer.gap("post-ln", "pre-ln")
        assert (answer.standing.winner, answer.standing.behind) == ("post-ln", ("pre-ln", "peri-ln"))
        assert f"post-ln ({answer.seed_table.means['post-ln']:.3f}) wins" in sentence
        assert f"{-gap.estimate:.3f} below the next, pre-ln" in sentence
        assert answer.failures == {"collapsed": {"keel": [0.0005, 0.001, 0.002]}}
        assert "keel at 0.0005, 0.001 and 0.002" in sentence
        # it comes before everything else
        assert text_of(page).index(sentence) < text_of(page).index("p is corrected")

    def test_a_collapsed_seed_excludes_its_contestant(self, four, page):
        answer = answered(*four)["four"]
        assert answer.seed_table is not None
        assert set(answer.seed_table.contestants) == {"pre-ln", "post-ln", "peri-ln"}
        assert answer.gap("keel", "pre-ln") is None
        assert [entry.label for entry in answer.others] == ["keel"]
        # with one seed at each of two higher rates, and with two at the last one
        assert text_of(page).count("step 3: collapsed") == 4
        # what stopped at its first failure says how many seeds were to come
        stopped = "collapsed in 1 of 1 seed run, 3 planned"
        assert f"at 0.002 {stopped}; at 0.001 {stopped}" in text_of(page)
        assert "collapsed in 2 of 3 seeds at 0.0005" in text_of(page)

    def test_no_difference_comes_with_what_would_have_been_seen(self, tmp_path):
        plan = plan_of(tmp_path, TWO)
        answer = answered(plan, run_all(plan, bowl(2e-3, deviation=0.1))[0])["two"]
        assert answer.gap("pre-ln", "post-ln").adjusted > 0.05
        assert (answer.standing.winner, answer.standing.behind) == (None, ())
        assert "wins" not in answer_sentence(answer)
        for label, mean in answer.seed_table.means.items():
            assert f"{label} ({mean:.3f})" in answer_sentence(answer)
        assert f"A true difference of {answer.seen:.3f}" in " ".join(limits(answer))

    def test_what_is_not_bracketed_gets_no_verdict(self, tmp_path):
        plan = plan_of(tmp_path, FOUR + "extend = 1")
        losses = {"post-ln": bowl(1.0, 1.0)}
        rows, _ = run_all(plan, lambda key: losses.get(key.contestant, loss_of)(key))
        answer = answered(plan, rows)["four"]
        assert "post-ln" not in answer.seed_table.contestants
        assert answer.by_label["post-ln"].state == "edge"
        assert "0.008" in " ".join(limits(answer))
        assert "post-ln" not in (*answer.standing.leaders, *answer.standing.behind)
        # its loss is lower, and the verdict says why it does not count
        assert f"post-ln ({answer.by_label['post-ln'].mean:.3f}" not in answer_sentence(answer).partition("wins")[0]


class TestOneEngine:
    """The same losses give the same statistics, whoever asked for the runs."""

    LABELS = ("pre-ln", "post-ln", "keel")

    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory):
        """Run directories with three seeds, and their answer as `spheret report` gives it."""
        root = tmp_path_factory.mktemp("runs")
        for index, label in enumerate(self.LABELS):
            for seed in (1, 2, 3):
                write_run(root / f"{label}-{seed}", label, seed, quality=0.04 * index)
        return read_group([root])

    def test_a_race_says_what_a_report_says(self, runs):
        plan = race_plan(Path("plan.toml"), ",".join(self.LABELS), "1,2,3", [3e-3], {})
        keys = [Key("race", run.label, 3e-3, run.seed) for run in runs.every]
        rows = {key: row(key, run.row.val_loss) for key, run in zip(keys, runs.every, strict=True)}
        assert wanted(plan, rows) == []
        (answer,) = group_answers(plan, rows)
        assert (answer.standing, answer.failures) == (runs.answer.standing, runs.answer.failures)
        assert (answer.pairs, answer.seen) == (runs.answer.pairs, runs.answer.seen)
        assert runs.answer.standing.winner == "keel"


def test_the_terminal_shows_the_table_and_ends_with_the_verdict(four, capsys, monkeypatch):
    answer = answered(*four)["four"]
    # no cell is cut on a narrow terminal
    monkeypatch.setenv("COLUMNS", "30")
    print_outcome([answer], Path("report.html"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["report.html", answer_sentence(answer)]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[1] for row in cells] == [entry.label for entry in answer.entries]
    for row_cells, entry in zip(cells[:3], answer.entries, strict=False):
        gap = answer.gap(entry.label, "pre-ln")
        assert row_cells[2:4] == ["0.002", f"{answer.means[entry.label]:.3f}"]
        assert row_cells[4] == ("-" if gap is None else f"{gap.estimate:+.3f}")


class TestPage:
    def test_at_every_moment(self, four, tmp_path):
        plan, rows = four
        order = run_all(plan, lambda key: rows[key])[1]
        known = []
        for count in range(len(order)):
            some = {key: rows[key] for key in order[:count]}
            answer, text = answered(plan, some)["four"], undrawn(plan, some)
            assert answer_sentence(answer) in text
            assert ("wins" in answer_sentence(answer)) == bool(answer.standing and answer.standing.winner)
            assert "still to come" in text
            known.append(answer.standing is not None)
        # twelve tries, then two seeds of two contestants at least; once there is an answer there is one until the end
        first = known.index(True)
        assert first >= 12 + 4
        assert known == [False] * first + [True] * (len(order) - first)
        # with figures: nothing, one run, one seed of some
        for count in (0, 1, 11):
            assert study_report(plan, {key: rows[key] for key in order[:count]}, tmp_path).is_file()

    def test_a_map_for_what_gets_no_seeds(self, tmp_path):
        plan = plan_of(tmp_path, TWO + "seeds = 0\nextend = 0")

        def result(key):
            return row(key, 3.0, "collapsed") if key.rate > 3e-3 else loss_of(key)

        page = study_report(plan, run_all(plan, result)[0], tmp_path / "out")
        assert "of 6 runs, 4 finished, 2 collapsed, 0 diverged" in text_of(page)
        assert {path.stem for path in (page.parent / "figures").iterdir()} == {"two-bowls"}
