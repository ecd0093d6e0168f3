"""A race: real trainings in child processes, killed, resumed and refused as people will do it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planted import planted
from spheret.lab.scoreboard import Scoreboard
from spheret.runs.step_cost import measured_together, read_step_cost

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.lab.race import RATES, learning_rates, race_runs, race_seeds
from spheret.runs.metrics import Follower
from spheret.runs.run import open_run
from spheret.train.drill import timeless

TINY = (
    "--layers", "1", "--heads", "2", "--width", "16", "--block", "16", "--batch-size", "2", "--eval-windows", "8",
    "--lr", "3e-3",
)  # fmt: skip
VARIANTS = "pre-ln,proj-spheretnorm,proj-spheretnorm:schedule=sqrt"
NAMES = ("pre-ln-1337", "proj-spheretnorm-1337", "proj-spheretnorm-schedule=sqrt-1337")
LONG = (*TINY, "--steps", "400", "--eval-every", "40", "--schemes", "pre-ln,proj-spheretnorm")


def race(*arguments):
    return main(["race", *map(str, arguments)])


def lines(path):
    """What the runs below a directory say, apart from what the clock says."""
    records = {}
    for run in sorted(p.parent for p in path.glob("*/config.json")):
        records[run.name] = timeless(open_run(run).metrics())
    return records


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A race of three, two of them the same scheme under two names."""
    out = tmp_path_factory.mktemp("race") / "out"
    with planted(out.parent / "corpus"):
        assert race(*TINY, "--steps", "10", "--schemes", VARIANTS, "--out", out) == 0
    return out


class TestFinished:
    def test_every_contestant_is_an_ordinary_run(self, finished):
        assert sorted(p.parent.name for p in finished.glob("*/config.json")) == sorted(NAMES)
        for name in NAMES:
            run = open_run(finished / name)
            assert run.metrics()[-1].step == run.steps == 10
            assert run.config.environment.threads == 1
            assert run.config.environment.command.startswith("spheret train --config ")
            assert run.config.model.head_bias == "unigram"
            assert run.config.train.warmup == 1
            assert run.config.train.min_lr == pytest.approx(run.config.train.lr / 10)
            assert run.checkpoint().step == 10

    def test_a_scheme_under_two_names_differs_by_exactly_nothing(self, finished):
        output = lines(finished)
        assert output[NAMES[1]] == output[NAMES[2]]
        table = (finished / "report" / "tables.csv").read_text()
        row = "comparisons,proj-spheretnorm - proj-spheretnorm (schedule=sqrt)"
        assert f"{row},difference,+0.0000,0.0," in table
        assert f"{row},95% interval,+0.0000 to +0.0000," in table
        assert f"{row},verdict,no difference at all," in table

    def test_nothing_else_is_left(self, finished):
        assert {p.name for p in finished.iterdir()} == {*NAMES, "race.json", "configs", "report"}

    def test_the_report_is_that_of_the_runs(self, finished):
        # in the place of the other one, because a page links its runs
        again = finished / "again"
        assert main(["report", *(str(finished / name) for name in NAMES), "--out", str(again)]) == 0
        for path in (p for p in again.rglob("*") if p.is_file()):
            assert path.read_bytes() == (finished / "report" / path.relative_to(again)).read_bytes(), path
        shutil.rmtree(again)

    def test_the_steps_were_measured_side_by_side(self, finished):
        costs = [read_step_cost(finished / name) for name in NAMES]
        assert measured_together(costs)
        assert [f"{cost.contestant}-1337" for cost in costs] == list(NAMES)
        assert all(cost.machine["threads"] == 1 and cost.rounds > 1 and cost.seconds > 0 for cost in costs)
        table = (finished / "report" / "tables.csv").read_text()
        assert f"results,pre-ln,ms per step,{1000 * costs[0].seconds:.1f}," in table
        assert "measured side by side" in (finished / "report" / "figures" / "time.svg").read_text()

    def test_again_it_only_writes_the_report(self, finished, capsys):
        before = {path: path.stat().st_mtime_ns for path in finished.glob("*/[ms]*.json*")}
        # the metrics, the sample and the cost of a step
        assert len(before) == 9
        (finished / "report" / "report.html").unlink()
        assert race(*TINY, "--steps", "10", "--schemes", VARIANTS, "--out", finished) == 0
        output = capsys.readouterr()
        first, second = output.err.splitlines()
        assert first == f"race: 3 runs of 3 contestants on sotu, into {finished}."
        assert "all 3 runs" in second
        self.check_outcome(finished, output.out.splitlines())
        assert (finished / "report" / "report.html").exists()
        assert {path: path.stat().st_mtime_ns for path in finished.glob("*/[ms]*.json*")} == before

    def check_outcome(self, finished, printed):
        """The contestants, best first, then one sentence, then the path."""
        assert printed[-1] == str(finished / "report" / "report.html")
        assert printed[-2].startswith("One seed shows a collapse, a divergence or a large gap, and cannot tell ")
        assert "`spheret study PLAN.toml`" in printed[-2]
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed if line.startswith("│")]
        losses = {name: open_run(finished / name).metrics()[-1].val_loss for name in NAMES}
        assert [row[0] for row in rows] == ["1", "2", "3"]
        assert [row[3] for row in rows] == [f"{loss:.3f}" for loss in sorted(losses.values())]
        assert all(row[2] == "0.003" for row in rows)
        cost = {row[1]: row[6] for row in rows}
        assert cost["pre-ln"] == f"{1000 * read_step_cost(finished / NAMES[0]).seconds:.1f}"
        # two of the three are the same
        assert sum(row[4] == "+0.0000" for row in rows) == (losses[NAMES[1]] < losses[NAMES[0]])

    def test_other_settings_are_refused(self, finished, capsys):
        assert race(*TINY, "--steps", "12", "--schemes", VARIANTS, "--out", finished) == 2
        output = capsys.readouterr().err
        assert "holds a race with other settings (steps is 10 there and 12 here" in output
        assert "another --out" in output

    def test_fewer_contestants_are_a_smaller_report(self, finished, tmp_path):
        out = tmp_path / "copy"
        shutil.copytree(finished, out)
        # as if the measurement had been interrupted before it wrote this one
        (out / NAMES[0] / "step_cost.json").unlink()
        assert race(*TINY, "--steps", "10", "--schemes", "pre-ln", "--out", out, "--quiet") == 0
        assert "runs,proj-spheretnorm" in (finished / "report" / "tables.csv").read_text()
        assert "runs,proj-spheretnorm" not in (out / "report" / "tables.csv").read_text()
        assert list(read_step_cost(out / NAMES[0]).together) == ["pre-ln"]


def test_text_of_ones_own_in_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "my.txt"
    text.write_text("".join(f"{number}. A line of my own, and no other.\n" for number in range(1500))[:60_000])
    out = tmp_path / "out"
    words = (*TINY, "--schemes", "pre-ln,proj-spheretnorm", "--steps", "2", "--seeds", "5,", "--out", out)
    assert race("--data", text, *words) == 0
    output = capsys.readouterr()
    first, second = output.err.splitlines()[:2]
    assert first == f"race: 2 runs of 2 contestants on {text}, into {out}."
    assert second.startswith(f"{text} as bytes: train ")
    assert output.out.splitlines()[-1] == str(out / "report" / "report.html")
    run = open_run(out / "pre-ln-5")
    assert run.config.data.corpus.name == "my.txt"
    assert 0.04 < run.config.data.tokens["val"] / 60_000 < 0.06
    # what a training reads does not follow the file
    config = json.loads((out / "configs" / "pre-ln-5.json").read_text())
    assert config["data"]["path"] == run.config.data.path


class TestSeveralRates:
    @pytest.fixture(scope="class")
    def tuned(self, tmp_path_factory):
        """A race of one scheme at two rates, the last of which a person gave first."""
        out = tmp_path_factory.mktemp("tuned") / "out"
        assert self.race(out, "0.02,5e-3") == 0
        return out

    def race(self, out, rates):
        return race(*TINY, "--steps", "4", "--schemes", "pre-ln", "--lr", rates, "--out", out)

    def test_every_rate_has_a_run_and_its_own_min_lr(self, tuned):
        assert {p.parent.name for p in tuned.glob("*/config.json")} == {"pre-ln-lr0.005-1337", "pre-ln-lr0.02-1337"}
        for rate in (0.005, 0.02):
            train = open_run(tuned / f"pre-ln-lr{rate}-1337").settings.train
            assert (train.lr, train.min_lr) == (rate, pytest.approx(rate / 10))
        settings = json.loads((tuned / "race.json").read_text())["settings"]
        assert settings["lr"] == [0.005, 0.02]
        assert "min_lr" not in settings

    def test_the_report_has_one_row_at_the_best_rate(self, tuned):
        table = (tuned / "report" / "tables.csv").read_text()
        best = min((0.005, 0.02), key=lambda rate: lines(tuned)[f"pre-ln-lr{rate}-1337"][-1]["val_loss"])
        assert f"results,pre-ln,lr,{best} (edge),{best},pre-ln-lr{best}-1337/config.json[train.lr]" in table
        assert table.count("results,pre-ln,val loss") == 1
        assert (tuned / "report" / "figures" / "bowls.svg").exists()
        # the rate changes nothing in the cost of a step: one measurement, written to both runs
        costs = [read_step_cost(tuned / f"pre-ln-lr{rate}-1337") for rate in (0.005, 0.02)]
        assert costs[0] == costs[1]
        assert list(costs[0].together) == ["pre-ln"]

    def test_the_same_rates_in_another_order_go_on(self, tuned, capsys):
        assert self.race(tuned, "0.005,2e-2") == 0
        assert "all 2 runs" in capsys.readouterr().err

    @pytest.mark.parametrize(("rates", "here"), [("0.005,0.03", "[0.005, 0.03]"), ("0.005", "0.005")])
    def test_other_rates_are_named(self, tuned, rates, here, capsys):
        assert self.race(tuned, rates) == 2
        assert f"lr is [0.005, 0.02] there and {here} here" in capsys.readouterr().err


def start(out):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-m", "spheret", "race", *LONG, "--out", str(out)], stderr=subprocess.PIPE, env=environment
    )


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def under_way(out):
    """Whether a run has a checkpoint and is not done."""
    return any(out.glob("*/checkpoints/step-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert race(*LONG, "--out", out, "--quiet") == 0
    return lines(out)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "number",
    [
        # `test_study_run.py` kills the same executor with kill -9
        pytest.param(signal.SIGKILL, id="kill -9", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="kill", marks=pytest.mark.slow),
    ],
)
def test_stopped_in_the_middle_it_goes_on(number, undisturbed, tmp_path, capsys):
    out = tmp_path / "out"
    process = start(out)
    wait_until(lambda: under_way(out))
    trainings = children(process.pid)
    assert trainings
    process.send_signal(number)
    output = process.communicate(timeout=60)[1].decode()
    if number == signal.SIGKILL:
        # nobody told the trainings: the system did
        wait_until(lambda: not any(map(is_alive, trainings)))
    else:
        assert process.returncode == 130
        assert "Run the same command again to go on." in output
        assert not any(map(is_alive, trainings))
    assert not (out / "report").exists()
    assert race(*LONG, "--out", out) == 0
    assert lines(out) == undisturbed
    assert (out / "report" / "report.html").exists()
    assert not list(out.glob("*.log"))


def test_a_divergence_is_a_result(tmp_path, capsys):
    out = tmp_path / "out"
    hot = ("--lr", "10", "--min-lr", "10", "--steps", "16", "--schemes", "pre-ln,proj-spheretnorm")
    assert race(*TINY, *hot, "--on-divergence", "stop", "--out", out) == 0
    assert "diverged at step" in capsys.readouterr().err
    assert all(5 <= len(records) < 16 for records in lines(out).values())
    table = (out / "report" / "tables.csv").read_text()
    assert "results,pre-ln,val loss,diverged," in table
    assert 'comparisons,pre-ln - proj-spheretnorm,verdict,"pre-ln diverged, proj-spheretnorm diverged",' in table


def test_two_races_in_one_directory(tmp_path, capsys):
    out = tmp_path / "out"
    process = start(out)
    wait_until(lambda: (out / "race.json").exists())
    assert race(*LONG, "--out", out) == 2
    assert "another race is running" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_a_training_that_fails_ends_the_race_with_its_sentence(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    # only new processes read it
    monkeypatch.setenv("SPHERET_BACKEND", "abacus")
    assert race(*LONG, "--out", out, "--quiet") == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "-1337 ended with exit code 2" in output
    assert "abacus" in output
    assert len(list(out.glob("*.log"))) >= 1


class TestRefused:
    """One sentence, exit code 2, and nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "output"),
        [
            (["--schemes", "proj-spheretnrm"], "Did you mean 'proj-spheretnorm'?"),
            (["--schemes", "pre-ln:schedule"], "a variant is scheme:option=value"),
            (["--schemes", "pre-ln:schedule=../x"], "a variant is scheme:option=value"),
            (["--schemes", "pre-ln:schedule=sqrt"], "unknown option of pre-ln"),
            (["--seeds", "0"], "--seeds must be at least 1, got 0"),
            (["--seeds", "3,x"], "--seeds must be a number, or seeds with commas"),
            (["--seeds", ","], "--seeds must be a number, or seeds with commas"),
            (["--seeds", "3,4,3"], "has a seed twice"),
            (["--seeds=-3,4"], "each seed of --seeds must be at least 0, got -3"),
            (["--jobs", "0"], "--jobs must be at least 1, got 0"),
            (["--steps", "0"], "--steps must be at least 1"),
            (["--width", "65"], "not divisible by heads"),
            (["--head-bias", "bigram"], "unknown head_bias 'bigram'"),
            (["--data", "nothing-there"], "neither a file nor a directory nor a corpus"),
            (["--lr="], "--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got ''"),
            (["--lr", "1e-3,"], "--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got '1e-3,'"),
            (["--lr", "fast"], "--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got 'fast'"),
            (["--lr", "1e-3,5e-3,0.001"], "--lr has 0.001 twice: give each rate once"),
            (["--lr", "1e-3,0"], "each rate of --lr must be above 0 and finite, got 0.0"),
            (["--lr=-1"], "each rate of --lr must be above 0 and finite, got -1.0"),
            (["--lr", "nan"], "each rate of --lr must be above 0 and finite, got nan"),
            (["--lr", "1e-3,inf"], "each rate of --lr must be above 0 and finite, got inf"),
            (["--lr", "1e-3,1e-2", "--min-lr", "5e-3"], "--min-lr must lie between 0 and --lr 0.001, got 0.005"),
        ],
    )
    def test_bad_settings(self, arguments, output, tmp_path, capsys):
        assert race(*arguments, "--out", tmp_path / "out") == 2
        captured = capsys.readouterr().err
        assert output in captured
        assert captured.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_a_strangers_directory(self, tmp_path, capsys):
        (tmp_path / "letter.txt").write_text("dear reader")
        assert race(*TINY, "--out", tmp_path) == 2
        assert "is not empty and no race" in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]

    def test_a_file(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert race(*TINY, "--out", tmp_path / "file") == 2
        assert "is a file" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
    def test_a_damaged_race(self, tmp_path, capsys, text):
        (tmp_path / "race.json").write_text(text)
        assert race(*TINY, "--out", tmp_path) == 2
        assert ("is damaged" if text == "{" else "was not written by spheret race") in capsys.readouterr().err


class TestRaceRuns:
    def test_groups(self):
        assert tuple(e.choice.name for e in race_runs("paper", race_seeds("1"))) == PAPER_SCHEMES
        assert tuple(e.choice.name for e in race_runs("all", race_seeds("1"))) == tuple(SCHEMES)
        assert [e.name for e in race_runs("keel,paper", race_seeds("1"))][:2] == ["keel-1337", "pre-ln-1337"]
        assert len(race_runs("keel,paper", race_seeds("1"))) == 9

    def test_a_seed_of_everyone_before_the_next(self):
        assert [e.name for e in race_runs("pre-ln,keel", race_seeds("2"))] == [
            "pre-ln-1337",
            "keel-1337",
            "pre-ln-1338",
            "keel-1338",
        ]

    def test_a_number_is_how_many_seeds_and_numbers_are_the_seeds(self):
        assert race_seeds("3") == [1337, 1338, 1339]
        assert race_seeds("3,4, 9") == [3, 4, 9]
        assert race_seeds("7,") == [7]
        assert [e.name for e in race_runs("pre-ln,keel", race_seeds("9,4"))] == [
            "pre-ln-9",
            "keel-9",
            "pre-ln-4",
            "keel-4",
        ]

    def test_the_middle_rates_of_everyone_come_first(self):
        names = [run.name for run in race_runs("pre-ln,keel", race_seeds("2"), [1e-3, 2e-3, 4e-3])]
        assert names[:6] == [
            "pre-ln-lr0.002-1337",
            "keel-lr0.002-1337",
            "pre-ln-lr0.001-1337",
            "keel-lr0.001-1337",
            "pre-ln-lr0.004-1337",
            "keel-lr0.004-1337",
        ]
        assert names[6:] == [name.replace("1337", "1338") for name in names[:6]]
        assert [run.lr for run in race_runs("keel", race_seeds("1"), [1, 2, 3, 4])] == [2, 3, 1, 4]

    def test_rates_are_sorted_and_ours_are_three(self):
        assert learning_rates("1e-2, 2.5e-3,5e-3") == [0.0025, 0.005, 0.01]
        assert len(RATES) == 3
        assert learning_rates(",".join(map(str, RATES))) == list(RATES)

    def test_rates_that_are_almost_the_same_have_different_names(self):
        near = [0.001, 0.0010000001]
        assert len({run.name for run in race_runs("keel", race_seeds("1"), near)}) == 2

    def test_names_are_different(self):
        names = [
            e.name for e in race_runs("all,p-spheretnorm:p=0.3,p-spheretnorm:p=0.3:schedule=sqrt", race_seeds("3"))
        ]
        assert len(set(names)) == len(names) == 3 * (len(SCHEMES) + 2)


def metrics_line(keys):
    """A line of metrics with these keys, and those that every line has."""
    line = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "spikes": 0, "tokens_per_second": 9.0, "seconds": 1.0, **keys}
    if "val_loss" in keys:
        names = ("angle_mean", "angle_max", "alpha", "norm", "drift", "cosine", "grad_norm")
        line |= {"radius": None, "on_bound": [], "sublayers": [{"sublayer": 1, **dict.fromkeys(names)}]}
    return json.dumps(line) + "\n"


class TestScoreboard:
    def follower(self, path, name, *lines):
        (path / name).mkdir(exist_ok=True)
        (path / name / "metrics.jsonl").write_text("".join(map(metrics_line, lines)))
        return Follower(name, path / name, steps=10)

    def test_ranked_by_validation_loss(self, tmp_path):
        board = Scoreboard(
            [
                [self.follower(tmp_path, "slow", {"step": 4, "val_loss": 2.9}, {"step": 5, "loss": 2.9})],
                [self.follower(tmp_path, "gone", {"step": 3, "loss": None, "stopped": "nan"})],
                [self.follower(tmp_path, "fast", {"step": 10, "loss": 2.0, "val_loss": 2.1})],
                [self.follower(tmp_path, "new", {"step": 1, "loss": 5.0})],
                [Follower("waiting", tmp_path / "waiting", steps=10)],
            ],
            quiet=True,
        )
        board.update()
        head, *rows = board.lines()
        # of 50 steps 5, 0, 0, 9 and 10 are left
        assert head == "race: 52%"
        assert [row.split()[:2] for row in rows] == [["1", "fast"], ["2", "slow"], ["3", "new"], ["4", "gone"]]
        assert "step 5/10, val 2.9000 at step 4" in rows[1]
        assert "diverged at step 3" in rows[3]

    def test_one_that_diverged_and_goes_on_is_last(self, tmp_path):
        diverged = self.follower(
            tmp_path,
            "lost",
            {"step": 3, "loss": 40.0, "diverged": "the loss 40"},
            {"step": 5, "loss": 1.0, "val_loss": 1.0},
        )
        board = Scoreboard(
            [[diverged], [self.follower(tmp_path, "slow", {"step": 5, "loss": 2.9, "val_loss": 2.9})]], quiet=True
        )
        board.update()
        _, first, last = board.lines()
        assert "slow" in first
        assert "lost" in last
        assert "diverged at step 3, step 5/10, val 1.0000 at step 5" in last
        assert not diverged.done

    def test_runs_that_share_a_line_show_the_best(self, tmp_path):
        row = [
            self.follower(tmp_path, "pre-ln-lr0.1", {"step": 10, "val_loss": 2.9}),
            self.follower(tmp_path, "pre-ln-lr0.2", {"step": 10, "val_loss": 2.5}),
            self.follower(tmp_path, "pre-ln-lr0.4", {"step": 2, "diverged": "the loss 40", "val_loss": 1.0}),
            Follower("pre-ln-lr0.8", tmp_path / "waiting", steps=10),
        ]
        board = Scoreboard([row], quiet=True)
        board.update()
        head, line = board.lines()
        # of 40 steps 8 and 10 are left
        assert head == "race: 55%"
        assert line.split()[:2] == ["1", "pre-ln-lr0.2"]

    @pytest.mark.parametrize("text", ["garbage", "[]", "{}", "\udcff"])
    def test_a_damaged_line_is_named(self, tmp_path, text):
        follower = self.follower(tmp_path, "run", {"step": 1, "loss": 1.0})
        with (tmp_path / "run" / "metrics.jsonl").open("a", errors="surrogateescape") as file:
            file.write(text + "\n")
        with pytest.raises(ValueError, match=r"metrics.jsonl has a damaged line: delete .*run to train"):
            follower.update()

    def test_follows_what_is_added_torn_and_cut_off(self, tmp_path):
        follower = self.follower(tmp_path, "run", {"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0, "val_loss": 3.0})
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


@pytest.mark.slow
def test_the_default_race(tmp_path):
    begun = time.monotonic()
    assert race("--out", tmp_path / "out") == 0
    # below ten minutes on two free cores; this is for a machine that is busy
    assert time.monotonic() - begun < 3600
    table = (tmp_path / "out" / "report" / "tables.csv").read_text()
    places = [line.split(",")[3] for line in table.splitlines() if line.startswith("learning-rates,")]
    assert all(f"learning-rates,{name},place in the grid," in table for name in PAPER_SCHEMES)
    # the grid is of use for most of the paper's schemes
    assert places.count("inside") > len(PAPER_SCHEMES) / 2
