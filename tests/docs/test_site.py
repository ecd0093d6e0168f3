"""The built site in a real browser, as a phone and a laptop show it, light and dark."""

import subprocess
import sys

import headless
import pytest
from headless import CASES, SIZES
from scripts import PROJECT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        headless.find() is None, reason=f"no browser here: none of {', '.join(headless.NAMES)} is installed"
    ),
]
# a picture of a light page has 0.9 and more
GLARING = 0.5


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What `make docs` builds."""
    pytest.importorskip("furo")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-c", "docs", "-d", out / "trees"]
    subprocess.run([*command, PROJECT, out / "html"], check=True, cwd=PROJECT)
    return out / "html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = headless.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def pages(site):
    # the first one leads to the index
    return sorted(set(site.rglob("*.html")) - {site / "index.html"})


def test_every_page_fits_and_no_picture_glares(browser, site):
    faults, seen = {}, 0
    for page in pages(site):
        name = str(page.relative_to(site))
        browser.open(page.as_uri(), 1280)
        for width, scheme in CASES:
            browser.resize(width, scheme, SIZES[width])
            faults[name, width, scheme] = browser.misfits()
            if scheme == "dark":
                pictures = browser.pictures()
                seen += len(pictures)
                faults[name, width, "glaring"] = [path for path, light in pictures.items() if light > GLARING]
        errors, requests = browser.since()
        outside = [url for url in requests if not url.startswith(("file:", "data:"))]
        faults[name, "loading", ""] = [*errors, *outside, *browser.failures()]
    assert {place: found for place, found in faults.items() if found} == {}
    assert len(pages(site)) > 25
    assert seen > 30


def test_the_theme_that_a_reader_chooses_is_that_of_the_pictures(browser, site):
    """The button of the page, whatever the system says."""
    for name in ("index", "tour", "report"):
        browser.open((site / "docs" / f"{name}.html").as_uri(), 1280)
        for theme, system in (("dark", "light"), ("light", "dark")):
            browser.resize(1280, system, 800)
            browser.evaluate(f"document.body.dataset.theme = '{theme}'")
            browser.painted()
            pictures = browser.pictures()
            assert pictures
            assert {path for path, light in pictures.items() if (light > GLARING) != (theme == "light")} == set()


def test_the_first_page_leads_to_the_index(browser, site):
    browser.open((site / "index.html").as_uri(), 1280)
    assert browser.evaluate("location.pathname").endswith("/docs/index.html")
