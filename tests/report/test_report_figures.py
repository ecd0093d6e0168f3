"""Figures and their palette: colour-blind readers can tell any two lines apart, and each line from the background."""

from itertools import combinations

import numpy as np
import pytest
from report_helpers import write_run

from spheret.connections import PAPER_SCHEMES
from spheret.report.figure_style import PALETTE, line_styles
from spheret.report.page import inline_svg
from spheret.report.plots import FIGURES, draw
from spheret.report.results import read_group

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
VISION = {
    "trichromat": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    f = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", VISION)
@pytest.mark.parametrize("background", [0, 1], ids=["light", "dark"])
def test_any_two_colours_can_be_told_apart(eye, background):
    seen = [lab(VISION[eye] @ linear(pair[background])) for pair in PALETTE]
    # the worst pair of Okabe and Ito's palette has 17; a just noticeable difference is 2.3
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 20


@pytest.mark.parametrize(("background", "paper"), [(0, "#ffffff"), (1, "#15181c")], ids=["light", "dark"])
def test_every_line_has_contrast(background, paper):
    for pair in PALETTE:
        low, high = sorted([XYZ[1] @ linear(pair[background]), XYZ[1] @ linear(paper)])
        assert (high + 0.05) / (low + 0.05) > 2.3, pair


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name in ("pre-ln", "proj-spheretnorm"):
        write_run(root / name, name, steps=20)
    write_run(root / "variant", "proj-spheretnorm", steps=20, options={"schedule": "constant"})
    return read_group([root])


def test_a_scheme_has_the_same_colour_in_every_report(group):
    alone = read_group([group.contestants["proj-spheretnorm"][0].run.path])
    colours = line_styles(group)
    assert line_styles(alone)["proj-spheretnorm"] == colours["proj-spheretnorm"]
    assert colours["proj-spheretnorm"][0] == colours["proj-spheretnorm (schedule=constant)"][0]
    assert colours["proj-spheretnorm"][1] != colours["proj-spheretnorm (schedule=constant)"][1]


def test_each_of_the_papers_schemes_has_its_own_colour(tmp_path):
    for name in PAPER_SCHEMES:
        write_run(tmp_path / name, name, steps=5)
    assert len({colour for colour, _ in line_styles(read_group([tmp_path])).values()}) == 9


def test_figures(group):
    drawings = {drawing.name: drawing for drawing in draw(group)}
    # one learning rate makes no bowl
    assert set(drawings) == set(FIGURES) - {"bowls"}
    colour = line_styles(group)["proj-spheretnorm"][0]
    for name in ("validation", "training", "time", "gradients", "differences"):
        assert colour in drawings[name].svg
    for drawing in drawings.values():
        assert drawing.png.startswith(b"\x89PNG")
        # axis labels have units
        for word in {"validation": ("step", "nats per token"), "angle": ("radians", "sublayer")}.get(
            drawing.name, ()
        ):
            assert word in drawing.svg


def test_time_is_what_was_measured_side_by_side(tmp_path):
    for measured in (False, True):
        root = tmp_path / str(measured)
        costs = {"pre-ln": 0.5, "keel": 3.0}
        for name in costs:
            write_run(root / name, name, steps=20, eval_every=5, step_costs=costs if measured else None)
        (axes,) = FIGURES["time"][1](read_group([root])).axes
        ends = {line.get_label(): line.get_xdata()[-1] for line in axes.lines}
        # the runs' own clock says 0.064 seconds per step
        seconds = {name: 20 * (cost if measured else 0.064) for name, cost in costs.items()}
        assert ends == pytest.approx(seconds)
        assert ("measured side by side" in axes.get_xlabel()) == measured
        assert ("runs that shared a machine slowed each other" in axes.get_xlabel()) == (not measured)


def test_a_run_that_diverged_does_not_set_the_scale(tmp_path):
    write_run(tmp_path / "a", steps=60, eval_every=5)
    write_run(tmp_path / "b", "keel", steps=60, eval_every=5, diverged_finite=20)
    for name in ("validation", "training", "time"):
        (axes,) = FIGURES[name][1](read_group([tmp_path])).axes
        assert axes.get_ylim()[1] < 10
        # its curve ends where it diverged
        lines = [line for line in axes.lines if line.get_label() == "keel (x: diverged)"]
        assert [line.get_ydata()[-1] for line in lines] != []
        if name != "time":
            assert lines[0].get_xdata()[-1] == 20


def test_on_the_page_colours_are_variables_and_ids_are_unique(group):
    drawing = draw(group)[0]
    inline = inline_svg(drawing)
    assert line_styles(group)["pre-ln"][0] not in inline
    assert "var(--line-0)" in inline
    assert 'id="validation-figure_1"' in inline
    ids = [part.split('"')[0] for part in inline.split(' id="')[1:]]
    assert len(ids) == len(set(ids))
