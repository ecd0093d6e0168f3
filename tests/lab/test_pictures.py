"""Every figure of matplotlib: a constant is flat, no legend covers a point, letters can be read, both themes."""

import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from report_helpers import read_group, write_run
from scripts import script

from spheret.analysis import figures as panels
from spheret.analysis.inspect import PANELS
from spheret.cli import main
from spheret.conversion.command import report as conversion
from spheret.lab.figures import answers, runs
from spheret.lab.figures.lines import later_range
from spheret.lab.ladders import ladders
from spheret.lab.plan import PLANS, read_plan
from spheret.lab.report import study_findings
from spheret.lab.rows import read_rows
from spheret.optim.coordinates import Coordinates
from spheret.support import figure_style
from spheret.support.figure_style import THEMES, own_style, spanned, spanned_log
from spheret.train import coord_check

# a constant with the rounding errors of float32
FLAT = [8.0 * (1 + sign * 1e-7) for sign in (1, -2, 0, 2, -1, 1)]
PLACES = list(range(1, len(FLAT) + 1))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are finished while a test runs."""
    seen = []
    finish = figure_style.finish

    def watched(figure):
        finish(figure)
        seen.append(figure)

    monkeypatch.setattr(figure_style, "finish", watched)
    return seen


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short training on a sphere, where every norm is the same."""
    folder = tmp_path_factory.mktemp("run") / "ball"
    words = ["train", "--scheme", "proj-spheretnorm", "--layers", "2", "--heads", "4", "--width", "32"]
    words += ["--block", "64", "--batch-size", "4", "--data", "sotu", "--steps", "4", "--eval-every", "2"]
    assert main([*words, "--quiet", "--out", str(folder)]) == 0
    return folder


def series(values):
    return {"a": (PLACES, values), "b": (PLACES, [2 * value for value in values])}


def inspected(values, tmp_path):
    every = [
        panels.Panel(title, "x", y, look, {"a": series(values)["a"]}, log) for title, y, look, log in PANELS.values()
    ]
    panels.lines("title", every, {"a": "pre-ln"})


def coordinates(values, tmp_path):
    rows = [
        Coordinates(2**k, 2**k, {"entry": v, "end": v}, {"entry": v, "logits": v})
        for k, v in zip(PLACES, values, strict=True)
    ]
    coord_check.draw("sentence", {"width": rows, "layers": rows})


CONSTANT = {"inspect": inspected, "coord-check": coordinates}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_series_is_a_flat_line(name, drawn, tmp_path):
    CONSTANT[name](FLAT, tmp_path)
    assert drawn
    for axes in (axes for figure in drawn for axes in figure.axes):
        for line in axes.lines:
            height = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))[:, 1]
            assert height.max() - height.min() < 0.001
            assert 0.1 < height.mean() < 0.9
        assert_ticks_differ(axes)


def assert_ticks_differ(axes):
    low, high = axes.get_ylim()
    ticks = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(ticks) == len(set(ticks)) > 1


def test_the_norm_of_a_sphere_is_flat(run, drawn):
    assert main(["inspect", str(run), "--windows", "2"]) == 0
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


def of_a_run(folder, tmp_path):
    main(["certify", str(folder), "--tokens", "8", "--sequence", "0", "--out", str(tmp_path)])


def of_a_flat_run(folder, tmp_path):
    words = ["train", "--scheme", "pre-ln", "--layers", "2", "--heads", "4", "--width", "32", "--block", "64"]
    main([*words, "--batch-size", "4", "--data", "sotu", "--steps", "2", "--quiet", "--out", str(tmp_path / "flat")])
    of_a_run(tmp_path / "flat", tmp_path / "certified")


def of_two_runs(folder, tmp_path):
    every = [
        panels.Panel(title, "x", y, look, series([1.0, 5, 3, 2, 4, 9]), log)
        for title, y, look, log in PANELS.values()
    ]
    panels.lines("title", every, {"a": "pre-ln", "b": "keel"})


def of_a_report(folder, tmp_path):
    names = ["pre-ln", "keel", "post-ln"]
    for name in names:
        write_run(tmp_path / name, name, steps=20, eval_every=5)
    # so long that it does not fit beside its line
    write_run(tmp_path / "long", "proj-spheretnorm", steps=20, options={"schedule": "constant"}, diverged_finite=10)
    runs.draw(read_group([tmp_path]))


def of_a_study(folder, tmp_path):
    rows = read_rows(script("docs/results/build.py").HERE / "transfer.jsonl")
    found = study_findings(read_plan(PLANS["transfer"]), rows)
    answers.draw(found.answers, ladders(found.answers))


def of_conversions(folder, tmp_path):
    results = script("benchmarks/convert_results.py")
    records = results.read(results.FOLDER)
    results.figure(records, tmp_path / "convert.svg")
    conversion._drawings(next(iter(records.values()))[0])


def of_coordinates(folder, tmp_path):
    coordinates([0.1, 0.2, 0.5, 1, 2, 5], tmp_path)


def of_the_docs(folder, tmp_path):
    script("docs/results/build.py").collapse_tables.figure()


EVERY = {
    function.__name__: function
    for function in (
        of_a_run, of_a_flat_run, of_two_runs, of_a_report, of_a_study, of_conversions, of_coordinates, of_the_docs,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_no_legend_covers_a_point_and_no_letter_is_tiny(name, run, drawn, tmp_path):
    EVERY[name](run, tmp_path)
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
    assert drawn
    # a study names its contestants in titles, and most lines of a report have their names beside them
    assert legends


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
