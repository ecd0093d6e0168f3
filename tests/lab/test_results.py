"""docs/results: every figure, table and marked part of a page is what the results give, byte for byte."""

import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from scripts import script
from study_helpers import bowl, noise, row

from spheret.cli import main
from spheret.lab.answers import group_answers
from spheret.lab.laboratory import Laboratory, Place
from spheret.lab.plan import PLANS, read_plan
from spheret.lab.rows import Key, read_rows, write_rows
from spheret.lab.stages import wanted
from spheret.runs.run import open_run

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"

# by how much a contestant lies off Pre-LN at 12 layers, and how that changes per doubling
SHIFTS = {
    **dict.fromkeys(("proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm"), (0.05, -0.2)),
    "peri-ln": (0.1, 0.1),
    "keel": (0.3, 0.0),
    "geonorm": (0.2, 0.0),
}


@pytest.fixture(scope="module")
def build():
    return script("docs/results/build.py")


def table_of(text):
    """The verdict on every claim."""
    cells = [line.split(" | ") for line in text.splitlines()[2:]]
    return {cell[0].removeprefix("| "): cell[2].strip("*") for cell in cells}


class AsCommitted(NamedTuple):
    """Stands for a drawing: the file of that name as it lies in docs/results."""

    name: str

    @property
    def themed_svg(self):
        return (RESULTS / "figures" / self.name).read_text()


# drawing the figures takes half a minute
@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_everything_follows_from_the_committed_file(build, drawn, monkeypatch):
    if not drawn:
        monkeypatch.setattr(build, "draw", lambda chart, with_png: AsCommitted(f"{chart.name}.svg"))
    files = build.files()
    for path, data in files.items():
        assert path.read_bytes() == data, f"{path} is not what the results give: run make results"
    assert set((RESULTS / "figures").iterdir()) == {path for path in files if path.suffix == ".svg"}


def test_every_row_is_of_its_plan(build):
    for study, plan in build.STUDIES.items():
        if not build.rows_of(study):
            continue
        asked = {(group.name, each.label) for group in read_plan(plan).groups for each in group.contestants}
        rows = read_rows(RESULTS / f"{study}.jsonl")
        assert rows
        assert {(key.group, key.contestant) for key in rows} <= asked


# a part of depth has a vocabulary that is trained first
@pytest.mark.parametrize("study", [pytest.param("depth", marks=pytest.mark.slow), "modern", "streams", "length"])
def test_the_names_of_the_committed_runs_follow_from_their_settings(build, study, tmp_path):
    rows = read_rows(RESULTS / f"{study}.jsonl")
    assert Laboratory(read_plan(build.STUDIES[study]), tmp_path, Place(quiet=True)).join(rows.values()) == len(rows)


class TestClaims:
    """The table of claims, from runs that were never trained."""

    @pytest.fixture(scope="class")
    def plan(self):
        return read_plan(PLANS["depth"])

    def verdicts(self, build, plan, rows):
        studies = {study: {} for study in build.STUDIES}
        for study, path in build.STUDIES.items():
            answers = group_answers(plan if study == "depth" else read_plan(path), rows if study == "depth" else {})
            studies[study] = {answer.group.name: answer for answer in answers}
        return table_of(build.claims_table(studies, {"normed": (0, 60), "plain": (30, 60)}, []))

    def result(self, key):
        start, change = SHIFTS.get(key.contestant, (0.0, 0.0))
        doublings = {"depth-layers24": 1.0, "depth-layers36": 1.585}.get(key.group, 0.0)
        loss = bowl(7e-3, 2.0 + start + change * doublings)(key) + 0.002 * noise(*key)
        return row(key, loss)

    def test_the_words_follow_the_rows(self, build, plan):
        nothing = self.verdicts(build, plan, {})
        assert nothing.pop("The normed branch trains where the plain projection collapses.") == "holds"
        assert set(nothing.values()) == {"not run", "not decided", "not testable here"}
        rows = {}
        while keys := wanted(plan, rows):
            rows |= {key: self.result(key) for key in keys}
        verdicts = self.verdicts(build, plan, rows)
        expected = {
            "SpheretNorm has a lower loss than Pre-LN at 24 and 36 layers.": "holds",
            "At 12 layers Pre-LN has the lower loss.": "holds",
            "The order of the two changes between 12 and 24 layers.": "holds",
            "SpheretNorm has a lower loss than Peri-LN at 24 and 36 layers.": "holds",
            "SpheretNorm has a lower loss than KEEL.": "holds",
            "KEEL is among the weakest.": "not decided",
            "SpheretNorm has a lower loss than GeoNorm as published.": "holds",
            "Peri-LN is the strongest baseline at 24 and 36 layers.": "does not hold",
            "p = 0.5, 1 and 2 are within 0.04 of one another.": "holds",
            "Steps that shrink as 1/sqrt(l) are better than constant ones.": "does not hold",
            "The projection is ahead of Pre-LN after 300 updates.": "does not hold",
            "Post-LN is less stable than Pre-LN.": "not decided",
            "It is still ahead after 4,800 updates.": "not run",
        }
        assert {claim: verdicts[claim] for claim in expected} == expected
        # a rung that was not run leaves the claim open
        deep = self.verdicts(build, plan, {key: each for key, each in rows.items() if key.group != "depth-layers24"})
        assert deep["SpheretNorm has a lower loss than Pre-LN at 24 and 36 layers."] == "not run"
        assert deep["Peri-LN is the strongest baseline at 24 and 36 layers."] == "not run"


class TestLength:
    """What README and the figure say of the lead, from runs that were never trained."""

    def answers(self, build, later, rungs=3):
        """Three lengths; the gap of the projection to Pre-LN is -0.14, and that times `later` at each next one."""
        plan, rows = read_plan(PLANS["length"]), {}
        places = {group.name: number for number, group in enumerate(plan.groups)}

        def result(key):
            place = places[key.group]
            gap = -0.14 * later**place if key.contestant == "proj-spheretnorm" else 0.0
            loss = bowl(5e-3, 2.27 - 0.5 * place + gap)(key) + 0.002 * noise(*key)
            return row(key, loss, steps=300 * 4**place, tokens=307_200 * 4**place)

        while keys := wanted(plan, rows):
            rows |= {key: result(key) for key in keys}
        kept = {key: each for key, each in rows.items() if places[key.group] < rungs}
        return group_answers(plan, kept, build.read_ngrams(build.HERE / "length.jsonl"))

    def finding(self, build, answers):
        return build._by_length({"length": {each.group.name: each for each in answers}, "length-deep": {}})

    @pytest.mark.parametrize(
        ("later", "words"), [(0.4, ("shrinks", "a lead is left")), (0.0, ("shrinks", "no significant lead")),
        (-0.5, ("shrinks", "a lead is left")), (-0.7, ("Pre-LN is ahead",)), (2.0, ("grows", "a lead is left"))],
    )  # fmt: skip
    def test_the_words_follow_the_rows(self, build, later, words):
        answers = self.answers(build, later, rungs=2 if later == -0.7 else 3)
        text = self.finding(build, answers)
        assert [word for word in words if word not in text] == []
        chart = build.lead_chart(answers)
        gap = next(line for line in chart.panels[1].lines if line.label == "proj-spheretnorm")
        assert list(gap.y) == pytest.approx([-0.14 * later**n for n in range(len(gap.y))], abs=0.02)
        assert all(low < y < high for low, y, high in zip(gap.low, gap.y, gap.high, strict=True))
        assert "bigram" in {line.label for line in chart.panels[0].lines}

    def test_one_length_is_no_answer(self, build):
        answers = self.answers(build, 0.4, rungs=1)
        assert self.finding(build, answers) == ""
        assert build.lead_chart(answers) is None


def test_default_rates_come_from_the_best_study_that_has_three(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "HERE", tmp_path)

    def write(plan, best, **rates):
        keys = [Key(plan, name.replace("_", "-"), rate, 1) for name, tried in rates.items() for rate in tried]
        write_rows(tmp_path / f"{plan}.jsonl", [row(key, bowl(best)(key), steps=300) for key in keys])

    three = (2.5e-3, 5e-3, 1e-2)
    write("depth", 2.5e-3, pre_ln=three, keel=three[:2])
    # part of a study: a scheme with two rates is not known yet
    write("defaults", 1e-2, pre_ln=three, keel=three, ngpt=three[:2])
    assert build.default_rates() == {"pre-ln": (2.5e-3, "depth"), "keel": (1e-2, "defaults")}
    assert tomllib.loads(build.rates_file()) == {"depth": {"pre-ln": 2.5e-3}, "defaults": {"keel": 1e-2}}
    (answer,) = group_answers(read_plan(PLANS["defaults"]), read_rows(tmp_path / "defaults.jsonl"))
    cells = [line.split(" | ") for line in build._default_rates(answer).splitlines()[2:]]
    found = {name.removeprefix("| "): (losses.count(" at "), rate) for name, losses, rate in cells}
    assert found["pre-ln"] == (3, "0.0025 (depth) |")
    assert (found["ngpt"][0], found["residual"][0]) == (2, 0)


class TestInside:
    """The claims of what is inside trained models, from rows that nobody measured."""

    def row(self, build, scheme, seed, worth, sink, massive):
        sublayers = {
            "removal": [0.5, 0.1, 0.1 * worth, 0.1 * worth], "angle_mean": [0.3] * 4, "norm": [8.0] * 4,
            "effective_rank": [20.0] * 4, "sink": [sink + 0.01 * seed, None] * 2,
            "massive": [massive * (1 + seed / 50)] * 4,
        }  # fmt: skip
        return build.inside.InsideRow(f"{scheme}-{seed}", scheme, 2, 1200, seed, 5e-3, 1.5, 0, None, sublayers)

    @pytest.mark.parametrize(
        ("projection", "seeds", "expected"),
        [((1.0, 0.1, 10.0), 3, "holds"), ((0.01, 0.3, 90.0), 3, "does not hold"), ((1.0, 0.1, 10.0), 1, "not run")],
    )
    def test_the_words_follow_the_rows(self, build, projection, seeds, expected):
        claims = script("docs/results/claims.py")
        rows = [self.row(build, "pre-ln", seed, 0.1 + seed / 100, 0.2, 50.0) for seed in range(seeds)]
        rows += [self.row(build, "proj-spheretnorm", seed, *projection) for seed in range(seeds)]
        found = {words: claims.inside_claim(rows, each)[0] for words, each in claims.INSIDE_CLAIMS.items()}
        spikes = found.pop("SpheretNorm has fewer spikes in training.")
        assert spikes == ("not run" if seeds == 1 else "not decided")
        assert list(found.values()) == [expected] * 3
        chart = build.inside.chart(rows)
        assert chart is None if seeds == 1 else [line.x for line in chart.panels[0].lines] == [(1, 2, 3, 4)] * 2

    def test_a_run_is_seen(self, build, prepared, tmp_path):
        tiny = (
            "--scheme pre-ln --layers 2 --heads 2 --width 16 --block 16 --batch-size 2 --steps 2 --threads 1 --quiet"
        )
        words = [*tiny.split(), "--data", str(prepared), "--set", "evaluation.eval_windows=4"]
        for name, more in {"a": "--seed 101", "b": "--seed 1", "c": "--seed 101 --head tied"}.items():
            assert main(["train", *words, *more.split(), "--out", str(tmp_path / name)]) == 0
        runs = [open_run(tmp_path / name) for name in "abc"]
        assert [build.inside.is_asked(run) for run in runs] == [True, False, False]
        seen, measures = build.inside.look(runs[0]), build.inside.MEASURES
        assert (seen.scheme, seen.layers, seen.steps, seen.seed) == ("pre-ln", 2, 2, 101)
        assert {name: len(values) for name, values in seen.sublayers.items()} == dict.fromkeys(measures, 4)
        assert [value is None for value in seen.sublayers["sink"]] == [False, True] * 2


def test_a_marked_part_that_nobody_writes_is_an_error(build):
    assert build.filled("<!-- table x -->\nold\n<!-- end -->", {("table", "x"): "new\n"}) == (
        "<!-- table x -->\nnew\n<!-- end -->"
    )
    with pytest.raises(KeyError, match="no table of the name y"):
        build.filled("<!-- table y -->\n<!-- end -->", {})
