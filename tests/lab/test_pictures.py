"""Every figure: a constant is flat, no legend covers a point, letters can be read, both themes.

EVERY draws each figure of the package, from real numbers or from numbers made constant. A figure that it does not
draw is found.
"""

import ast
import itertools
import json
import re
import sys
from contextlib import contextmanager

import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report_helpers import read_group, write_run
from scripts import PROJECT, script
from study_helpers import bowl, noise, plan_of, row, run_all
from watched_helpers import event, header, observations

from spheret.analysis import figures as panels
from spheret.analysis.inspect import PANELS
from spheret.certificates.certificate_json import CERTIFICATES
from spheret.certificates.figure import certificate_figure
from spheret.cli import main
from spheret.conversion.command import report as conversion
from spheret.conversion.command.convert_json import ConvertRecord
from spheret.lab.figures import answers, runs, svg, watched
from spheret.lab.figures.lines import later_range
from spheret.lab.ladders import ladders
from spheret.lab.report import study_findings
from spheret.lab.watch_file import Watched
from spheret.optim.coordinates import Coordinates
from spheret.support import figure_style
from spheret.support.figure_style import THEMES, own_style, spanned, spanned_log
from spheret.train import coord_check
from spheret.watching.observations import Observation

# a constant with the rounding errors of float32
FLAT = [8.0 * (1 + sign * 1e-7) for sign in (1, -2, 0, 2, -1, 1)]
PLACES = list(range(1, len(FLAT) + 1))
TINY = ["--layers", "2", "--heads", "4", "--width", "32", "--block", "64", "--batch-size", "4", "--data", "sotu"]
STUDY = """
[model]
width = 32
heads = 4

[[parts]]
name = "three"
contestants = ["pre-ln", "keel", "proj-spheretnorm"]
rates = [2e-3, 4e-3, 8e-3]
ladder = [{layers = 24}]

[[parts]]
name = "width"
contestants = ["pre-ln", "keel"]
rates = [2e-3, 4e-3, 8e-3]
seeds = 0
ladder = [{width = 64}]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short training on a sphere, where every norm is the same, and one without a sphere, both certified."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("proj-spheretnorm", "pre-ln"):
        words = ["--scheme", name, *TINY, "--steps", "2", "--quiet", "--out", str(root / name)]
        assert main(["train", *words]) == 0
        # 1: it predicts no better than token frequencies
        assert main(["certify", str(root / name), "--tokens", "8", "--sequence", "0"]) == 1
    return root


def as_it_is(value, names=()):
    return value


def level(value, names=()):
    """A document in which every number of these names is nearly the same."""
    near = itertools.cycle(FLAT)

    def walk(part, name=None):
        if isinstance(part, dict):
            return {key: walk(each, key) for key, each in part.items()}
        if isinstance(part, list):
            return [walk(each, name) for each in part]
        return next(near) if name in names and isinstance(part, float) else part

    return walk(value)


def certificates(trained, tmp_path, change):
    names = {
        "sigma_max", "sigma_min", "Delta_max", "m_min", "S_max", "S_mean", "A_mean", "product_m_min", "angle_max",
        "B_max", "squared_angle", "lambda_squared",
    }  # fmt: skip
    for name in ("proj-spheretnorm", "pre-ln"):
        file = trained / name / "certificate.json"
        document = json.loads(file.read_text())
        for part in document["own_path"].values():
            for each in part if isinstance(part, list) else ():
                # a proven interval is a band around its line
                each |= {"proven": None} if "proven" in each else {}
        document = change(document, names)
        certificate_figure(CERTIFICATES.decode(json.dumps(document).encode(), file))


def inspections(trained, tmp_path, change):
    values = FLAT if change is level else [1.0, 5, 3, 2, 4, 9]
    lines = {"a": (PLACES, values), "b": (PLACES, [2 * value for value in values])}
    every = [panels.Panel(title, "x", y, look, lines, log) for title, y, look, log in PANELS.values()]
    panels.lines("title", every, {"a": "pre-ln", "b": "keel"})


def coordinates(trained, tmp_path, change):
    values = FLAT if change is level else [0.1, 0.2, 0.5, 1, 2, 5]
    rows = [
        Coordinates(2**k, 2**k, {"entry": v, "end": v}, {"entry": v, "logits": v})
        for k, v in zip(PLACES, values, strict=True)
    ]
    coord_check.draw("sentence", {"width": rows, "layers": rows})


def reports(trained, tmp_path, change):
    for name in ("pre-ln", "keel", "post-ln"):
        write_run(tmp_path / name, name, steps=20, eval_every=5)
    # so long that it does not fit beside its line
    write_run(tmp_path / "long", "proj-spheretnorm", steps=20, eval_every=5, options={"schedule": "constant"})
    for file in tmp_path.glob("*/metrics.jsonl"):
        lines = map(json.loads, file.read_text().splitlines())
        # the count of spikes can only grow
        lines = [line | ({"spikes": 0} if change is level else {}) for line in lines]
        lines = [change(line, {"loss", "val_loss", "grad_norm", "norm", "cosine"}) for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    group = read_group([tmp_path])
    runs.draw(group)
    answers.draw([group.answer], [])


def studies(trained, tmp_path, change):
    plan = plan_of(tmp_path, STUDY)

    def flat(key):
        # the best rate is the middle one, by a rounding error
        loss = 8 + 1e-6 * (bowl(4e-3)(key) + 0.02 * noise(*key))
        return row(key, loss, curve=[(step, loss) for step in (5, 10, 15)])

    rows, _ = run_all(plan, flat if change is level else bowl(4e-3))
    found = study_findings(plan, rows)
    names = {drawing.name for drawing in answers.draw(found.answers, ladders(found.answers))}
    kinds = {
        "three-answer",
        "three-bowls",
        "three-curves",
        "three-pairs",
        "three-ladder",
        "width-transfer",
        "width-collapse",
    }
    assert names >= kinds


def conversions(trained, tmp_path, change):
    results = script("benchmarks/convert_results.py")
    records = results.read(results.FOLDER)
    for key, group in records.items():
        every = [change(msgspec.to_builtins(each), {"loss", "alpha", "alpha_after"}) for each in group]
        for evaluation in (each for document in every for each in document["converted"]["evaluations"]):
            # the annealing is over
            evaluation |= {"t": 1.0} if change is level else {}
        records[key] = [msgspec.convert(document, ConvertRecord) for document in every]
    results.figure(records, tmp_path / "convert.svg")
    conversion._drawings(next(iter(records.values()))[0])


EVERY = {
    function.__name__: function
    for function in (certificates, inspections, coordinates, reports, studies, conversions)
}


@contextmanager
def watching(finished, makers):
    """Collect the figures that are finished, and the functions that began one, each as (file, name)."""
    finish, subplots = figure_style.finish, Figure.subplots

    def watched_finish(figure):
        finish(figure)
        finished.append(figure)

    def watched_subplots(self, *args, **settings):
        frame = sys._getframe(1)
        while frame is not None:
            makers.add((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        return subplots(self, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure_style, "finish", watched_finish)
        patch.setattr(Figure, "subplots", watched_subplots)
        yield


@pytest.fixture
def drawn():
    """The figures that are finished while a test runs."""
    finished = []
    with watching(finished, set()):
        yield finished


@pytest.fixture(scope="module")
def constant(trained, tmp_path_factory):
    """All figures of constant numbers, by the name of their row in EVERY, and the functions that made them."""
    figures, makers = {name: [] for name in EVERY}, set()
    for name, function in EVERY.items():
        with watching(figures[name], makers):
            function(trained, tmp_path_factory.mktemp(name), level)
    return figures, makers


@pytest.mark.parametrize("name", EVERY)
def test_a_constant_series_is_a_flat_line(name, constant):
    lines = 0
    for axes in (axes for figure in constant[0][name] for axes in figure.axes):
        for line in axes.lines:
            # a mark at the edge of the plot, or the whole of an axis, is no series
            if line.get_transform() != axes.transData or len(line.get_xydata()) < 2:
                continue
            place = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))
            # a figure of rows has its values from left to right
            along = 0 if line.get_linestyle() == "None" and len(set(line.get_ydata())) == 1 else 1
            assert place[:, along].max() - place[:, along].min() < 0.001, line.get_label()
            assert -0.01 < place[:, along].mean() < 1.01
            lines += 1
        assert_ticks_differ(axes)
    assert lines > 1


def labels(axes):
    """The labels of the vertical axis that are shown."""
    low, high = sorted(axes.get_ylim())
    every = [tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for label in every if label.get_text() and label.get_visible()]


def assert_ticks_differ(axes):
    ticks = [label.get_text() for label in labels(axes)]
    assert len(ticks) == len(set(ticks))


def test_the_table_has_every_figure(constant):
    """Every function of the package that asks for axes has drawn constants."""
    helpers = {"axes_grid", "one_plot", "small_multiples", "panel_grid"}
    wanted = set()
    for path in (PROJECT / "spheret").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = (
                each for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
            )
            if isinstance(node, ast.FunctionDef) and any(each.func.id in helpers for each in calls):
                wanted.add((str(path), node.name))
    # a function inside of it makes the heat maps
    wanted = {(path, name) for path, name in wanted if name != "_heat_map"}
    assert len(wanted) > 15
    assert sorted(wanted - constant[1]) == []


@pytest.mark.parametrize("name", EVERY)
def test_no_legend_covers_a_point_and_no_letter_is_tiny(name, trained, drawn, tmp_path):
    EVERY[name](trained, tmp_path, as_it_is)
    legends = 0
    for figure in drawn:
        renderer = FigureCanvasAgg(figure).get_renderer()
        own = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
        for legend in (*own, *figure.legends):
            legends += 1
            box = legend.get_window_extent(renderer)
            assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 + 1
            assert not figure.get_supxlabel() or not box.overlaps(figure._supxlabel.get_window_extent(renderer))
            for other in figure.axes:
                assert not box.overlaps(other.get_window_extent(renderer)), other.get_title(loc="left")
                title = other._left_title
                assert not title.get_text() or not box.overlaps(title.get_window_extent(renderer))
        for axes in figure.axes:
            texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes._left_title, axes.title]
            assert all(text.get_fontsize() >= figure_style.SMALL for text in texts if text.get_text())
            assert_notes_are_apart(axes, renderer)
    assert drawn
    # a study names its contestants in titles, and most lines of a report have their names beside them
    assert legends


def assert_notes_are_apart(axes, renderer):
    """No text of a plot lies on a name of its axis."""
    names = [label.get_window_extent(renderer) for label in labels(axes)]
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert not any(box.overlaps(name) for name in names), text.get_text()


def test_the_figures_of_the_docs(drawn):
    script("docs/results/build.py").collapse_tables.figure()
    figure = drawn[-1]
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert not any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)


class TestWatched:
    """The figures of a watched training, which are SVG without matplotlib."""

    def drawings(self, change):
        seen = observations(8, 30, events={20: [event(1000, 3)]})
        names = {*vars(seen[0].sublayers[0]), "losses", "grad_norm"}
        seen = [msgspec.convert(change(msgspec.to_builtins(each), names), Observation) for each in seen]
        return watched.draw(Watched("a model", header(8), seen))[0]

    def test_a_constant_series_is_a_flat_line(self):
        lines = 0
        for drawing in self.drawings(level):
            for path in re.findall(r'<path d="M([^"Z]+)" style="stroke: #\w+; stroke-width: 1.6', drawing.svg):
                heights = [float(point.split()[1]) for point in path.split("L")]
                assert max(heights) - min(heights) < 0.2, drawing.name
                lines += 1
        assert lines > 10

    def test_the_legend_stands_below_the_plot(self):
        legends = 0
        for drawing in self.drawings(as_it_is):
            keys = re.findall(
                r'<path d="M[\d.]+ ([\d.]+)L[\d.]+ [\d.]+" style="stroke: #\w+; stroke-width: 2', drawing.svg
            )
            legends += bool(keys)
            # the names of the axis lie between
            assert all(float(y) > svg.BOTTOM + 30 for y in keys)
        assert legends > 5


def test_the_norm_of_a_sphere_is_flat(trained, drawn):
    assert main(["inspect", str(trained / "proj-spheretnorm"), "--windows", "2"]) == 0
    (figure,) = drawn
    norm = figure.axes[0]
    assert norm.get_title(loc="left") == PANELS["norm"][0]
    (line,) = norm.lines
    height = norm.transAxes.inverted().transform(norm.transData.transform(line.get_xydata()))[:, 1]
    assert height.max() - height.min() < 0.001
    assert_ticks_differ(norm)


def test_spans_are_relative_to_the_value():
    assert spanned(8.0, 8.0) == pytest.approx((7.6, 8.4))
    assert spanned(0.008, 0.008) == pytest.approx((0.0076, 0.0084))
    assert spanned(-3.0, 5.0) == (-3.0, 5.0)
    low, high = spanned(0.0, 0.0)
    assert low < 0 < high
    low, high = spanned_log(8.0, 8.0)
    assert (low * high, high / low) == pytest.approx((64.0, 2.0))
    assert spanned_log(1.0, 30.0) == (1.0, 30.0)
    # losses are compared more closely, and a constant one is flat all the same
    low, high = later_range([(PLACES, [3.0 + 1e-7 * x for x in PLACES])])
    assert 0.03 < high - low < 0.04


def test_a_file_has_both_themes():
    with own_style():
        figure, grid = figure_style.axes_grid()
        grid[0, 0].plot(PLACES, FLAT, color=THEMES["line-0"][0])
        drawing = figure_style.render("flat", "a constant", figure)
    for name in ("ink", "grid", "paper", "line-0"):
        light, dark = THEMES[name]
        index = list(THEMES).index(name)
        assert f"var(--c{index}, {light})" in drawing.themed_svg
        assert f"--c{index}:{dark}" in drawing.themed_svg
    # every colour of the drawing can change
    assert set(re.findall(r": (#[0-9a-f]{6})", drawing.themed_svg)) == set()
