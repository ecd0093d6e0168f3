"""A race: real trainings in child processes, with the settings that people will give it."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from documented import not_printed, shown
from planted import planted
from study_helpers import noise, row, run_all

from spheret.cli import main
from spheret.connections import SCHEMES
from spheret.lab.answers import group_answers
from spheret.lab.laboratory import Laboratory
from spheret.lab.plan import read_plan
from spheret.lab.race import race_plan, race_seeds
from spheret.lab.rows import read_rows
from spheret.lab.stages import wanted
from spheret.lab.words import answer_sentence
from spheret.runs.run import open_run

TINY = (
    "--layers", "1", "--heads", "2", "--width", "16", "--block", "16", "--batch-size", "2",
    "--set", "evaluation.eval_windows=8",
    "--lr", "3e-3",
)  # fmt: skip
VARIANTS = "proj-spheretnorm,proj-spheretnorm:schedule=sqrt"
LABELS = ("proj-spheretnorm", "proj-spheretnorm (schedule=sqrt)")
SHORT = (*TINY, "--steps", "10", "--schemes", VARIANTS, "--seeds", "3,4")
PLAN = Path("plan.toml")


def race(*arguments):
    return main(["race", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A race of a scheme under two names, with two seeds."""
    out = tmp_path_factory.mktemp("race") / "out"
    with planted(out.parent / "corpus"):
        assert race(*SHORT, "--out", out) == 0
    return out


def answer_of(out):
    """What the rows of a race say, by its own plan."""
    (answer,) = group_answers(read_plan(out / "plan.toml"), read_rows(out / "results.jsonl"))
    return answer


class TestFinished:
    def test_every_contestant_is_an_ordinary_run(self, finished):
        runs = sorted((finished / "runs").iterdir())
        names = [f"proj-spheretnorm-lr0.003-seed{seed}" for seed in (3, 4)]
        assert [path.name.rpartition("-")[0] for path in runs] == names
        for run in map(open_run, runs):
            assert run.metrics()[-1].step == run.steps == 10
            assert run.config.environment.threads == 1
            assert run.config.environment.command.startswith("spheret train --config ")
            assert run.config.model.head_bias == "unigram"
            assert run.config.train.warmup == 1
            assert run.config.train.min_lr == pytest.approx(run.config.train.lr / 10)
            assert run.checkpoint().step == 10

    def test_a_scheme_under_two_names_is_trained_once(self, finished):
        gap = answer_of(finished).gap(*LABELS)
        assert (gap.estimate, gap.significant) == (0.0, False)

    def test_its_plan_is_a_study_of_the_same(self, finished, tmp_path):
        page = finished / "report" / "report.html"
        words = ["--results", str(finished / "results.jsonl"), "--out", str(tmp_path / "out")]
        assert main(["study", str(finished / "plan.toml"), *words]) == 0
        assert (tmp_path / "out" / "report.html").read_bytes() == page.read_bytes()


def test_text_of_ones_own_in_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "my.txt"
    text.write_text("".join(f"{number}. A line of my own, and no other.\n" for number in range(1500))[:60_000])
    out = tmp_path / "out"
    words = (*TINY, "--schemes", "pre-ln", "--steps", "2", "--seeds", "5,", "--out", out)
    assert race("--data", text, *words) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"{text} as bytes: train ")
    assert str(out / "report" / "report.html") in output.out.splitlines()
    # what docs/compare.md shows of any race: the columns of its table, and where its page is
    printed = output.out.replace(str(out), "runs/answer")
    assert "runs/answer/report/report.html" not in not_printed("compare.md", printed)
    heads = [line for line in shown("compare.md") if "contestant" in line and line.startswith("┃")]
    assert heads
    # a busy machine measures no cost of a step
    columns = {word.strip() for head in heads for word in head.split("┃")} - {"", "ms per step"}
    assert not [word for word in columns if word not in output.out]
    (path,) = (out / "runs").iterdir()
    run = open_run(path)
    assert run.config.data.corpus.name == "my.txt"
    assert 0.04 < run.config.data.tokens["val"] / 60_000 < 0.06
    # what a training reads does not follow the file
    config = json.loads((out / "configs" / f"{path.name}.json").read_text())
    assert config["data"]["path"] == run.config.data.path


@pytest.mark.slow
def test_other_rates_are_added_to_a_race(tmp_path):
    for rates, known in (("0.02,5e-3", {0.005, 0.02}), ("0.005,0.03", {0.005, 0.02, 0.03})):
        words = ("--steps", "4", "--schemes", "pre-ln", "--lr", rates, "--seeds", "1")
        assert race(*TINY, *words, "--out", tmp_path / "out") == 0
        rows = read_rows(tmp_path / "out" / "results.jsonl").values()
        assert {row.rate for row in rows} == known
    trained = [open_run(path).settings.train for path in (tmp_path / "out" / "runs").iterdir()]
    assert all(train.min_lr == pytest.approx(train.lr / 10) for train in trained)
    (entry,) = answer_of(tmp_path / "out").entries
    # a rate that this race does not ask for is kept in the rows
    assert entry.rate == min((row for row in rows if row.rate != 0.02), key=lambda row: row.val_loss).rate


@pytest.mark.slow
def test_a_training_that_fails_ends_the_race_with_its_sentence(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    # only new processes read it
    monkeypatch.setenv("SPHERET_BACKEND", "abacus")
    assert race(*SHORT, "--schemes", "pre-ln", "--seeds", "3,", "--out", out, "--quiet") == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "ended with exit code 2" in output
    assert "abacus" in output
    assert len(list(out.glob("logs/*.log"))) >= 1


class TestPlan:
    def test_a_number_is_how_many_seeds_and_numbers_are_the_seeds(self):
        assert race_seeds("3") == [1337, 1338, 1339]
        assert race_seeds("3,4, 9") == [3, 4, 9]
        assert race_seeds("7,") == [7]

    def test_names_of_runs_are_different(self, prepared, tmp_path):
        shared = {"data": {"path": str(prepared)}, "model": {"head": "tied", "head_bias": "none"}}
        words = "all,p-spheretnorm:p=0.3,p-spheretnorm:p=0.3:schedule=sqrt,pre-ln:head=shifted"
        plan = race_plan(PLAN, words, "1,2", [0.001, 0.0010000001], shared)
        laboratory = Laboratory(plan, tmp_path)
        names = [laboratory.name(key)[0] for key in wanted(plan, {})]
        assert len(names) == 4 * (len(SCHEMES) + 3)
        # sqrt is the default
        assert len(set(names)) == 4 * (len(SCHEMES) + 2)


LOSSES = {"pre-ln": 2.27, "post-ln": 2.3, "keel": 2.5, "proj-spheretnorm": 2.13, "cay-spheretnorm": 2.2}


class TestWithoutRates:
    """A race whose rates nobody gave: those of the studies at their size, else a search around them."""

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch):
        monkeypatch.setattr("spheret.lab.race.rates", lambda: dict.fromkeys(LOSSES, 0.007))
        monkeypatch.setattr("spheret.train.recipes.rates", lambda: dict.fromkeys(LOSSES, 0.007))

    def answer(self, given, fail=""):
        plan = race_plan(PLAN, ",".join(LOSSES), "3", None, given)

        def loss(key):
            distance = 0.05 * math.log2(key.rate / 0.008) ** 2 + 0.01 * noise(key.seed)
            loss = LOSSES[key.contestant] + distance + 0.001 * noise(key)
            return row(key, 3.1, "collapsed") if key.contestant == fail else loss

        rows, order = run_all(plan, loss)
        (answer,) = group_answers(plan, rows)
        return answer, Counter((key.contestant, key.rate) for key in order)

    def test_at_the_size_of_the_studies_each_has_one_rate_and_who_is_behind_one_seed(self):
        answer, runs = self.answer({})
        assert {name: count for (name, _), count in runs.items()} == {
            # the reference is compared wherever it stands
            "proj-spheretnorm": 3, "cay-spheretnorm": 3, "pre-ln": 3, "post-ln": 1, "keel": 1,
        }  # fmt: skip
        assert {rate for _, rate in runs} == {0.007}
        assert answer.standing.winner == "proj-spheretnorm"
        assert {entry.label for entry in answer.others if entry.behind} == {"post-ln", "keel"}
        assert "keel (2.49" in answer_sentence(answer)
        assert answer.gap("proj-spheretnorm", "pre-ln").adjusted < 0.01

    @pytest.mark.parametrize("given", [{"model": {"width": 65}}, {"train": {"steps": 301}}, {"data": {"path": "x"}}])
    def test_elsewhere_three_rates_are_tried_and_fresh_seeds_decide(self, given):
        answer, runs = self.answer(given)
        assert len({rate for name, rate in runs if name == "keel"}) == 3
        # no fresh seeds for who is behind
        assert sum(count for (name, _), count in runs.items() if name == "keel") == 3
        assert sum(count for (name, _), count in runs.items() if name == "proj-spheretnorm") == 6
        assert answer.standing.winner == "proj-spheretnorm"
        assert len(answer.compared) == 3

    def test_who_collapses_is_named_and_gets_no_more_seeds(self):
        answer, runs = self.answer({}, fail="proj-spheretnorm")
        assert runs["proj-spheretnorm", 0.007] == 1
        assert "Collapsed: proj-spheretnorm at 0.007" in answer_sentence(answer)
        assert answer.standing.winner == "cay-spheretnorm"

    def test_seeds_of_a_search_are_its_own(self):
        with pytest.raises(ValueError, match="--seeds"):
            race_plan(PLAN, "pre-ln", "3,4", None, {"train": {"steps": 301}})
