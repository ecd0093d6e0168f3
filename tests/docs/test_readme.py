"""README has no number that no file holds."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from spheret.lab.plan import PLANS

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
EXPLORER = ROOT / "docs" / "static" / "explorer.html"
README = (ROOT / "README.md").read_text()


def prose(text):
    """A page without its code, its links, and the tables that `make results` writes."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- .*?^<!-- end -->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def numbers(text):
    """Every number of a page, but for versions of Python and the p of a retraction."""
    text = re.sub(r"Python \d\.\d+|\bp = \d", "", prose(text))
    return re.findall(r"\d+ min \d+ s|(?<![\w.-])\d+(?:[.,]\d+)*(?: s)?(?![\w-])", text)


def clock(seconds):
    return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


def held():
    """The numbers that files hold, by what they are."""
    seconds = json.loads((ROOT / "benchmarks" / "commands.json").read_text())["seconds"]
    study = tomllib.loads(PLANS["depth"].read_text())
    return {
        **{name: clock(value) for name, value in seconds.items()},
        "width of the study": str(study["model"]["width"]),
        "updates of the study": str(study["train"]["steps"]),
        # the captions of two pictures
        "bad batch": re.search(r"BAD = \d+, \d+, (\d+)", (FIGURES / "watch_picture.py").read_text())[1],
        "updates of the explorer": re.search(r'"sublayers": (\d+)', EXPLORER.read_text())[1],
    }


def test_every_number_is_held_by_a_file():
    assert sorted(set(numbers(README)) - set(held().values())) == []


@pytest.mark.parametrize("name", held())
def test_a_number_that_changes_is_missed(name):
    """Each of them is on the page, so that a file that changes makes the page wrong."""
    assert held()[name] in numbers(README)


def test_its_length():
    assert len(README.splitlines()) <= 150


def test_the_length_of_the_docs():
    """As many words as one reads in an afternoon. docs/results grows with what was run."""
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 35_000
