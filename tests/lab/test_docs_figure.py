"""docs/figures: the picture of the pipeline and the geometry is what its script draws."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from scripts import script

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module")
def build():
    return script("docs/figures/build.py")


def test_it_is_what_the_script_draws(build):
    files = build.files()
    (svg,) = (path for path in files if path.suffix == ".svg")
    assert svg.read_bytes() == files[svg], "run python docs/figures/build.py"
    assert all(path.exists() for path in files)
    text = files[svg].decode()
    ElementTree.fromstring(text)
    # no colour of the drawing is left that a dark page would not replace
    assert {light for light, _ in build.COLOURS} >= set(re.findall(r": (#[0-9a-f]{6})", text))
    assert "prefers-color-scheme:dark" in text
