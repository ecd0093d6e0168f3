"""A race: real trainings in child processes, killed, resumed and refused as people will do it."""

import html
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documented import not_printed, shown
from planted import planted
from report_helpers import cell, cells, read_group

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.lab.answers import group_answers
from spheret.lab.laboratory import STUDY_COSTS, Laboratory
from spheret.lab.plan import read_plan
from spheret.lab.race import RATES, learning_rates, race_plan, race_seeds
from spheret.lab.rows import read_rows
from spheret.lab.stages import wanted
from spheret.runs.run import open_run
from spheret.train.drill import timeless

TINY = (
    "--layers", "1", "--heads", "2", "--width", "16", "--block", "16", "--batch-size", "2", "--eval-windows", "8",
    "--lr", "3e-3",
)  # fmt: skip
VARIANTS = "pre-ln,proj-spheretnorm,proj-spheretnorm:schedule=sqrt"
LABELS = ("pre-ln", "proj-spheretnorm", "proj-spheretnorm (schedule=sqrt)")
NAMES = tuple(
    f"{name}-{seed}" for name in ("pre-ln", "proj-spheretnorm", "proj-spheretnorm-schedule=sqrt") for seed in (3, 4)
)
SHORT = (*TINY, "--steps", "10", "--schemes", VARIANTS, "--seeds", "3,4")
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
    """A race of three with two seeds, two of them the same scheme under two names."""
    out = tmp_path_factory.mktemp("race") / "out"
    with planted(out.parent / "corpus"):
        assert race(*SHORT, "--out", out) == 0
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
        assert output[NAMES[2]] == output[NAMES[4]]
        assert output[NAMES[3]] == output[NAMES[5]]
        gap = read_group([finished]).answer.gap(*LABELS[1:])
        assert (gap.estimate, gap.significant) == (0.0, False)

    def test_nothing_else_is_left(self, finished):
        written = {"race.json", "configs", "results.jsonl", "costs.json", "report", "plan.toml"}
        assert {p.name for p in finished.iterdir()} == {*NAMES, *written}

    def test_the_report_is_that_of_the_runs(self, finished):
        # in the place of the other one, because a page links its runs
        again = finished / "again"
        assert main(["report", *(str(finished / name) for name in NAMES), "--out", str(again)]) == 0
        for path in (p for p in again.rglob("*") if p.is_file()):
            assert path.read_bytes() == (finished / "report" / path.relative_to(again)).read_bytes(), path
        shutil.rmtree(again)

    def test_report_race_and_rows_have_one_standing(self, finished):
        rows = read_rows(finished / "results.jsonl")
        assert {row.run for row in rows.values()} == set(NAMES)
        (answer,) = group_answers(race_plan(VARIANTS, [3, 4], [3e-3], {}), rows)
        of_runs = read_group([finished]).answer
        assert set(of_runs.seed_table.means) == set(LABELS)
        assert answer.seed_table.means == of_runs.seed_table.means
        assert (answer.standing, answer.failures) == (of_runs.standing, of_runs.failures)
        assert {pair: each.adjusted for pair, each in answer.pairs.items()} == {
            pair: each.adjusted for pair, each in of_runs.pairs.items()
        }

    def test_the_steps_were_measured_side_by_side(self, finished):
        (cost,) = STUDY_COSTS.read(finished / "costs.json").groups.values()
        assert set(cost.seconds) == set(LABELS)
        assert cost.machine["threads"] == 1
        rows = read_rows(finished / "results.jsonl")
        # a busy machine gives no number
        assert {row.step_seconds is not None for row in rows.values()} == {cost.precise}
        shown = [c for c in cells(finished / "report") if c["column"] == "ms per step"]
        assert len(shown) == (3 if cost.precise else 0)
        assert all(c["text"] == f"{1000 * cost.seconds[c['row']]:.1f}" for c in shown)

    def test_it_proposes_a_study_of_its_contestants(self, finished, tmp_path):
        plan = read_plan(finished / "plan.toml")
        (group,) = plan.groups
        assert tuple(each.label for each in group.contestants) == LABELS
        assert min(group.part.rates) < 3e-3 < max(group.part.rates)
        assert group.given["train"]["steps"] == 10
        Laboratory(plan, tmp_path / "study").check()

    def test_again_it_only_writes_the_report(self, finished, capsys):
        kept = [*finished.glob("*/[ms]*.json*")]
        # the metrics and the sample of each
        assert len(kept) == 12
        # costs that a busy machine has blurred are measured again
        measured = all(result.step_seconds for result in read_group([finished]).every)
        kept += [finished / "costs.json"] if measured else []
        before = {path: path.stat().st_mtime_ns for path in kept}
        # and stand in the rows
        written = {name: (finished / name).read_bytes() for name in ("plan.toml", "results.jsonl")[: 1 + measured]}
        (finished / "report" / "report.html").unlink()
        assert race(*SHORT, "--out", finished) == 0
        output = capsys.readouterr()
        assert "all 6 runs" in output.err
        assert (finished / "report" / "report.html").exists()
        assert {path: path.stat().st_mtime_ns for path in kept} == before
        assert {name: (finished / name).read_bytes() for name in written} == written
        self.check_outcome(finished, output.out.splitlines())

    def check_outcome(self, finished, printed):
        """The contestants, best first; the path; what comes next; the verdict, which is the first of the page."""
        answer = read_group([finished]).answer
        path, following, verdict = printed[-3:]
        assert path == str(finished / "report" / "report.html")
        assert following.startswith(f"next: spheret study {finished / 'plan.toml'}, about ")
        assert ("wins" in verdict) == (answer.standing.winner is not None)
        page = html.unescape((finished / "report" / "report.html").read_text())
        assert page.index(verdict) < page.index("<table")
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed if line.startswith("│")]
        assert [row[:3] for row in rows] == [
            [str(place), entry.label, "0.003"] for place, entry in enumerate(answer.entries, 1)
        ]
        assert [row[3] for row in rows] == [f"{entry.mean:.3f}" for entry in answer.entries]

    def test_other_settings_are_refused(self, finished, capsys):
        assert race(*SHORT, "--steps", "12", "--out", finished) == 2
        output = capsys.readouterr().err
        assert "holds a race with other settings (steps is 10 there and 12 here" in output
        assert "another --out" in output

    def test_fewer_contestants_are_a_smaller_report(self, finished, tmp_path, capsys):
        out = tmp_path / "copy"
        shutil.copytree(finished, out)
        words = (*TINY, "--steps", "10", "--schemes", "pre-ln", "--seeds", "3,4", "--out", out, "--quiet")
        assert race(*words) == 0
        assert capsys.readouterr().out.splitlines() == [str(out / "report" / "report.html")]
        assert {c["row"] for c in cells(out / "report") if c["table"] == "runs"} == {"pre-ln-3", "pre-ln-4"}


def test_text_of_ones_own_in_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "my.txt"
    text.write_text("".join(f"{number}. A line of my own, and no other.\n" for number in range(1500))[:60_000])
    out = tmp_path / "out"
    words = (*TINY, "--schemes", "pre-ln", "--steps", "2", "--seeds", "5,", "--out", out)
    assert race("--data", text, *words) == 0
    output = capsys.readouterr()
    first, second = output.err.splitlines()[:2]
    assert first == f"race: 1 run of 1 contestants on {text}, into {out}."
    assert second.startswith(f"{text} as bytes: train ")
    assert str(out / "report" / "report.html") in output.out.splitlines()
    # what docs/find-out-which.md shows of any race: the head of its table, and where its page is
    lines = [line for line in shown("find-out-which.md") if "contestant" in line or "runs/look/report" in line]
    missing = not_printed("find-out-which.md", output.out.replace(str(out), "runs/look"))
    # the third is the head of a study's table, which has one more column
    assert [line in missing for line in lines] == [False, False, True]
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
        best = min((0.005, 0.02), key=lambda rate: lines(tuned)[f"pre-ln-lr{rate}-1337"][-1]["val_loss"])
        rate = cell(tuned / "report", "results", "pre-ln", "lr")
        assert (float(rate["value"]), rate["source"]) == (best, f"pre-ln-lr{best}-1337/config.json[train.lr]")
        (group,) = {c["table"] for c in cells(tuned / "report") if c["table"].startswith("bowls-")}
        assert read_group([tuned]).answer.by_label["pre-ln"].state == "edge"
        assert (tuned / "report" / "figures" / f"{group.removeprefix('bowls-')}-bowls.svg").exists()
        # the rate changes nothing in the cost of a step
        (cost,) = STUDY_COSTS.read(tuned / "costs.json").groups.values()
        assert list(cost.seconds) == ["pre-ln"]

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
        # `test_study.py` kills the same executor with kill -9
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
    assert race(*LONG, "--out", out) == 0
    assert lines(out) == undisturbed
    assert (out / "report" / "report.html").exists()
    assert not list(out.glob("*.log"))


def test_a_divergence_is_a_result(tmp_path, capsys):
    out = tmp_path / "out"
    hot = ("--lr", "10", "--min-lr", "10", "--steps", "16", "--schemes", "pre-ln,proj-spheretnorm")
    assert race(*TINY, *hot, "--on-divergence", "stop", "--out", out) == 0
    assert all(5 <= len(records) < 16 for records in lines(out).values())
    assert read_group([out]).answer.failures == {"diverged": {"pre-ln": [10.0], "proj-spheretnorm": [10.0]}}
    assert cell(out / "report", "results", "pre-ln", "val loss")["text"] == "diverged"
    # nothing is proposed, and the verdict names both with their rate
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == str(out / "report" / "report.html")
    assert "pre-ln at 10; proj-spheretnorm at 10" in printed[-1]
    assert not (out / "plan.toml").exists()


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
            (["--seeds", "3,x"], "each number of --seeds must be a whole number of at least 0, got 'x'"),
            (["--seeds", ","], "each number of --seeds"),
            (["--seeds", "3,4,3"], "has a seed twice"),
            (["--seeds=-3,4"], "each number of --seeds must be a whole number of at least 0, got '-3'"),
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


class TestPlan:
    def contestants(self, words):
        (group,) = race_plan(words, [1337], [1e-3], {}).groups
        return [each.label for each in group.contestants]

    def order(self, seeds, rates):
        return [
            (key.contestant, key.rate, key.seed) for key in wanted(race_plan("pre-ln,keel", seeds, rates, {}), {})
        ]

    def test_groups(self):
        assert self.contestants("paper") == list(PAPER_SCHEMES)
        assert self.contestants("all") == list(SCHEMES)
        assert self.contestants("keel,paper")[:2] == ["keel", "pre-ln"]
        assert len(self.contestants("keel,paper")) == 9

    def test_a_seed_of_everyone_before_the_next(self):
        assert self.order([9, 4], [1e-3]) == [
            ("pre-ln", 1e-3, 9), ("keel", 1e-3, 9), ("pre-ln", 1e-3, 4), ("keel", 1e-3, 4),
        ]  # fmt: skip

    def test_the_middle_rates_of_everyone_come_first(self):
        order = self.order([1, 2], [1e-3, 2e-3, 4e-3])
        first = [(name, rate, 1) for rate in (2e-3, 1e-3, 4e-3) for name in ("pre-ln", "keel")]
        assert order == [*first, *((name, rate, 2) for name, rate, _ in first)]

    def test_a_number_is_how_many_seeds_and_numbers_are_the_seeds(self):
        assert race_seeds("3") == [1337, 1338, 1339]
        assert race_seeds("3,4, 9") == [3, 4, 9]
        assert race_seeds("7,") == [7]

    def test_rates_are_sorted_and_ours_are_three(self):
        assert learning_rates("1e-2, 2.5e-3,5e-3") == [0.0025, 0.005, 0.01]
        assert len(RATES) == 3
        assert learning_rates(",".join(map(str, RATES))) == list(RATES)

    def test_names_of_runs_are_different(self, prepared, tmp_path):
        shared = {"data": {"path": str(prepared)}, "model": {"head": "tied", "head_bias": "none"}}
        words = "all,p-spheretnorm:p=0.3,p-spheretnorm:p=0.3:schedule=sqrt,pre-ln:head=shifted"
        plan = race_plan(words, [1, 2], [0.001, 0.0010000001], shared)
        laboratory = Laboratory(plan, tmp_path, flat=True)
        names = [laboratory.name(key)[0] for key in wanted(plan, {})]
        assert len(set(names)) == len(names) == 4 * (len(SCHEMES) + 3)
        assert "p-spheretnorm-p=0.3-schedule=sqrt-lr0.001-1" in names


@pytest.mark.slow
def test_the_default_race(tmp_path):
    begun = time.monotonic()
    assert race("--out", tmp_path / "out") == 0
    # below ten minutes on two free cores; this is for a machine that is busy
    assert time.monotonic() - begun < 3600
    entries = read_group([tmp_path / "out"]).answer.entries
    assert {entry.scheme for entry in entries} == set(PAPER_SCHEMES)
    # the grid is of use for most of the paper's schemes
    assert sum(entry.search.bracketed for entry in entries) > len(PAPER_SCHEMES) / 2
