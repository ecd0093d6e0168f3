"""docs/results: every figure, table and marked part of a page is what the results give, byte for byte."""

from pathlib import Path

import pytest
from scripts import script

from spheret.study.plan import read_plan
from spheret.study.rows import read_rows

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"


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
        asked = {(group.name, each.label) for group in read_plan(plan).groups for each in group.contestants}
        rows = read_rows(RESULTS / f"{study}.jsonl")
        assert rows
        assert {(key.group, key.contestant) for key in rows} <= asked


def test_a_marked_part_that_nobody_writes_is_an_error(build):
    assert build.filled("<!-- table x -->\nold\n<!-- end -->", {("table", "x"): "new\n"}) == (
        "<!-- table x -->\nnew\n<!-- end -->"
    )
    with pytest.raises(KeyError, match="no table of the name y"):
        build.filled("<!-- table y -->\n<!-- end -->", {})
