"""The page in a real browser: no error, no request, nothing wider than the window; every control does its work."""

from io import BytesIO

import headless
import numpy as np
import pytest
from headless import CASES, SIZES
from matplotlib.image import imread
from report_helpers import cell, cells, write_run
from watched_helpers import event, header, observations

from spheret.connections import PAPER_SCHEMES
from spheret.lab.report import report
from spheret.lab.watched import write_page

pytestmark = pytest.mark.skipif(
    headless.find() is None,
    reason=f"no browser here: none of {', '.join(headless.NAMES)} is installed (Debian: apt-get install chromium)",
)
# the table of losses and the figure of validation losses
TABLE = "losses-sotu-bytes"
LOSSES, CURVES = "#table-losses-sotu-bytes", "#figure-sotu-bytes-curves"
NASTY = "<img src=http://127.0.0.1:9/x onerror=alert(1)></script><script>alert(2)</script>"
RATES = (0.001, 0.002, 0.004)
# the largest report that the docs promise, in bytes
LARGEST = 6_000_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = headless.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Nine contestants at three learning rates, one of them diverged."""
    root = tmp_path_factory.mktemp("report")
    for index, name in enumerate(PAPER_SCHEMES):
        command = NASTY if name == "pre-ln" else "spheret train " + "--a-long-word " * 40
        for rate, loss in zip(RATES, (0.1, 0.0, 0.2), strict=True):
            write_run(
                root / f"{name}-lr{rate}",
                name,
                quality=0.02 * index - loss,
                diverged=45 if name == "keel" else None,
                environment={"command": command},
                alarm=NASTY,
                train={"lr": rate, "min_lr": rate / 10},
            )
    return report([root], root / "report")[1]


def assert_alone(page, seen):
    """The page has no error and asked for nothing but itself."""
    errors, requests = seen
    assert errors == []
    # the icon and the pictures in figures are data: addresses, which need no request
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]


# tables of the first screen that are wider than their frames
WIDE = (
    "[...document.querySelectorAll('.stage .scroll:has(table)')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    ".map(e => e.textContent.trim().slice(0, 40))"
)
UNFOLD = "document.querySelectorAll('details').forEach(e => e.open = true)"


@pytest.mark.parametrize(("width", "scheme"), CASES)
def test_it_opens_without_errors_and_requests(browser, page, width, scheme):
    assert_alone(page, browser.open(page.as_uri(), width, scheme, SIZES[width]))
    assert browser.misfits() == browser.evaluate(WIDE) == []
    image = imread(BytesIO(browser.screenshot()), format="png")[..., :3]
    assert image.shape[1] == width
    assert image.shape[0] > 3000
    # the background is light or dark, and the page is not blank
    background = float(np.median(image))
    assert background > 0.9 if scheme == "light" else background < 0.15
    assert image.std() > 0.05
    browser.evaluate(UNFOLD)
    assert browser.misfits() == []


def test_the_first_screen_holds_the_answer_and_the_picture(browser, page):
    for width, height in SIZES.items():
        browser.open(page.as_uri(), width, height=height)
        bottoms = browser.evaluate(
            f"['.lead', '{CURVES} canvas'].map(s => document.querySelector(s).getBoundingClientRect().bottom)"
        )
        assert bottoms[0] < bottoms[1] < height
    text = page.read_text()
    # the picture is in the page before any script, so the first paint has it
    figure = text.index(f'id="{CURVES[1:]}"')
    assert 0 < text.index("<svg", figure) < text.index("<script")
    assert page.stat().st_size < LARGEST


class TestControls:
    """One visit, on which everything is tried."""

    @pytest.fixture(scope="class")
    def visit(self, browser, page):
        browser.open(page.as_uri(), 1280, height=800)
        yield browser
        assert_alone(page, browser.since())

    def column(self, browser, place):
        return browser.evaluate(
            f"[...document.querySelectorAll('{LOSSES} tbody tr')].map(r => r.cells[{place}].textContent.trim())"
        )

    def canvas(self, browser, name):
        browser.painted()
        return browser.evaluate(f"document.querySelector('{name} canvas').toDataURL()")

    def test_sorting(self, visit):
        def state(place):
            return visit.evaluate(
                f"document.querySelector('{LOSSES}').tHead.rows[0].cells[{place}].getAttribute('aria-sort')"
            )

        names, losses = self.column(visit, 0), self.column(visit, 2)
        numbers = [float(text) for text in losses if text != "-"]
        # best first, and what diverged is last
        assert numbers == sorted(numbers)
        assert losses[-1] == "-"
        header = f"{LOSSES} thead th:nth-child(3) button"
        visit.click(header)
        assert (state(2), self.column(visit, 2)) == ("ascending", losses)
        visit.press("Enter", header)
        assert (state(2), self.column(visit, 2)) == ("descending", [*losses[-2::-1], "-"])
        visit.click(f"{LOSSES} thead th:nth-child(1) button")
        assert (state(2), state(0), self.column(visit, 0)) == (None, "ascending", sorted(names))
        visit.click(f"{LOSSES} thead th:nth-child(1) button")
        visit.click(f"{LOSSES} thead th:nth-child(1) button")
        assert (state(0), self.column(visit, 0)) == (None, names)

    def test_a_series_is_switched_off_and_on(self, visit):
        button = f"{CURVES} .legend li:nth-child(2) button"
        before = self.canvas(visit, CURVES)
        visit.click(button)
        assert visit.evaluate(f"document.querySelector('{button}').ariaPressed") == "false"
        without = self.canvas(visit, CURVES)
        assert without != before
        visit.press("Enter", button)
        assert visit.evaluate(f"document.querySelector('{button}').ariaPressed") == "true"
        # the cursor left with the mouse
        visit.move(5, 5)
        assert self.canvas(visit, CURVES) != without

    def test_values_under_the_cursor(self, visit, page):
        values = f"[...document.querySelectorAll('{CURVES} .value')].map(e => e.textContent)"
        names = visit.evaluate(f"[...document.querySelectorAll('{CURVES} .legend .name')].map(e => e.textContent)")
        at_rest = visit.evaluate(values)
        x, y = visit.centre(f"{CURVES} .u-over")
        visit.move(x, y)
        assert visit.evaluate(values) != at_rest
        assert visit.evaluate(f"document.querySelector('{CURVES} .tip').textContent").startswith("step 40")
        # at the end of the curves stand the numbers of the table
        right = visit.evaluate(f"document.querySelector('{CURVES} .u-over').getBoundingClientRect().right")
        visit.move(right - 2, y)
        shown = dict(zip(names, visit.evaluate(values), strict=True))
        for name in set(PAPER_SCHEMES) - {"keel"}:
            assert shown[name] == f"{float(cell(page.parent, TABLE, name, 'val loss')['value']):.3f}"
        assert shown["keel (\u00d7 diverged)"]
        visit.move(5, 5)
        assert visit.evaluate(values) == at_rest
        # and by the keyboard
        visit.press("ArrowRight", f"{CURVES} .plot")
        tip = f"document.querySelector('{CURVES} .tip').textContent"
        assert visit.evaluate(tip).startswith("step 20")
        visit.press("ArrowRight")
        assert visit.evaluate(tip).startswith("step 40")

    def test_the_source_of_a_number(self, visit, page):
        tip = "document.getElementById('source')"
        visit.move(*visit.centre(f"{LOSSES} td[data-source]"))
        assert visit.evaluate(f"{tip}.hidden") is False
        source = cell(page.parent, TABLE, self.column(visit, 0)[0], "learning rate")["source"]
        assert visit.evaluate(f"{tip}.textContent") == source
        visit.move(5, 5)
        assert visit.evaluate(f"{tip}.hidden") is True
        visit.press("ArrowRight", f"{LOSSES} td[tabindex='0']")
        sources = {c["source"] for c in cells(page.parent) if c["table"] == LOSSES.removeprefix("#table-")}
        assert visit.evaluate(f"{tip}.textContent") in sources - {""}

    def test_the_theme(self, visit):
        back = "getComputedStyle(document.body).backgroundColor"
        light, drawn = visit.evaluate(back), self.canvas(visit, CURVES)
        visit.click("#theme")
        assert visit.evaluate(back) != light
        assert self.canvas(visit, CURVES) != drawn
        visit.click("#theme")
        assert visit.evaluate(back) == light


@pytest.mark.parametrize(("width", "scheme"), CASES)
def test_a_watched_training(browser, tmp_path, width, scheme):
    page, seen = tmp_path / "watch.html", observations(8, 30, events={20: [event(1000, 3, where=NASTY)]})
    write_page(page, header(8, model=NASTY), seen, refresh=60)
    assert_alone(page, browser.open(page.as_uri(), width, scheme, SIZES[width]))
    assert browser.misfits() == browser.evaluate(WIDE) == []
    places = browser.evaluate("document.querySelectorAll('figure[data-chart]').length")
    assert browser.evaluate("document.querySelectorAll('figure.is-live canvas').length") == places > 10
    # the mark of the alarm is in its colour: without it the curve looks different
    marked = browser.evaluate("document.querySelector('#figure-loss canvas').toDataURL()")
    write_page(page, header(8, model=NASTY), observations(8, 30))
    browser.open(page.as_uri(), width, scheme, SIZES[width])
    assert browser.evaluate("document.querySelector('#figure-loss canvas').toDataURL()") != marked
