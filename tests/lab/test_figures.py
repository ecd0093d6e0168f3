"""Charts: what they hold, in which colours, and how the one function draws them."""

import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.lab.page.page import inline_svg
from spheret.lab.sections.charts import later_range
from spheret.support.charts import PALETTE, THEMES, Chart, Line, Panel, draw, figure, finish, own_style, scheme_styles

# a constant with the rounding errors of float32
FLAT = [8.0 * (1 + sign * 1e-7) for sign in (1, -2, 0, 2, -1, 1)]
PLACES = list(range(1, len(FLAT) + 1))
STYLE = (PALETTE[0][0], "-")


class TestColours:
    def test_each_of_the_papers_schemes_has_its_own_colour(self):
        styles = scheme_styles({name: name for name in PAPER_SCHEMES}, SCHEMES)
        assert len({colour for colour, _ in styles.values()}) == 9
        # the SpheretNorms differ in their dashes too, the others are solid
        assert len({str(dash) for name, (_, dash) in styles.items() if "spheretnorm" in name}) == 3
        assert {dash for name, (_, dash) in styles.items() if "spheretnorm" not in name} == {"-"}

    def test_a_scheme_looks_the_same_beside_any_other(self):
        every = scheme_styles({name: name for name in SCHEMES}, SCHEMES)
        for name in SCHEMES:
            assert scheme_styles({name: name}, SCHEMES)[name] == every[name]
            # a variant has the scheme's colour and other dashes than any other line
            variants = scheme_styles({"first": "residual", "second": "residual", "third": name}, SCHEMES)
            assert len(set(variants.values())) == 3
            assert variants["third"] == every[name] or name == "residual"
        # one scheme of the user's own is drawn as well
        assert scheme_styles({"mine": "mine"}, SCHEMES)["mine"] not in every.values()


PANELS = {
    "one": Chart("a", "a", [Panel([Line(name, PLACES, FLAT, STYLE) for name in "ab"], "x", "y")]),
    "log": Chart("a", "a", [Panel([Line("a", PLACES, FLAT, STYLE, FLAT, FLAT, mark="o")], "x", "y", log=True)]),
    "losses": Chart(
        "a",
        "a",
        [Panel([line := Line("a", PLACES, FLAT, STYLE)], "x", "y", limits=later_range([line]))],
        window=3,
    ),
    "shared": Chart("a", "a", [Panel([Line(n, PLACES, FLAT, STYLE)], "x", "y", n) for n in "abcde"], shared=True),
}


def drawn(chart):
    with own_style():
        made = figure(chart)
        finish(made)
    return made


class TestDrawing:
    @pytest.mark.parametrize("name", PANELS)
    def test_a_constant_is_a_flat_line(self, name):
        made = drawn(PANELS[name])
        FigureCanvasAgg(made).draw()
        for axes in (axes for axes in made.axes if axes.get_visible()):
            for line in axes.lines:
                place = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))
                assert place[:, 1].max() - place[:, 1].min() < 0.001
                assert -0.01 < place[:, 1].mean() < 1.01
            ticks = [label.get_text() for label in axes.get_yticklabels() if label.get_text()]
            assert len(ticks) == len(set(ticks))

    def test_one_legend_covers_no_plot(self):
        made = drawn(PANELS["one"])
        renderer = FigureCanvasAgg(made).get_renderer()
        made.draw(renderer)
        (legend,) = made.legends
        assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
        assert not legend.get_window_extent(renderer).overlaps(made.axes[0].get_window_extent(renderer))

    def test_a_file_has_both_themes(self):
        text = draw(PANELS["one"]).themed_svg
        for name in ("ink", "grid", "paper", "line-0"):
            light, dark = THEMES[name]
            index = list(THEMES).index(name)
            assert f"var(--c{index}, {light})" in text
            assert f"--c{index}:{dark}" in text
        # every colour of the drawing can change
        assert set(re.findall(r": (#[0-9a-f]{6})", text)) == set()

    def test_on_the_page_colours_are_variables_and_ids_are_unique(self):
        inline = inline_svg(draw(PANELS["one"]))
        assert STYLE[0] not in inline
        assert "var(--line-0)" in inline
        ids = [part.split('"')[0] for part in inline.split(' id="')[1:]]
        assert "a-figure_1" in ids
        assert len(ids) == len(set(ids))
