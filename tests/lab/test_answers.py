"""What rows that were never trained say, through every door, on the page and in words; and what they must not say."""

import csv
import html
import io
import math
import re
import shutil
import time

import pytest
from report_helpers import read_group, write_run
from study_helpers import HEAD, TWO, bowl, noise, plan_of, row, run_all

from spheret.lab.answers import group_answers
from spheret.lab.costs import costs
from spheret.lab.figures.answers import draw
from spheret.lab.ladders import ladders
from spheret.lab.page.page import page as page_of
from spheret.lab.plan import read_plan
from spheret.lab.race import race_plan
from spheret.lab.report import result_files, sections_of, study_findings, write_report
from spheret.lab.rows import FINAL, FLOOR, TUNE, Key, write_rows
from spheret.lab.seed_table import pairs
from spheret.lab.stages import stage_of, wanted
from spheret.lab.words import answer_sentence, change_words, limits

FOUR = """
[[parts]]
name = "four"
title = "Four of them"
contestants = ["pre-ln", "post-ln", "keel", "peri-ln"]
rates = [1e-3, 2e-3, 4e-3]
seeds = 3
noise_floor = "pre-ln"
"""
# how far a contestant lies from the others
SHIFT = {"pre-ln": 0.0, "post-ln": -0.2, "keel": -0.3, "peri-ln": 0.1}


def loss_of(key):
    return bowl(2e-3, 2.0 + SHIFT.get(key.contestant, 0.0))(key)


def answered(plan, rows):
    return {answer.group.name: answer for answer in group_answers(plan, rows)}


def undrawn(plan, rows):
    """The text of the page, without its figures, which take most of the time."""
    return plain(page_of(plan.title, sections_of(study_findings(plan, rows)), ()))


def study_report(plan, rows, out):
    return write_report(study_findings(plan, rows), out)


def text_of(path):
    return plain(path.read_text())


def plain(page):
    page = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)))


def contents_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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
        assert text_of(page).index(sentence) < text_of(page).index("The noise floor")

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
        assert "collapsed in 2 of 3 seeds at 0.0005, 2 steps below its best rate, loss" in text_of(page)
        # by seed, of the tuning seed and three fresh ones
        assert "The 4 runs that collapsed or diverged are those of 2 of 4 seeds (101 and 103)" in text_of(page)

    def test_p_is_corrected_for_all_pairs(self, four):
        answer = answered(*four)["four"]
        expected = {frozenset((p.first, p.second)): p.adjusted for p in pairs(answer.seed_table)}
        assert len(expected) == 3
        for names, p in expected.items():
            first, second = names
            gap, mirrored = answer.gap(first, second), answer.gap(second, first)
            assert gap.p == p
            assert (mirrored.estimate, mirrored.low, mirrored.high) == (-gap.estimate, -gap.high, -gap.low)

    def test_the_noise_floor_is_the_same_contestant_on_other_seeds(self, four):
        plan, rows = four
        answer = answered(plan, rows)["four"]
        by_stage = {
            stage: [r.val_loss for k, r in rows.items() if k.contestant == "pre-ln" and stage_of(k) == stage]
            for stage in (FINAL, FLOOR)
        }
        means = {stage: math.fsum(losses) / len(losses) for stage, losses in by_stage.items()}
        assert answer.floor.interval.estimate == pytest.approx(means[FLOOR] - means[FINAL])
        assert limits(answer)[0].startswith("Noise floor: pre-ln on 3 other seeds")

    def test_no_difference_comes_with_what_would_have_been_seen(self, tmp_path):
        plan = plan_of(tmp_path, TWO)
        answer = answered(plan, run_all(plan, bowl(2e-3, deviation=0.1))[0])["two"]
        assert answer.gap("pre-ln", "post-ln").p > 0.05
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
        assert "not bracketed: its best learning rate 0.008 is the highest that was tried" in " ".join(limits(answer))
        assert "post-ln" not in (*answer.standing.leaders, *answer.standing.behind)
        # its loss is lower, and the verdict says why it does not count
        assert f"post-ln ({answer.by_label['post-ln'].mean:.3f}" not in answer_sentence(answer).partition("wins")[0]

    def test_a_run_that_stalled_is_marked_wherever_it_is_printed(self, tmp_path):
        plan = plan_of(tmp_path, FOUR)

        def stalling(key):
            late = key.contestant == "keel" and key.seed in (1, 102) and key.rate == 2e-3
            curve = [(3, 3.0), (5, 3.0), (10, loss_of(key))] if late else [(5, 2.5), (10, loss_of(key))]
            return row(key, loss_of(key), curve=curve, unigram_entropy=3.0)

        rows, _ = run_all(plan, stalling)
        answer, text = answered(plan, rows)["four"], undrawn(plan, rows)
        assert answer.by_label["keel"].stalled == "stalled in 1 of 3 seeds"
        assert "keel stalled in 1 of 3 seeds" in answer_sentence(answer)
        assert "compared; stalled in 1 of 3 seeds" in text
        assert "bracketed; stalled at 0.002" in text
        assert "Stalled: a finished run that was at the loss of token frequencies" in text
        assert "2 stalled. Collapsed:" in text
        assert text.count("finished (stalled)") == 2 * 2
        # it counts as finished
        assert "keel" in answer.seed_table.means

    def test_who_has_most_of_the_noise_is_named(self, tmp_path):
        plan = plan_of(tmp_path, FOUR)
        wild = {101: 0.014, 102: -0.007, 103: -0.007}
        rows, _ = run_all(plan, lambda k: loss_of(k) + (wild.get(k.seed, 0) if k.contestant == "keel" else 0))
        answer = answered(plan, rows)["four"]
        assert answer.seed_table.noisy == ()
        label, share = answer.dominant
        assert label == "keel"
        assert share > 0.5
        words = f"{share:.0%} of the pooled noise"
        assert f"{words} is that of keel" in " ".join(limits(answer))
        assert f"{words}, paired p = {answer.paired_p('keel', 'pre-ln'):.2g}" in undrawn(plan, rows)

    def test_where_no_rate_gives_a_loss(self, tmp_path):
        plan = plan_of(tmp_path, FOUR + "ladder = [{layers = 24}]")
        rows, _ = run_all(plan, lambda k: row(k, None, "diverged") if k.contestant == "keel" else loss_of(k))
        for answer in group_answers(plan, rows):
            assert answer.by_label["keel"].state == "hopeless"
            assert "no learning rate gave a loss" in answer.by_label["keel"].reason
            assert sum(answer.missing.values()) == 0
        assert "step 3: diverged" in undrawn(plan, rows)

    def test_one_seed_has_no_verdict(self, tmp_path):
        plan = plan_of(tmp_path, TWO + "seeds = 1")
        answer = answered(plan, run_all(plan, loss_of)[0])["two"]
        assert (answer.seed_table, answer.standing) == (None, None)
        assert "no winner" in answer_sentence(answer)
        assert "p =" not in answer_sentence(answer)
        # everything was run, and the key that would give an answer is named
        assert change_words([answer]).startswith("two has no answer: change seeds")

    def test_a_half_finished_stage_is_compared_on_common_seeds(self, four):
        plan, rows = four
        missing = {k for k in rows if (k.contestant, k.seed) == ("peri-ln", 102) or k.contestant == "keel"}
        answer = answered(plan, {k: v for k, v in rows.items() if k not in missing})["four"]
        assert answer.seed_table.seeds == (101, 103)
        assert "2 of 3 seeds that all compared contestants have" in " ".join(limits(answer))
        assert "Not compared: keel (still tuning)." in limits(answer)

    def test_results_at_another_rate_are_not_taken(self, four):
        plan, rows = four
        stranger = next(k for k in rows if stage_of(k) == FINAL)._replace(rate=0.5)
        more = {**rows, stranger: row(stranger, 0.1)}
        assert answered(plan, more) == answered(plan, rows)
        assert "1, in no table of this page" in undrawn(plan, more)

    def test_what_is_missing_is_what_is_wanted(self, four):
        plan, rows = four
        order = sorted(rows)
        for count in range(0, len(order), 5):
            some = {key: rows[key] for key in order[:count]}
            answer, todo = answered(plan, some)["four"], wanted(plan, some)
            for stage in (TUNE, FINAL, FLOOR):
                now = sum(stage_of(key) == stage for key in todo)
                # seeds of what is still being tuned come later
                assert answer.missing[stage] == now if stage == TUNE else answer.missing[stage] >= now


class TestWhatToChange:
    @pytest.mark.parametrize(
        ("more", "result", "key"),
        [
            ("", lambda key: loss_of(key), ""),
            ("seeds = 1", lambda key: loss_of(key), "seeds"),
            ("extend = 0", lambda key: bowl(1.0)(key), "extend above 0"),
            ("", lambda key: row(key, None, "diverged"), "rates to lower ones"),
            ("", lambda key: row(key, 3.0, "collapsed") if key.seed > 100 else loss_of(key), "train.warmup"),
        ],
    )
    def test_a_finished_study_without_an_answer_names_the_key(self, more, result, key, tmp_path):
        plan = plan_of(tmp_path, TWO + more)
        rows, _ = run_all(plan, result)
        (answer,) = group_answers(plan, rows)
        words = change_words([answer])
        assert (words == "") == (answer.standing is not None) == (key == "")
        assert key in words


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

    def losses(self, runs):
        return {label: {run.seed: run.val_loss.value for run in runs.contestants[label]} for label in self.LABELS}

    def assert_same(self, answer, runs):
        assert answer.standing == runs.answer.standing
        assert answer.failures == runs.answer.failures
        assert answer.seen == pytest.approx(runs.answer.seen)
        compared = 0
        for first in self.LABELS:
            for second in self.LABELS:
                if first != second:
                    gap, other = answer.gap(first, second), runs.answer.gap(first, second)
                    assert (gap.p, gap.significant) == (pytest.approx(other.p), other.significant)
                    assert (gap.estimate, gap.low) == (pytest.approx(other.estimate), pytest.approx(other.low))
                    compared += 1
        assert compared == 6
        assert runs.answer.standing.winner == "keel"

    def test_a_race_says_what_a_report_says(self, runs):
        plan = race_plan(",".join(self.LABELS), [1, 2, 3], [3e-3], {})
        rows = {
            Key("race", label, 3e-3, seed): row(Key("race", label, 3e-3, seed), loss)
            for label, by_seed in self.losses(runs).items()
            for seed, loss in by_seed.items()
        }
        assert wanted(plan, rows) == []
        (answer,) = group_answers(plan, rows)
        self.assert_same(answer, runs)

    def test_a_study_says_what_a_report_says(self, runs, tmp_path):
        plan = plan_of(tmp_path, TWO.replace('"pre-ln", "post-ln"', '"pre-ln", "post-ln", "keel"'))
        losses = self.losses(runs)

        def result(key):
            # the seeds of the search are others
            return losses[key.contestant][key.seed - 100] if stage_of(key) == FINAL else loss_of(key)

        (answer,) = group_answers(plan, run_all(plan, result)[0])
        self.assert_same(answer, runs)

    def test_a_race_compares_on_the_seeds_of_the_search(self):
        plan = race_plan("pre-ln,keel", [1337, 1338], [1e-3, 2e-3, 4e-3], {})
        rows, order = run_all(plan, bowl(2e-3))
        # no rate is added, and no fresh seed
        assert {(key.rate, key.seed) for key in order} == {(r, s) for r in (1e-3, 2e-3, 4e-3) for s in (1337, 1338)}
        (answer,) = group_answers(plan, rows)
        assert answer.seed_table.seeds == (1337, 1338)
        assert {entry.rate for entry in answer.entries} == {2e-3}
        assert sum(answer.missing.values()) == 0


class TestLadder:
    @pytest.fixture(scope="class")
    def climbed(self, tmp_path_factory):
        text = FOUR + "ladder = [{layers = 24}, {layers = 48}]"
        plan = plan_of(tmp_path_factory.mktemp("plan"), text)
        doublings = {"four": 0, "four-layers24": 1, "four-layers48": 2}

        def result(key):
            size = doublings[key.group]
            slope = {"post-ln": -0.1, "peri-ln": 0.05}.get(key.contestant, 0.0)
            return row(key, loss_of(key) - 0.2 * size + slope * size, flops=10**6 * 2**size)

        return plan, run_all(plan, result)[0]

    def test_the_gap_changes_per_doubling(self, climbed):
        (ladder,) = ladders(group_answers(*climbed))
        assert (ladder.key, ladder.sizes, ladder.reference) == ("layers", (12.0, 24.0, 48.0), "pre-ln")
        slopes = {climb.label: climb.slope for climb in ladder.climbs}
        for label, slope in (("post-ln", -0.1), ("peri-ln", 0.05), ("keel", 0.0)):
            assert slopes[label].interval.estimate == pytest.approx(slope, abs=0.02)
            assert (slopes[label].where, slopes[label].trouble) == ("per doubling of layers", "")

    def test_the_gain_is_read_between_the_sizes_of_the_reference(self, climbed):
        (ladder,) = ladders(group_answers(*climbed))
        gains = {climb.label: [step.gain for step in climb.steps] for climb in ladder.climbs}
        # 0.2 below a reference that falls by 0.2 per doubling
        assert gains["post-ln"][0].factor == pytest.approx(2, rel=0.15)
        assert gains["post-ln"][2].beyond == "below"
        assert gains["peri-ln"][0].beyond == "above"

    def test_it_is_on_the_page(self, climbed):
        assert "change per doubling" in undrawn(*climbed)
        assert [drawing.name for drawing in draw([], ladders(group_answers(*climbed)))] == ["four-ladder"]

    def test_a_part_without_the_reference_takes_its_first(self, tmp_path):
        plan = plan_of(tmp_path, FOUR.replace('"pre-ln", ', "").replace('noise_floor = "pre-ln"', ""))
        assert group_answers(plan, {})[0].reference == "post-ln"


def test_losses_at_equal_cost(tmp_path):
    plan = plan_of(tmp_path, TWO)
    slow = {"pre-ln": 1.0, "post-ln": 4 / 3}
    flops = {"pre-ln": 10, "post-ln": 20}

    def result(key):
        names = {"flops": flops[key.contestant], "step_seconds": slow[key.contestant]}
        return row(key, loss_of(key), **names)

    answer = answered(plan, run_all(plan, result)[0])["two"]
    base, found = costs(answer)
    by_label = {cost.label: cost for cost in found}
    assert base == "pre-ln"
    assert by_label["post-ln"].flops == 2
    assert by_label["post-ln"].seconds == pytest.approx(4 / 3)
    # the curve of the helper falls by 0.5 from step 5 to step 10
    assert by_label["post-ln"].at_equal_flops == pytest.approx(by_label["post-ln"].loss + 0.5)
    assert by_label["post-ln"].at_equal_seconds == pytest.approx(by_label["post-ln"].loss + 0.25)
    assert by_label["pre-ln"].at_equal_seconds == by_label["pre-ln"].loss


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
            assert "are still to come" in text
            assert change_words([answer]) == ""
            known.append(answer.standing is not None)
        # twelve tries, then two seeds of two contestants at least; once there is an answer there is one until the end
        first = known.index(True)
        assert first >= 12 + 4
        assert known == [False] * first + [True] * (len(order) - first)
        assert "Everything that the plan asks for has been run" in undrawn(plan, rows)
        # with figures: nothing, one run, one seed of some
        for count in (0, 1, 11):
            assert study_report(plan, {key: rows[key] for key in order[:count]}, tmp_path).is_file()

    def test_the_same_rows_give_the_same_bytes(self, four, page, tmp_path):
        plan, rows = four
        write_rows(tmp_path / "rows.jsonl", rows.values())
        again = study_report(plan, dict(reversed(rows.items())), tmp_path / "out")
        assert contents_of(again.parent) == contents_of(page.parent)

    def test_numbers_have_sources(self, four, page):
        rows = four[1]
        cells = list(csv.DictReader(io.StringIO((page.parent / "tables.csv").read_text())))
        numbers = [cell for cell in cells if cell["value"]]
        assert all(cell["source"] for cell in numbers)
        checked = 0
        for cell in numbers:
            if cell["table"] != "losses-four" or cell["column"] != "val loss":
                continue
            names = re.findall(r"(run-\d+)\.val_loss", cell["source"])
            losses = [r.val_loss for r in rows.values() if r.contestant == cell["row"] and r.run in names]
            assert float(cell["value"]) == pytest.approx(math.fsum(losses) / len(losses))
            checked += 1
        assert checked == 3

    def test_an_earlier_report_loses_figures_that_are_gone(self, four, page, tmp_path):
        shutil.copytree(page.parent, tmp_path / "out")
        assert (tmp_path / "out" / "figures" / "four-pairs.svg").exists()
        study_report(four[0], {}, tmp_path / "out")
        assert not list((tmp_path / "out" / "figures").iterdir())

    def test_a_stranger_is_not_overwritten(self, four, tmp_path):
        (tmp_path / "report.html").write_text("mine")
        with pytest.raises(FileExistsError, match=r"holds report\.html"):
            study_report(*four, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]

    def test_a_map_for_what_gets_no_seeds(self, tmp_path):
        plan = plan_of(tmp_path, TWO + "seeds = 0\nextend = 0")

        def result(key):
            return row(key, 3.0, "collapsed") if key.rate > 3e-3 else loss_of(key)

        page = study_report(plan, run_all(plan, result)[0], tmp_path / "out")
        assert "of 6 runs, 4 finished, 2 collapsed, 0 diverged" in text_of(page)
        assert {path.stem for path in (page.parent / "figures").iterdir()} == {"two-collapse"}

    @pytest.mark.parametrize("seeds", [0, 2])
    def test_whatever_became_of_the_runs(self, seeds, tmp_path):
        plan = plan_of(tmp_path, TWO + f"seeds = {seeds}\ntuning_seeds = 2\nextend = 0\nladder = [{{layers = 24}}]")
        ends = [(None, "diverged"), (5.0, "diverged"), (3.0, "collapsed"), (None, "finished")]

        def result(key):
            bad = round(abs(noise(key, "end")) * 8)
            return row(key, *ends[bad]) if bad < 4 else row(key, loss_of(key), curve=[], step_seconds=None)

        assert study_report(plan, run_all(plan, result)[0], tmp_path / "out").is_file()

    def test_the_files_of_documents(self, four, page):
        files = result_files(*four)
        assert files.keys() == {"tables.md", "four-answer.svg", "four-bowls.svg", "four-pairs.svg"}
        assert b"## Four of them: loss" in files["tables.md"]
        assert b"Every run" not in files["tables.md"]
        # the very figures of the report
        for name in files.keys() - {"tables.md"}:
            assert files[name] == (page.parent / "figures" / name).read_bytes()


@pytest.mark.slow
def test_five_hundred_contestants(tmp_path):
    values = ", ".join(str(30 + step) for step in range(500))
    path = tmp_path / "plan.toml"
    path.write_text(
        f'{HEAD}[[parts]]\nname = "many"\nrates = [1e-3, 2e-3, 4e-3]\nseeds = 5\nnoise_floor = "pre-ln"\n'
        f'contestants = ["pre-ln", {{schemes = ["post-ln"], settings = {{warmup = [{values}]}}}}]\n'
    )
    plan, rows = read_plan(path), {}
    while keys := wanted(plan, rows):
        rows |= {key: row(key, bowl(2e-3, 2 + 0.2 * noise(key.contestant))(key)) for key in keys}
    assert len(rows) > 4000
    began = time.process_time()
    page = study_report(plan, rows, tmp_path / "out")
    assert time.process_time() - began < 60
    assert "The 20 lowest of 501" in text_of(page)
    assert "The first 20 of 501" in text_of(page)
