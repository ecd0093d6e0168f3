"""The page in a real browser: no error, no request, nothing wider than the window, light and dark."""

import headless
import numpy as np
import pytest
from report_helpers import write_run

from spheret.connections import PAPER_SCHEMES
from spheret.report.report import report

pytestmark = pytest.mark.skipif(
    headless.find() is None,
    reason=f"no browser here: none of {', '.join(headless.NAMES)} is installed (Debian: apt-get install chromium)",
)
WIDTHS = (1400, 400)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = headless.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    nasty = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"
    for index, name in enumerate(PAPER_SCHEMES):
        command = nasty if name == "pre-ln" else "spheret train " + "--a-long-word " * 40
        diverged = 33 if name == "keel" else None
        write_run(
            root / name, name, quality=0.02 * index, diverged=diverged, environment={"command": command}, alarm=nasty
        )
    return report([root], root / "report")


def pixels(png):
    from io import BytesIO

    from matplotlib.image import imread

    return imread(BytesIO(png), format="png")[..., :3]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_errors_and_requests(browser, page, width, scheme, tmp_path):
    errors, requests = browser.open(page.as_uri(), width, scheme)
    assert errors == []
    # the icon is a data: address, which needs no request
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('figure svg').length") == 9
    # every figure and table fits into the page, or scrolls in a box that does
    edges = browser.evaluate(
        "[...document.querySelectorAll('.scroll, p, h2, nav')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(edges) <= width
    shot = browser.screenshot()
    (tmp_path / f"report-{width}-{scheme}.png").write_bytes(shot)
    image = pixels(shot)
    assert image.shape[1] == width
    assert image.shape[0] > 3000
    # the background is light or dark, and the page is not blank
    background = float(np.median(image))
    assert background > 0.9 if scheme == "light" else background < 0.15
    assert image.std() > 0.05


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_its_background(browser, page, scheme):
    browser.open(page.as_uri(), 1400, scheme)
    colours = browser.evaluate(
        "[...document.querySelectorAll('p, td, th, caption, li, figcaption, a, figure text')].map(e => {"
        "const s = getComputedStyle(e); return e.tagName == 'text' ? s.fill : s.color})"
    )
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")

    def luminance(colour):
        parts = np.array([float(x) for x in colour.split("(")[1].rstrip(")").split(",")[:3]]) / 255
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    for colour in set(colours):
        high, low = sorted([luminance(colour), luminance(back)], reverse=True)
        # WCAG AA
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_a_bad_page_would_be_caught(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<script>console.error('wrong'); undefined_function()</script><img src='http://127.0.0.1:9/x.png'>"
        "<div style='width: 900px'>wide</div>"
    )
    errors, requests = browser.open(bad.as_uri(), 400)
    assert len(errors) >= 2
    assert "http://127.0.0.1:9/x.png" in requests
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
