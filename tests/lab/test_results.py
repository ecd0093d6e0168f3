"""docs/results: every figure, table and marked part of a page is what the results give, byte for byte."""

from pathlib import Path

import pytest
from scripts import script
from study_helpers import bowl, noise, row

from spheret.lab.answers import group_answers
from spheret.lab.laboratory import Laboratory, Place
from spheret.lab.plan import PLANS, read_plan
from spheret.lab.rows import read_rows
from spheret.lab.stages import wanted

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


def test_everything_follows_from_the_committed_file(build):
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


@pytest.mark.parametrize("study", ["depth", "modern", "streams"])
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
        lines = build.claims_table(studies, {"normed": (0, 60), "plain": (30, 60)}).splitlines()[2:]
        cells = [line.split(" | ") for line in lines]
        return {cell[0].removeprefix("| "): cell[2].strip("*") for cell in cells}

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


def test_a_marked_part_that_nobody_writes_is_an_error(build):
    assert build.filled("<!-- table x -->\nold\n<!-- end -->", {("table", "x"): "new\n"}) == (
        "<!-- table x -->\nnew\n<!-- end -->"
    )
    with pytest.raises(KeyError, match="no table of the name y"):
        build.filled("<!-- table y -->\n<!-- end -->", {})
