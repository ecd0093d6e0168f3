"""The palette by number: any two colours differ as much as those of the best published palette of nine."""

from itertools import pairwise
from pathlib import Path

import pytest
from colour_difference import PUBLISHED, VISION, ciede2000, contrast, least_difference, lightness

from spheret.connections import PAPER_SCHEMES
from spheret.support.figure_style import PALETTE

# the dark one is the page's
PAGES = {"white": (0, "#ffffff"), "dark": (1, "#15181c")}
# Sharma, Wu and Dalal 2005, table 1: two colours in CIELAB and their CIEDE2000
SHARMA = [
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, 3.1571, -77.2803), (50, 0, -82.7485), 2.8615),
    ((50, 2.8361, -74.0200), (50, 0, -82.7485), 3.4412),
    ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0000),
    ((50, -1.1848, -84.8006), (50, 0, -82.7485), 1.0000),
    ((50, -0.9009, -85.5211), (50, 0, -82.7485), 1.0000),
    ((50, 0, 0), (50, -1, 2), 2.3669),
    ((50, -1, 2), (50, 0, 0), 2.3669),
    ((50, 2.4900, -0.0010), (50, -2.4900, 0.0009), 7.1792),
    ((50, 2.4900, -0.0010), (50, -2.4900, 0.0010), 7.1792),
    ((50, 2.4900, -0.0010), (50, -2.4900, 0.0011), 7.2195),
    ((50, 2.4900, -0.0010), (50, -2.4900, 0.0012), 7.2195),
    ((50, -0.0010, 2.4900), (50, 0.0009, -2.4900), 4.8045),
    ((50, -0.0010, 2.4900), (50, 0.0010, -2.4900), 4.8045),
    ((50, -0.0010, 2.4900), (50, 0.0011, -2.4900), 4.7461),
    ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((50, 2.5, 0), (61, -5, 29), 22.8977),
    ((50, 2.5, 0), (56, -27, -3), 31.9030),
    ((50, 2.5, 0), (58, 24, 15), 19.4535),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
]


@pytest.mark.parametrize(("first", "second", "difference"), SHARMA)
def test_ciede2000_is_that_of_the_published_pairs(first, second, difference):
    assert ciede2000(first, second) == pytest.approx(difference, abs=5e-5)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", VISION)
def test_any_two_colours_are_told_apart_as_in_the_best_published_palette(eye, page):
    place, _ = PAGES[page]
    best = max(least_difference(colours.split(), eye) for colours in PUBLISHED.values())
    assert len(PALETTE) == len(PAPER_SCHEMES) == 9
    assert least_difference([pair[place] for pair in PALETTE], eye) >= best


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_seen_and_look_coloured(page):
    place, paper = PAGES[page]
    low, high = {"white": (29, 62), "dark": (50, 90)}[page]
    greys = sorted(lightness(pair[place]) for pair in PALETTE)
    # neither near black nor near white
    assert low <= greys[0] <= greys[-1] <= high
    for pair in PALETTE:
        # WCAG 2.1, success criterion 1.4.11, asks for this of graphics
        assert contrast(pair[place], paper) >= 3, pair
    # print without colour keeps only the lightness
    assert min(after - before for before, after in pairwise(greys)) >= 1


def test_the_table_of_the_docs():
    rows = {name: colours.split() for name, colours in PUBLISHED.items()}
    rows["ours, on white"], rows["ours, on the dark page"] = zip(*PALETTE, strict=True)
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    for name, colours in rows.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name}"))
        assert line.endswith("".join(f" | {least_difference(colours, eye):.1f}" for eye in VISION) + " |")
