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
from spheret.lab.explore import (
    COLOUR_ORDER,
    LARGEST_BETA,
    LAYERS,
    P_POSITIONS,
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


@pytest.fixture(scope="module")
def rows():
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
    path.write_bytes(explorer_page([steps(NASTY, "projection", 0.5, 180), steps("pre-ln-1337", None, None, 190)]))
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

    @pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "light"), (420, "dark")])
    def test_it_opens_without_errors_and_requests(self, browser, page, width, scheme):
        errors, requests = browser.open(page.as_uri(), width, scheme)
        for control, value in (("cap", "auto"), ("cap", "own"), ("run", 1), ("sublayer", 2), ("p", 0), ("p", 600)):
            choose(browser, control, value)
        assert errors == []
        assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        edges = browser.evaluate(
            "[...document.querySelectorAll('.card > *, .control > *')].map(e => e.getBoundingClientRect().right)"
        )
        assert max(edges) <= width
        # a name from a run is text, and nothing is drawn at a place that is no number
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("$('run').options[0].text").startswith(NASTY)
        assert "NaN" not in browser.evaluate("document.body.innerHTML")
        assert "undefined" not in browser.evaluate(
            "[...document.querySelectorAll('svg, table')].map(e => e.outerHTML).join()"
        )

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
        box = "$('handle').querySelector('.tip').getBoundingClientRect()"
        x, y = browser.evaluate(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
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
        controls = "document.querySelectorAll('input, select, #handle')"
        assert fresh.evaluate(f"[...{controls}].every(e => e.tabIndex === 0)")
        assert fresh.evaluate("[...document.querySelectorAll('input, select')].every(e => e.labels.length === 1)")

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
    """The rows of the page come in the order of RETRACTIONS, and its colours in COLOUR_ORDER."""
    rows = ("proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm", "geonorm")
    styles = scheme_styles({name: name for name in rows})
    assert [PALETTE[place][0] for place in COLOUR_ORDER[:4]] == [styles[name][0] for name in rows]
    assert list(RETRACTIONS)[:4] == ["projection", "cayley", "angular", "exponential"]
    assert sorted(COLOUR_ORDER) == list(range(len(PALETTE)))
