"""The explorer in a real browser: its mathematics is the library's, and mouse, keyboard and phone can use it."""

import json
import math
from itertools import combinations

import headless
import pytest
import torch
from new_retraction import NAME, register

from spheret import RETRACTIONS, SCHEDULES, retract
from spheret.analysis.line_styles import scheme_styles
from spheret.analysis.step_lengths import BIN_EDGES, RunSteps, SublayerSteps
from spheret.cli import main
from spheret.connections.base import angle_between
from spheret.lab.explore import (
    COLOURS,
    DIMENSIONS,
    LARGEST_BETA,
    LAYERS,
    P_POSITIONS,
    SUBLAYERS,
    THEME,
    angle_pieces,
    explorer_data,
    explorer_page,
)
from spheret.retractions import Retraction, angular
from spheret.schedules import factor
from spheret.support.figure_style import PALETTE

in_browser = pytest.mark.skipif(
    headless.find() is None,
    reason=f"no browser here: none of {', '.join(headless.NAMES)} is installed (Debian: apt-get install chromium)",
)
NASTY = "</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
POSITIONS = (0, 1, 50, 200, 299, 300, 301, 400, 599, P_POSITIONS)


def steps(name, retraction, alpha, peak):
    """A run whose sublayers have all steps in one bin, and the next sublayer in the next bin."""
    bins = [[100 if bin == peak + index else 0 for bin in range(len(BIN_EDGES) - 1)] for index in range(4)]
    branches = ("attention", "mlp") * 2
    measured = [
        SublayerSteps(index + 1, branch, retraction, alpha, BIN_EDGES[peak + index], counts)
        for index, (branch, counts) in enumerate(zip(branches, bins, strict=True))
    ]
    return RunSteps(name, "a scheme", 7, 100, measured)


RUNS = [steps(NASTY, "projection", 0.5, 180), steps("pre-ln-1337", None, None, 190)]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """The page as users have it."""
    path = tmp_path_factory.mktemp("ordinary") / "explorer.html"
    path.write_bytes(explorer_page(RUNS))
    return path


@pytest.fixture(scope="module")
def rows(ordinary):
    """The tables with new rows: a retraction with a vertical slope, one from its angle alone, and a schedule."""
    before = dict(RETRACTIONS), dict(SCHEDULES)
    register()
    RETRACTIONS["tanh"] = Retraction.from_angle(torch.tanh, "tanh", largest_angle=1.0)
    SCHEDULES["cube"] = lambda l, m: (l / m) ** 3
    yield
    for table, old in zip((RETRACTIONS, SCHEDULES), before, strict=True):
        table.clear()
        table.update(old)


@pytest.fixture(scope="module")
def page(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_bytes(explorer_page(RUNS))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = headless.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="class")
def opened(browser, page):
    errors, _ = browser.open(page.as_uri(), 1280)
    assert errors == []
    return browser


def frame(browser):
    """Wait until what changed is drawn."""
    code = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    browser.call("Runtime.evaluate", expression=code, awaitPromise=True)


def choose(browser, control, value):
    browser.evaluate(f"$('{control}').value = '{value}'; $('{control}').dispatchEvent(new Event('input'))")
    frame(browser)


def press(browser, key, modifiers=0):
    number = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "Home": 36}[key]
    event = {"key": key, "code": key, "modifiers": modifiers, "windowsVirtualKeyCode": number}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **event)
    frame(browser)


def settled(browser):
    """The address, once the page has written it."""
    browser.evaluate("new Promise(done => setTimeout(done, 400))")
    return browser.evaluate("location.href")


def luminance(colour):
    return sum(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def some_betas():
    near = [1 + sign * 10.0**-power for power in range(1, 14) for sign in (-1, 1)]
    spread = torch.linspace(0, LARGEST_BETA, 997, dtype=torch.float64).tolist()
    small = torch.logspace(-9, 0, 50, dtype=torch.float64).tolist()
    return [*spread, *small, *near, 1.0]


@in_browser
class TestMathematics:
    def test_every_retraction(self, opened):
        betas = some_betas()
        angles = opened.evaluate(f"data.retractions.map(row => {json.dumps(betas)}.map(beta => theta(row, beta)))")
        assert opened.evaluate("data.retractions.map(row => row.name)") == list(RETRACTIONS)
        assert {NAME, "tanh"} <= set(RETRACTIONS)
        beta = torch.tensor(betas, dtype=torch.float64)
        for row, found in zip(RETRACTIONS.values(), angles, strict=True):
            expected = row.angle(beta)
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-6)

    def test_every_p(self, opened):
        betas = some_betas()
        code = f"{json.dumps(betas)}.map(beta => familyTheta(positionP(k), beta))"
        beta = torch.tensor(betas, dtype=torch.float64)
        for k in POSITIONS:
            found = torch.tensor(opened.evaluate(f"(k => {code})({k})"), dtype=torch.float64)
            if k == 0:
                assert (found == 0).all()
                continue
            row = angular(k / (P_POSITIONS - k) if k < P_POSITIONS else math.inf)
            torch.testing.assert_close(found, row.angle(beta), rtol=0, atol=1e-12)
            assert opened.evaluate(f"familyCap({k})") == row.cap

    def test_the_next_state(self, opened):
        states = torch.randn(40, 2, 2, dtype=torch.float64)
        states[0, 1] = 0
        states[1, 1] = 2 * states[1, 0]
        alphas = torch.rand(40, 1, dtype=torch.float64)
        cases = json.dumps([[h, f, alpha] for (h, f), (alpha,) in zip(states.tolist(), alphas.tolist(), strict=True)])
        for name, row in RETRACTIONS.items():
            index = list(RETRACTIONS).index(name)
            for cap in {None, 0.6, row.cap}:
                angle = f"beta => theta(data.retractions[{index}], beta)"
                found = opened.evaluate(
                    f"{cases}.map(([h, f, alpha]) => turn(h, f, alpha, {angle}, {json.dumps(cap)}).state)"
                )
                # the page knows no longer step
                small = (alphas * (states[:, 1] - states[:, 0]).norm(dim=-1, keepdim=True)).squeeze() < LARGEST_BETA
                short = small & (states[:, 0].norm(dim=-1) > 0.5)
                expected = retract(states[:, 0], states[:, 1], alphas, row, cap)
                torch.testing.assert_close(
                    torch.tensor(found, dtype=torch.float64)[short], expected[short], rtol=0, atol=1e-6
                )
                assert short.sum() > 20

    @pytest.mark.parametrize("size", [0.05, 0.5, 1.0])
    def test_adding_and_turning(self, opened, size):
        """The lengths and the angles of both sides are those of h + f and of retract, for every row and cap."""
        drawn = opened.evaluate(f"updates(7, {size})")
        start, branches = (torch.tensor(drawn[name], dtype=torch.float64) for name in ("start", "branches"))
        assert branches.shape == (SUBLAYERS, DIMENSIONS)
        torch.testing.assert_close(branches.norm(dim=-1), torch.full((SUBLAYERS,), size, dtype=torch.float64))
        sums = torch.cat([start[None], start + branches.cumsum(0)])
        for index, row in enumerate(RETRACTIONS.values()):
            for cap in {None, 0.3, row.cap}:
                angle = f"beta => theta(data.retractions[{index}], beta)"
                found = opened.evaluate(f"journey(updates(7, {size}), {angle}, {json.dumps(cap)})")
                states = [start]
                for f in branches:
                    states.append(retract(states[-1], f, 1.0, row, cap))
                for side, expected in (("added", sums), ("turned", torch.stack(states))):
                    norms, angles = (torch.tensor(found[side][k], dtype=torch.float64) for k in ("norms", "angles"))
                    torch.testing.assert_close(norms, expected.norm(dim=-1), rtol=0, atol=1e-9)
                    between = angle_between(expected[:-1], expected[1:]).squeeze(-1)
                    torch.testing.assert_close(angles, between, rtol=0, atol=1e-6)

    def test_what_the_first_picture_argues(self, opened):
        """The sum grows and turns less and less; on the sphere both stay. It is so for other updates too."""
        for seed in range(1, 21):
            sides = opened.evaluate(
                f"journey(updates({seed}, 0.5), settings.contestants[0].angle, settings.contestants[0].cap)"
            )
            added, turned = sides["added"], sides["turned"]
            assert added["norms"][-1] > 2
            # 0.55 if every update were orthogonal to the sum
            assert sum(added["angles"][-6:]) < 0.75 * sum(added["angles"][:6])
            assert turned["norms"] == pytest.approx([1] * (SUBLAYERS + 1), abs=1e-9)
            assert min(turned["angles"]) > 0.9 * max(turned["angles"])

    def test_the_drawing_has_true_lengths_and_angles(self, opened):
        path = opened.evaluate(
            "(path => ({...path, ...flat(path)}))(journey(updates(3, 0.5), beta => beta, null).added)"
        )
        points = torch.tensor(path["points"], dtype=torch.float64)
        assert points.norm(dim=-1).tolist() == pytest.approx(path["norms"])
        # a side of the drawing is the update itself
        assert (points[1:] - points[:-1]).norm(dim=-1).tolist() == pytest.approx([0.5] * SUBLAYERS)
        assert angle_between(points[:-1], points[1:]).squeeze(-1).tolist() == pytest.approx(path["angles"])

    def test_where_two_retractions_part(self, opened):
        names = list(RETRACTIONS)
        for one, other in combinations(names, 2):
            code = (
                f"partingStep(settings.contestants[{names.index(one)}], settings.contestants[{names.index(other)}])"
            )
            beta = opened.evaluate(code)
            first, second = (
                RETRACTIONS[name].angle(torch.tensor(beta, dtype=torch.float64)) for name in (one, other)
            )
            # one degree, and a vertical slope may carry it beyond
            assert abs(float(first - second)) * 180 / math.pi == pytest.approx(1, abs=1e-4)

    def test_every_schedule(self, opened):
        assert opened.evaluate("data.schedules.map(s => s.name)") == list(SCHEDULES)
        found = opened.evaluate("data.schedules.map(s => s.factors)")
        for name, lists in zip(SCHEDULES, found, strict=True):
            expected = [[factor(name, l, 2 * n) for l in range(1, 2 * n + 1)] for n in LAYERS]
            assert all(a == pytest.approx(b, rel=1e-11) for a, b in zip(lists, expected, strict=True))

    def test_the_budget(self, opened):
        choose(opened, "depth", 2)
        choose(opened, "eta", 80)
        cells = opened.evaluate(
            "[...$('budgets').tBodies[0].rows].map(row => [...row.cells].map(c => c.textContent))"
        )
        for name, (label, _, angle, half) in zip(SCHEDULES, cells, strict=True):
            lambdas = torch.tensor([factor(name, l, 2 * LAYERS[2]) for l in range(1, 2 * LAYERS[2] + 1)])
            angles = RETRACTIONS["projection"].angle(0.8 * lambdas).rad2deg()
            assert label == name
            assert angle == f"{angles.sum():.1f}°"
            assert half == f"{100 * angles[len(angles) // 2 :].sum() / angles.sum():.0f} %"

    def test_the_share_of_a_runs_steps(self, opened):
        for beta, share in ((0, 1), (BIN_EDGES[182], 0.5), (BIN_EDGES[-1], 0)):
            assert opened.evaluate(f"shareBeyond(chosenRun(), {beta})") == pytest.approx(share)
        choose(opened, "sublayer", 4)
        assert opened.evaluate(f"shareBeyond(chosenRun(), {BIN_EDGES[182]})") == pytest.approx(1)


@in_browser
class TestUse:
    @pytest.fixture
    def fresh(self, browser, page):
        browser.open(page.as_uri(), 1280)
        return browser

    @pytest.mark.parametrize(("width", "scheme"), headless.CASES)
    @pytest.mark.parametrize("which", ["ordinary", "page"])
    def test_it_opens_without_errors_and_requests(self, browser, page, ordinary, which, width, scheme):
        page = {"ordinary": ordinary, "page": page}[which]
        browser.open(page.as_uri(), width, scheme)
        # more rows than the library's may need more room than a phone has
        assert which == "page" or browser.evaluate("(e => e.scrollWidth - e.clientWidth)($('pairs').parentNode)") <= 0
        changes = [("cap", "auto"), ("cap", "own"), ("run", 1), ("sublayer", 2), ("p", 0), ("p", 600), ("played", 0)]
        changes += [("played", 24), ("size", 100), ("turn-retraction", "own"), ("size", 5), ("depth", 10)]
        for control, value in changes:
            choose(browser, control, value)
            assert browser.misfits() == [], (control, value)
        for x, y in ((-2, 0.65), (2, 0.65), (2, -2), (-2, -2), (0, 0)):
            browser.evaluate(f"moveTo({x}, {y})")
            frame(browser)
            assert browser.misfits() == [], (x, y)
        errors, requests = browser.since()
        assert errors == []
        assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
        # a name from a run is text, and nothing is drawn at a place that is no number
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("$('run').options[0].text") == NASTY
        assert "NaN" not in browser.evaluate("document.body.innerHTML")
        assert "undefined" not in browser.evaluate(
            "[...document.querySelectorAll('svg, table')].map(e => e.outerHTML).join()"
        )

    def test_a_cut_text_would_be_caught(self, fresh):
        fresh.evaluate("document.querySelector('#turn text').setAttribute('x', -40)")
        fresh.evaluate("$('play').style.cssText = 'width: 1rem; min-width: 0; overflow: hidden; padding: 0'")
        assert fresh.misfits() == ["leaves its box: Play", "leaves its drawing: f"]

    def test_playing(self, fresh):
        """From the start to the last sublayer, and the button pauses in between."""
        fresh.click("#play")
        fresh.evaluate("new Promise(done => setTimeout(done, 900))")
        fresh.click("#play")
        paused = fresh.evaluate("settings.played")
        assert 1 <= paused < SUBLAYERS
        assert fresh.evaluate("$('adding').querySelectorAll('circle').length") == paused + 1 + 3
        fresh.evaluate("new Promise(done => setTimeout(done, 500))")
        assert fresh.evaluate("settings.played") == paused
        choose(fresh, "played", SUBLAYERS - 2)
        fresh.click("#play")
        fresh.evaluate("new Promise(done => setTimeout(done, 1500))")
        assert fresh.evaluate("[settings.played, $('play').textContent]") == [SUBLAYERS, "Play"]

    def test_the_table_of_the_first_picture(self, fresh):
        choose(fresh, "turn-retraction", "cayley")
        choose(fresh, "played", 5)
        rows = fresh.evaluate(
            "[...$('journey').tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        sides = fresh.evaluate("journey(updates(1, 0.5), settings.contestants[1].angle, null)")
        assert [row[0] for row in rows] == ["adding", "turning"]
        for (_, length, first, last), side in zip(rows, (sides["added"], sides["turned"]), strict=True):
            assert length == f"{side['norms'][5]:.2f}"
            assert [first, last] == [f"{math.degrees(side['angles'][at]):.1f}°" for at in (0, 4)]

    def test_the_link(self, fresh, page):
        """A new tab and a reload show the same, and without its settings the page is as at first."""
        plain = fresh.evaluate("document.body.innerHTML")
        for control, value in (("p", 123), ("cap", "own"), ("cap-angle", 33), ("run", 1), ("sublayer", 3)):
            choose(fresh, control, value)
        for control, value in (("turn-retraction", "own"), ("played", 9), ("size", 70), ("axis", 4)):
            choose(fresh, control, value)
        fresh.evaluate("moveTo(-1.2345, -0.3)")
        fresh.click("#theme")
        fresh.click("#other")
        frame(fresh)
        before = fresh.evaluate("[document.body.innerHTML, document.documentElement.dataset.theme]")
        assert before[0] != plain
        assert before[1] == "dark"
        address = settled(fresh)
        assert address.startswith(f"{page.as_uri()}#")
        fresh.open("about:blank", 1280)
        assert fresh.open(address, 1280)[0] == []
        state = "[document.body.innerHTML, document.documentElement.dataset.theme]"
        assert fresh.evaluate(state) == before
        fresh.call("Page.reload")
        fresh.evaluate("new Promise(done => setTimeout(done, 500))")
        assert fresh.evaluate(state) == before
        assert settled(fresh) == address
        fresh.evaluate("location.hash = ''")
        frame(fresh)
        assert fresh.evaluate("document.body.innerHTML") == plain
        choose(fresh, "p", 123)
        assert settled(fresh) == f"{page.as_uri()}#p=123"

    @pytest.mark.parametrize(
        "words",
        ["cap=huge&turn-retraction=no&run=7&f=1,x&theme=red&seed=x", "f=1&p=&seed=-1", "%&=&f=,,", "f=1e99,NaN"],
    )
    def test_a_link_of_nonsense_is_the_page_as_at_first(self, browser, page, words):
        browser.open(page.as_uri(), 1280)
        plain = browser.evaluate("[document.body.innerHTML, document.documentElement.outerHTML.length]")
        browser.open("about:blank", 1280)
        errors, _ = browser.open(f"{page.as_uri()}#{words}", 1280)
        assert errors == []
        found = browser.evaluate("[document.body.innerHTML, document.documentElement.outerHTML.length]")
        assert found == plain

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_theme_button(self, browser, page, scheme):
        browser.open(page.as_uri(), 1280, scheme)
        for place in (0, 1, 0) if scheme == "light" else (1, 0, 1):
            colours = browser.evaluate(
                "Object.fromEntries(['paper', 'ink', 'adding-0', 'retraction-3', 'schedule-1'].map(name =>"
                "[name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()]))"
            )
            lines = {"adding-0": PALETTE[0], "retraction-3": PALETTE[5], "schedule-1": PALETTE[3]}
            assert colours == {name: pair[place] for name, pair in ({**THEME, **lines}).items() if name in colours}
            assert browser.evaluate("$('theme').textContent") == ("dark", "light")[place]
            # more tokens are drawn in a stronger grey: which of darker and lighter that is depends on the card
            weak, strong = browser.evaluate(
                "(all => [all[0], all[all.length - 1]])([...$('heat').querySelectorAll('path[style*=opacity]')]"
                ".map(path => Number(getComputedStyle(path).opacity)))"
            )
            assert strong > weak
            stronger = luminance(THEME["steps"][place]) > luminance(THEME["card"][place])
            assert ("Lighter means more tokens" in browser.evaluate("$('run-reading').textContent")) == stronger
            assert ("Darker means more tokens" in browser.evaluate("$('run-reading').textContent")) != stronger
            browser.click("#theme")

    def test_one_colour_per_thing(self, fresh):
        """A line has the colour and dashes of its name in every picture, and no two things share both."""
        things = fresh.evaluate(
            "[ADDING, ...settings.contestants,"
            "...data.schedules.map((s, i) => ({ name: s.name, ...look('schedule', i) }))]"
            ".map(one => [one.name, one.colour, one.lap])"
        )
        assert (
            len({(colour, lap) for _, colour, lap in things}) == len(things) == len(RETRACTIONS) + len(SCHEDULES) + 2
        )
        kinds = {name: colour.removeprefix("var(--").split("-")[0].rstrip(")") for name, colour, _ in things}
        assert {kinds[name] for name in RETRACTIONS} == {"retraction"}
        assert {kinds[name] for name in SCHEDULES} == {"schedule"}
        looks = {name: (colour, f"lap{lap}") for name, colour, lap in things}
        swatches = fresh.evaluate(
            "['readings', 'pairs', 'budgets', 'journey'].map(id => [...document.querySelectorAll(`#${id} .swatch`)]"
            ".map(e => [e.parentNode.textContent, [e.style.borderTopColor, e.classList[1]]]))"
        )
        for name, shown in (pair for table in swatches for pair in table):
            assert tuple(shown) == looks["projection" if name == "turning" else name]
        strokes = {
            svg: set(map(tuple, fresh.evaluate(
                f"[...document.querySelectorAll('#{svg} .curve')].map(e => [e.style.stroke, e.classList[1]])"
            )))
            for svg in ("adding", "turning", "norms", "turns", "turn", "angle", "part", "budget")
        }  # fmt: skip
        retractions = {looks[name] for name in [*RETRACTIONS, "p = 1.5"]}
        both = {looks["adding"], looks["projection"]}
        assert strokes == {
            "adding": {looks["adding"]}, "turning": {looks["projection"]}, "norms": both, "turns": both,
            "turn": retractions, "angle": retractions, "part": retractions - {looks["exponential"]},
            "budget": {looks[name] for name in SCHEDULES},
        }  # fmt: skip

    def test_a_finger(self, browser, page):
        """A finger on the tip of f drags it, and the page stays; a finger beside it scrolls the page."""
        with browser.fingers(page.as_uri()):
            x, y = browser.centre("#handle .tip")
            before = browser.evaluate("[settings.f, scrollY]")
            browser.swipe(x, y, -60, 90)
            after = browser.evaluate("[settings.f, scrollY]")
            unit = browser.evaluate("unit")
            assert after[1] == before[1]
            moved = [new - old for new, old in zip(after[0], before[0], strict=True)]
            assert moved == pytest.approx([-60 / unit, -90 / unit], abs=0.01)
            x, y = browser.centre("#turn-retraction")
            browser.swipe(x, y - 60, 0, -150)
            assert browser.evaluate("scrollY") > 60
            # sideways on the curves, a finger reads them, and what it read stays
            x, y = browser.centre("#angle")
            before = browser.evaluate("scrollY")
            browser.swipe(x, y, 100, 0)
            left, right, edge, axis = browser.evaluate(
                "[anglePlot.left, anglePlot.right, $('angle').getBoundingClientRect().left, settings.axis]"
            )
            beta = axis * (x + 100 - edge - left) / (right - left)
            assert browser.evaluate("$('readings').tHead.rows[0].cells[2].textContent") == f"at β = {beta:.2f}"
            assert browser.evaluate("scrollY") == before
            browser.evaluate("scrollTo(0, 0)")
            x, y = browser.centre("#play")
            browser.tap(x, y)
            assert browser.evaluate("$('play').textContent") == "Pause"
            x, y = browser.centre("#played")
            browser.tap(x, y)
            frame(browser)
            assert browser.evaluate("settings.played") == pytest.approx(SUBLAYERS / 2, abs=1)
            assert browser.since()[0] == []

    def test_a_handle_that_a_finger_cannot_hold_would_be_caught(self, browser, page):
        with browser.fingers(page.as_uri()):
            browser.evaluate("$('handle').style.display = 'inline'")
            x, y = browser.centre("#handle .tip")
            before = browser.evaluate("scrollY")
            browser.swipe(x, y, 0, -150)
            assert browser.evaluate("scrollY") > before + 60

    def test_dragging_moves_every_state(self, fresh):
        before = fresh.evaluate("[...settings.f]")
        assert max(fresh.trace(lambda: self.drag(fresh, -260, 40))) < 0.05
        after = fresh.evaluate("[...settings.f]")
        assert after[0] < before[0] - 1
        assert fresh.evaluate("$('moving').querySelectorAll('circle').length") == len(RETRACTIONS) + 1
        beta = abs(after[0])
        texts = fresh.evaluate("[...$('readings').tBodies[0].rows].map(row => row.cells[2].textContent)")
        expected = [float(row.angle(torch.tensor(beta)).rad2deg()) for row in RETRACTIONS.values()]
        assert [float(text.rstrip("°")) for text in texts[:-1]] == pytest.approx(expected, abs=0.051)

    def drag(self, browser, right, down):
        """Drag the tip of f there in many small moves."""
        x, y = browser.centre("#handle .tip")
        mouse = {"button": "left", "buttons": 1, "clickCount": 1}
        browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
        for share in range(1, 41):
            browser.call(
                "Input.dispatchMouseEvent",
                type="mouseMoved",
                x=x + right * share / 40,
                y=y + down * share / 40,
                **mouse,
            )
        browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + right, y=y + down, **mouse)
        frame(browser)

    def test_a_slow_page_would_be_caught(self, fresh):
        fresh.evaluate(
            "$('turn').addEventListener('pointermove', () => { let sum = 0;"
            "for (let i = 0; i < 1e8; i++) sum += i % 7; window.sum = sum }, { once: true })"
        )
        assert max(fresh.trace(lambda: self.drag(fresh, -20, 0))) > 0.05

    def test_the_keyboard(self, fresh):
        fresh.evaluate("$('handle').focus()")
        before = fresh.evaluate("[...settings.f]")
        press(fresh, "ArrowRight")
        press(fresh, "ArrowUp", modifiers=8)
        assert fresh.evaluate("[...settings.f]") == pytest.approx([before[0] + 0.05, before[1] + 0.25])
        assert fresh.evaluate("$('handle').getAttribute('aria-valuenow')") == f"{before[0] + 0.05:.3f}"
        press(fresh, "Home")
        assert fresh.evaluate("[...settings.f]") == before
        fresh.evaluate("$('p').focus()")
        p = fresh.evaluate("$('p-value').textContent")
        press(fresh, "ArrowLeft")
        assert fresh.evaluate("$('p-value').textContent") != p
        inputs = "input:not([type=hidden]), select"
        assert fresh.evaluate(
            f"[...document.querySelectorAll('{inputs}, button, #handle')].every(e => e.tabIndex === 0)"
        )
        assert fresh.evaluate(f"[...document.querySelectorAll('{inputs}')].every(e => e.labels.length === 1)")

    def test_the_cap(self, fresh):
        choose(fresh, "cap", "auto")
        texts = fresh.evaluate("[...$('readings').tBodies[0].rows].map(row => row.cells[2].textContent)")
        beta = torch.tensor(1.35)
        capped = [row.cap is not None and bool(row.angle(beta) > row.cap) for row in RETRACTIONS.values()]
        assert [text.endswith("(cap)") for text in texts[:-1]] == capped
        assert any(capped)
        choose(fresh, "cap", "own")
        choose(fresh, "cap-angle", 20)
        assert set(fresh.evaluate("[...$('readings').tBodies[0].rows].map(row => row.cells[2].textContent)")) == {
            "20.0° (cap)"
        }


class TestFile:
    def test_the_same_bytes_and_small(self, rows):
        runs = [steps("run", "projection", 0.5, 180)]
        assert explorer_page(runs) == explorer_page(runs)
        assert len(explorer_page()) < 250_000

    def test_no_address_but_that_of_svg(self):
        text = explorer_page().decode().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text.replace("http-equiv", "")

    def test_pieces_cover_every_step(self):
        for row in RETRACTIONS.values():
            ends, values = angle_pieces(row)
            assert (ends[0], ends[-1]) == (0, LARGEST_BETA)
            assert ends == sorted(set(ends))
            assert len(values) == 3 * (len(ends) - 1) + 1

    def test_the_command_with_a_run(self, prepared, tmp_path, capsys):
        run, out = tmp_path / "run", tmp_path / "new" / "explorer.html"
        words = [
            "--layers",
            "1",
            "--heads",
            "1",
            "--width",
            "16",
            "--block",
            "16",
            "--batch-size",
            "1",
            "--steps",
            "1",
        ]
        words += ["--eval-windows", "1", "--threads", "1", "--no-tensorboard", "--quiet", "--data", str(prepared)]
        assert main(["train", "--scheme", "proj-spheretnorm", *words, "--out", str(run)]) == 0
        capsys.readouterr()
        assert main(["explore", str(run), "--windows", "3", "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        text = out.read_text()
        data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        (shown,) = data["runs"]
        assert (shown["run"], shown["scheme"], shown["tokens"]) == ("run", "proj-spheretnorm", 48)
        assert [sum(s["counts"]) for s in shown["sublayers"]] == [48, 48]
        assert [s["retraction"] for s in shown["sublayers"]] == ["projection"] * 2
        assert {**data, "runs": []} == json.loads(json.dumps(explorer_data()))
        # written over itself, with the same bytes
        assert main(["explore", str(run), "--windows", "3", "--out", str(out)]) == 0
        assert out.read_text() == text

    def test_a_file_of_somebody_else_is_kept(self, tmp_path, capsys):
        path = tmp_path / "index.html"
        path.write_text("<!doctype html><p>mine")
        assert main(["explore", "--out", str(path)]) == 2
        assert "not written by spheret" in capsys.readouterr().err
        assert path.read_text() == "<!doctype html><p>mine"

    def test_data_without_a_run(self, tmp_path, capsys):
        assert main(["explore", "--data", "sotu", "--out", str(tmp_path / "e.html")]) == 2
        assert "no run was given" in capsys.readouterr().err


def test_a_retraction_has_the_colour_of_its_scheme():
    """The rows of the page come in the order of RETRACTIONS, and adding is what Pre-LN does."""
    rows = ("pre-ln", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm", "geonorm")
    styles = scheme_styles({name: name for name in rows})
    places = [*COLOURS["adding"], *COLOURS["retraction"]]
    assert [PALETTE[place][0] for place in places] == [styles[name][0] for name in rows]
    assert list(RETRACTIONS)[:4] == ["projection", "cayley", "angular", "exponential"]
    # the kinds share no colour
    assert sorted(place for kind in COLOURS.values() for place in kind) == list(range(len(PALETTE)))
