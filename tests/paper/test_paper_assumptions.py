"""What the paper leaves open: the table, the page that lists it, and the facts that it states."""

import re
from pathlib import Path

import pytest

from spheret.connections import SCHEMES, Spherical, scheme
from spheret.paper.assumptions import ASSUMPTIONS, DATASETS, READINGS, SPHERICAL, TABLE_SCHEMES
from spheret.paper.runs import PaperRun, paper_runs
from spheret.runs.cost import shape

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
RUN_WORDS = {TABLE_SCHEMES: "all", SPHERICAL: "spherical"}


def listed():
    """The rows of the page: question, answer, runs, reading. A link is its text."""
    section = PAGE[PAGE.index("## Questions that the paper leaves open") :]
    table = section[section.index("|---|") : section.index("\n\n", section.index("|---|"))]
    rows = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in table.splitlines()[1:]]
    cells = [[part.strip() for part in row.strip("|").split("|")] for row in rows]
    return [(question, answer, *others) for question, answer, _, *others in cells]


def test_the_page_lists_every_assumption_and_no_other():
    expected = []
    for each in ASSUMPTIONS:
        words = RUN_WORDS.get(each.schemes, ", ".join(f"`{name}`" for name in each.schemes))
        words = words if each.datasets == DATASETS else ", ".join(each.datasets)
        expected.append((each.question, each.answer, words, f"`{each.reading}`" if each.reading else ""))
    assert listed() == expected


def test_the_spherical_schemes_of_the_tables():
    assert set(SPHERICAL) == {name for name in TABLE_SCHEMES if isinstance(scheme(name), Spherical)}


@pytest.mark.parametrize("each", ASSUMPTIONS, ids=lambda each: each.question)
def test_an_assumption_is_printed_where_it_applies_only(each):
    for run in paper_runs(size="S"):
        expected = run.scheme in each.schemes and run.dataset in each.datasets
        assert any(text.startswith(each.question) for text in run.assumptions) == expected, run.name


class TestTheMainRisk:
    """The parameter counts that the first row states, counted."""

    def count(self, name, size="S", reading=None):
        return shape(PaperRun("openwebtext", size, name, reading=reading).config(None).model).parameters

    @pytest.mark.parametrize("name", SPHERICAL)
    def test_the_counts(self, name):
        pre_ln = self.count("pre-ln")
        assert self.count(name, reading="inner-norm") == 124_475_929 == pre_ln + 25
        assert self.count(name) == 124_439_065 == pre_ln - 36_839
        assert self.count("peri-ln") == pre_ln + 36_864
        # one more scalar per sublayer and one for the radius, at every size
        for size, layers in (("M", 24), ("L", 36)):
            assert self.count(name, size, "inner-norm") == self.count("pre-ln", size) + 2 * layers + 1


class TestReadings:
    @pytest.mark.parametrize("name", READINGS)
    def test_a_reading_changes_its_schemes(self, name):
        reading = READINGS[name]
        for each in reading.schemes:
            assert (scheme(each, **reading.options) != scheme(each)) == bool(reading.options)
            run = PaperRun("openwebtext", "S", each, reading=name)
            plain = PaperRun("openwebtext", "S", each)
            assert run.name == f"{plain.name}-{name}"
            built, default = (r.config(None).model for r in (run, plain))
            assert built != default
            for asked, parts in (
                (reading.options, (built.build_scheme(), default.build_scheme())),
                (reading.model, (built, default)),
            ):
                ours, others = ({option: getattr(part, option) for option in asked} for part in parts)
                assert ours == asked
                assert not asked or others != asked
            assert any(f"This is the reading {name}." in text for text in run.assumptions)
            assert any(f"--reading {name}" in text for text in plain.assumptions)

    def test_the_answers_name_options_that_exist(self):
        for each in ASSUMPTIONS:
            for option in re.findall(r"`(\w+)(?:=|`)", each.answer):
                assert all(hasattr(scheme(name), option) or option in each.model for name in each.schemes), option

    def test_no_run_has_two_names(self):
        runs = [*paper_runs(), *(run for name in READINGS for run in paper_runs(reading=name))]
        assert len({run.name for run in runs}) == len(runs)
        assert set(SCHEMES) > {run.scheme for run in runs}
