"""Figures: what they show, which lines, and in which colours."""

import json
import re
from itertools import pairwise

import pytest
from report_helpers import read_group, write_costs, write_run

from spheret.analysis.line_styles import scheme_styles
from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.lab.figures.lines import line_styles
from spheret.lab.figures.runs import FIGURES, SHARED_MACHINE, curves_figure, draw, spread
from spheret.lab.page.page import inline_svg
from spheret.support.figure_style import own_style, render
from spheret.support.latex import escape_latex


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name in ("pre-ln", "proj-spheretnorm"):
        write_run(root / name, name, steps=20)
    write_run(root / "variant", "proj-spheretnorm", steps=20, options={"schedule": "constant"})
    return read_group([root])


def test_a_scheme_has_the_same_colour_in_every_report(group):
    alone = read_group([group.contestants["proj-spheretnorm"][0].run.path])
    colours = line_styles(group.answer)
    assert line_styles(alone.answer)["proj-spheretnorm"] == colours["proj-spheretnorm"]
    assert colours["proj-spheretnorm"][0] == colours["proj-spheretnorm (schedule=constant)"][0]
    assert colours["proj-spheretnorm"][1] != colours["proj-spheretnorm (schedule=constant)"][1]


def test_each_of_the_papers_schemes_has_its_own_colour():
    styles = scheme_styles({name: name for name in PAPER_SCHEMES})
    assert len({colour for colour, _ in styles.values()}) == 9
    # the SpheretNorms differ in their dashes too, the others are solid
    assert len({str(dash) for name, (_, dash) in styles.items() if "spheretnorm" in name}) == 3
    assert {dash for name, (_, dash) in styles.items() if "spheretnorm" not in name} == {"-"}


def test_a_scheme_looks_the_same_beside_any_other():
    every = scheme_styles({name: name for name in SCHEMES})
    for name in SCHEMES:
        assert scheme_styles({name: name})[name] == every[name]
        # a variant has the scheme's colour and other dashes than any other line
        variants = scheme_styles({"first": "residual", "second": "residual", "third": name})
        assert len(set(variants.values())) == 3
        assert variants["third"] == every[name] or name == "residual"
    # one scheme of the user's own is drawn as well
    assert scheme_styles({"mine": "mine"})["mine"] not in every.values()


@pytest.fixture(scope="module")
def drawings(group):
    return {drawing.name: drawing for drawing in draw(group)}


def test_figures(group, drawings):
    assert set(drawings) == set(FIGURES)
    colour = line_styles(group.answer)["proj-spheretnorm"][0]
    for name in ("training", "time", "gradients"):
        assert colour in drawings[name].svg
    # a heat map is an image, which PGF has no lines for
    assert {name for name in drawings if drawings[name].pgf is None} == {"angle", "alpha", "norm", "cosine"}
    for drawing in drawings.values():
        assert drawing.png.startswith(b"\x89PNG")
        # axis labels have units
        for word in {"training": ("step", "nats per token"), "angle": ("radians", "sublayer")}.get(drawing.name, ()):
            assert word in drawing.svg


def test_time_is_what_was_measured_side_by_side(tmp_path):
    for measured in (False, True):
        root = tmp_path / str(measured)
        costs = {"pre-ln": 0.5, "keel": 3.0}
        for name in costs:
            write_run(root / name, name, steps=20, eval_every=5)
        if measured:
            write_costs(root, costs)
        (axes,) = FIGURES["time"][1](read_group([root])).axes
        ends = {line.get_label(): line.get_xdata()[-1] for line in axes.get_legend_handles_labels()[0]}
        # the runs' own clock says 0.064 seconds per step
        seconds = {name: 20 * (cost if measured else 0.064) for name, cost in costs.items()}
        assert ends == pytest.approx(seconds)
        assert (SHARED_MACHINE in axes.get_xlabel()) == (not measured)


def test_a_run_that_diverged_does_not_set_the_scale(tmp_path):
    write_run(tmp_path / "a", steps=60, eval_every=5)
    write_run(tmp_path / "b", "keel", steps=60, eval_every=5, diverged_finite=20)
    group = read_group([tmp_path])
    figures = {name: FIGURES[name][1](group) for name in ("training", "time")}
    for name, figure in {**figures, "curves": curves_figure(group.answer)}.items():
        (axes,) = figure.axes
        assert axes.get_ylim()[1] < 10
        (line,) = [line for line in axes.lines if line.get_label() == "keel (x: diverged)"]
        # its training curve ends where it diverged
        assert name != "training" or line.get_xdata()[-1] == 20


def test_on_the_page_colours_are_variables_and_ids_are_unique(group, drawings):
    inline = inline_svg(drawings["training"])
    assert line_styles(group.answer)["pre-ln"][0] not in inline
    assert "var(--line-0)" in inline
    assert 'id="training-figure_1"' in inline
    ids = [part.split('"')[0] for part in inline.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_the_best_comes_first(tmp_path):
    for name, quality in (("pre-ln", 0.1), ("keel", 0.3), ("post-ln", 0.2)):
        write_run(tmp_path / name, name, steps=20, eval_every=5, quality=quality)
    write_run(tmp_path / "hot", "geonorm", steps=20, eval_every=5, quality=1.0, diverged_finite=10)
    group = read_group([tmp_path])
    assert list(group.contestants) == ["keel", "post-ln", "pre-ln", "geonorm"]
    (axes,) = curves_figure(group.answer).axes
    names = ["keel", "post-ln", "pre-ln", "geonorm (x: diverged)"]
    assert axes.get_legend_handles_labels()[1] == names
    # the names stand beside the lines, the best at the bottom
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert sorted(heights, key=heights.get) == names


@pytest.mark.parametrize("wanted", [[0.0] * 5, [1.0] * 9, [0.1, 0.11, 0.5, 0.52, 0.53, 1.0], [0.3]])
def test_names_do_not_overlap(wanted):
    places = spread(wanted, 0.1)
    assert min([after - before for before, after in pairwise(places)], default=1) >= 0.1 - 1e-9
    assert -1e-9 <= places[0] <= places[-1] <= 1 + 1e-9


def test_no_panel_is_empty(tmp_path):
    calm = write_run(tmp_path / "calm", steps=20)
    assert len(FIGURES["gradients"][1](read_group([calm])).axes) == 1
    lines = [json.loads(line) | {"spikes": 1} for line in (calm / "metrics.jsonl").read_text().splitlines()]
    (calm / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(FIGURES["gradients"][1](read_group([calm])).axes) == 2


def test_pgf_is_whole_and_its_texts_are_text(tmp_path):
    nasty = r"$\input{x}$ 100% a_b #1 & ~^"
    write_run(tmp_path / "a", steps=20)
    write_run(tmp_path / "b", steps=20, train={"init_from": nasty})
    with own_style():
        text = render("training", "", FIGURES["training"][1](read_group([tmp_path])), pgf=True).pgf
    assert escape_latex(nasty) in text
    assert nasty not in text
    body = re.sub(r"\\[\\{}%]", "", text)
    assert body.count("{") == body.count("}")
    for name in ("pgfpicture", "pgfscope"):
        assert text.count(f"\\begin{{{name}}}") == text.count(f"\\end{{{name}}}") > 0
    # coordinates are in the picture, and no file of this machine is named
    assert max(float(x) for x in re.findall(r"pgfqpoint\{(-?[\d.]+)in\}", text)) < 20
    assert "/" not in re.sub(r"%.*|training loss.*", "", text)
