"""Runs that differ in their learning rate: each contestant at its best, its bowl, and no verdict at an edge."""

import pytest
from report_helpers import cell, read_group, write_run, write_tables

RATES = (0.001, 0.002, 0.004)
# how much is subtracted from every loss, by rate
QUALITY = {"pre-ln": (0.0, 0.3, 0.1), "keel": (0.0, 0.1, 0.9), "proj-spheretnorm": (0.5, 0.8, -0.7)}
# the compared ones first
CHOSEN = {"proj-spheretnorm": 0.002, "pre-ln": 0.002, "keel": 0.004}
LOSSES, BOWLS = "losses-sotu-bytes", "bowls-sotu-bytes"


def write_rate(path, rate, *arguments, **settings):
    train = {"lr": rate, "min_lr": rate / 10}
    return write_run(path, *arguments, steps=20, eval_every=10, train=train, **settings)


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
    write_tables([root / "runs"], root / "report")
    return root


@pytest.fixture(scope="module")
def group(tuned):
    return read_group([tuned / "runs"])


class TestChoice:
    def test_every_contestant_is_reported_at_its_best_rate(self, group):
        assert {label: {run.rate for run in runs} for label, runs in group.contestants.items()} == {
            label: {rate} for label, rate in CHOSEN.items()
        }
        assert list(group.contestants) == list(CHOSEN)
        assert all(len(runs) == 3 for runs in group.contestants.values())

    def test_a_seed_that_failed_makes_its_rate_a_failure(self, group):
        search = group.answer.by_label["proj-spheretnorm"].search
        assert [rate for rate, loss in search.losses.items() if loss == float("inf")] == [0.001, 0.004]
        assert group.answer.failures == {
            "diverged": {"proj-spheretnorm": [0.001]},
            "collapsed": {"proj-spheretnorm": [0.004]},
        }

    def test_no_verdict_at_an_edge(self, group):
        answer = group.answer
        assert answer.by_label["keel"].state == "edge"
        assert answer.gap("keel", "pre-ln") is None
        # although its loss is the lowest
        assert answer.by_label["keel"].mean == min(entry.mean for entry in answer.entries)
        assert (answer.standing.winner, answer.standing.behind) == ("proj-spheretnorm", ("pre-ln",))


class TestWhichRunsShareAContestant:
    def test_a_min_lr_that_follows_is_no_difference(self, tmp_path):
        write_run(tmp_path / "a", steps=20, train={"lr": 0.003, "min_lr": 0.003 / 10})
        write_run(tmp_path / "b", steps=20, train={"lr": 0.007, "min_lr": 0.007 / 10})
        group = read_group([tmp_path])
        assert list(group.contestants) == ["pre-ln"]
        assert group.differing == ["lr", "min_lr"]

    @pytest.mark.parametrize("other", [{"min_lr": 1e-5}, {"clip": 2.0}])
    def test_any_other_difference_makes_two_contestants(self, tmp_path, other):
        write_rate(tmp_path / "a", 0.003)
        write_run(tmp_path / "b", steps=20, train={"lr": 0.007, "min_lr": 0.0007, **other})
        group = read_group([tmp_path])
        assert len(group.contestants) == 2
        assert not any("lr=0" in label.replace("min_lr=0", "") for label in group.contestants)


class TestEdges:
    def search(self, path, *runs):
        """The only contestant of runs that have these rates and settings, and the rate at which it is shown."""
        for index, (rate, settings) in enumerate(runs):
            write_rate(path / f"run-{index}", rate, **settings)
        group = read_group([path])
        return group.answer.by_label["pre-ln"], group.contestants["pre-ln"][0].rate

    def test_a_rate_that_is_not_finished_is_none(self, tmp_path):
        entry, shown = self.search(tmp_path, (1, {}), (2, {"quality": 0.5}), (4, {"until": 5, "quality": 2.0}))
        assert (entry.search.best, shown, entry.state) == (2, 2, "tuning")
        assert entry.reason
        assert entry.missing == 1

    def test_all_diverged(self, tmp_path):
        runs = (1, {"diverged": 5}), (2, {"diverged": 9}), (4, {"diverged": 9})
        entry, shown = self.search(tmp_path / "runs", *runs)
        assert (entry.search.best, shown, entry.state) == (None, 1, "hopeless")
        write_tables([tmp_path / "runs"], tmp_path / "report")
        assert cell(tmp_path / "report", BOWLS, "pre-ln", "best rate")["text"] == "-"
