"""Progress of a plan, on run directories that no training wrote."""

import json

import msgspec
import pytest
from study_helpers import TWO, bowl, key, plan_of, row

from spheret.lab.laboratory import Laboratory
from spheret.lab.progress import Board
from spheret.lab.race import race_plan
from spheret.runs.metrics import PATIENCE, Follower


def metrics_line(keys):
    """A line of metrics with these keys, and those that every line has."""
    line = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "spikes": 0, "tokens_per_second": 9.0, "seconds": 1.0, **keys}
    if "val_loss" in keys:
        names = ("angle_mean", "angle_max", "alpha", "norm", "drift", "cosine", "grad_norm")
        line |= {"radius": None, "on_bound": [], "sublayers": [{"sublayer": 1, **dict.fromkeys(names)}]}
    return json.dumps(line) + "\n"


def write_metrics(path, *lines):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(map(metrics_line, lines)))


@pytest.fixture
def race(tmp_path, prepared):
    shared = {
        "model": {"layers": 1, "heads": 2, "width": 16, "block": 16, "head": "tied", "head_bias": "none"},
        "data": {"path": str(prepared)},
        "train": {"steps": 10, "batch_size": 2},
    }
    plan = race_plan(tmp_path / "plan.toml", "pre-ln,keel", "7,8", [1e-3], shared)
    return Laboratory(plan, tmp_path / "race")


@pytest.fixture
def study(tmp_path, prepared):
    text = f'[data]\npath = "{prepared}"\n[train]\nsteps = 10\n[model]\nlayers = 1\nwidth = 16\n{TWO}seeds = 2\n'
    return Laboratory(plan_of(tmp_path, text), tmp_path / "study")


class TestBoard:
    def test_a_race(self, race):
        race.directory.mkdir()
        board = Board(race, "race")
        jobs = board.jobs()
        names = ["pre-ln-lr0.001-seed7", "keel-lr0.001-seed7", "pre-ln-lr0.001-seed8", "keel-lr0.001-seed8"]
        assert [job.name.rpartition("-")[0] for job in jobs] == names
        first_steps = [{"step": step} for step in (1, 2, 3)]
        write_metrics(jobs[0].directory, *first_steps, {"step": 4, "val_loss": 2.9}, {"step": 5})
        write_metrics(jobs[1].directory, *first_steps[:2], {"step": 3, "loss": None, "stopped": "nan"})
        board.watch(last=False)
        head, first, second = board.lines()
        assert head.startswith("race: 0 of 4 runs")
        assert first.strip() == "pre-ln, lr 0.001, seed 7: step 5/10, val 2.900 at step 4"
        assert second.strip().startswith("keel, lr 0.001, seed 7: step 3/10")
        assert second.endswith("diverged at step 3")

    def test_a_study_names_its_stage_and_shows_no_hash(self, study):
        losses = {"pre-ln": bowl(2e-3), "post-ln": bowl(2e-3, 1.0)}
        rows = []
        for label, loss in losses.items():
            for rate in (1e-3, 2e-3, 4e-3):
                each = key(label, rate, 1)
                rows.append(row(each, loss(each), run=study.name(each)[0]))
        assert study.join(rows) == 6
        study.directory.mkdir()
        board = Board(study, "study")
        (first, *_) = board.jobs()
        digest = first.name.rpartition("-")[2]
        assert len(digest) == 12
        write_metrics(first.directory, {"step": 1}, {"step": 2, "val_loss": 2.5})
        board.watch(last=False)
        head, line = board.lines()
        assert head.startswith("study: 6 of about 10 runs")
        assert line.strip() == "pre-ln, lr 0.002, seed 101, fresh seed: step 2/10, val 2.500 at step 2"
        assert digest not in head + line


class TestJoining:
    def test_a_joined_row_keeps_its_own(self, study):
        each = key("pre-ln", 2e-3, 1)
        joined = row(each, 2.0, run=study.name(each)[0], step_seconds=0.5)
        study.join([joined])
        assert study.rows()[each] == joined
        # of another run it is not taken
        assert study.join([msgspec.structs.replace(joined, run="another")]) == 0


class TestFollower:
    def follower(self, path, *lines):
        write_metrics(path / "run", *lines)
        return Follower("run", path / "run", steps=10)

    @pytest.mark.parametrize("text", ["garbage", "\udcff"])
    def test_a_damaged_line_is_named(self, tmp_path, text):
        follower = self.follower(tmp_path, {"step": 1})
        with (tmp_path / "run" / "metrics.jsonl").open("a", errors="surrogateescape") as file:
            file.write(text + "\n")
        # a run that continues may be writing its lines again
        for _ in range(PATIENCE):
            follower.update()
        with pytest.raises(ValueError, match=r"metrics\.jsonl"):
            follower.update()

    def test_follows_what_is_added_torn_and_cut_off(self, tmp_path):
        follower = self.follower(tmp_path, {"step": 1}, {"step": 2, "val_loss": 3.0})
        follower.update()
        path = tmp_path / "run" / "metrics.jsonl"
        third = metrics_line({"step": 3})
        with path.open("a") as file:
            file.write(third[:20])
        follower.update()
        assert (follower.step, follower.val_loss) == (2, 3.0)
        with path.open("a") as file:
            file.write(third[20:])
        follower.update()
        assert follower.step == 3
        # a resumed run goes back to its checkpoint
        path.write_text(metrics_line({"step": 1}))
        follower.update()
        assert (follower.step, follower.val_loss) == (1, None)
