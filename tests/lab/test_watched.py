"""Watched trainings: the file, the page that is written meanwhile, the summary of notebooks, `spheret report`."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import damage
import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from report_helpers import cell, cells, write_run
from watched_helpers import event, header, observations, write_watch

from spheret.cli import main
from spheret.lab.figures.lines import MOST_POINTS
from spheret.lab.figures.svg import CIVIDIS, Scale, draw_chart, draw_map, spread_scale
from spheret.lab.figures.watched import STREAM, UPDATES, curves, draw
from spheret.lab.report import report
from spheret.lab.sections.watched import headline
from spheret.lab.watch_file import MOST_COLUMNS, Watched, find_watched, in_order, read_watched
from spheret.lab.watched import summary_html, watched_page, write_page
from spheret.support.documents import DamagedDocument
from spheret.watching.observations import Observation, PlaceObservation, SublayerName

NASTY = "<script>alert(1)</script>&\"'`"


def watched(own=None, seen=None):
    return Watched("watch", own or header(), observations() if seen is None else seen)


def charts_of(text):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)[1])


class Elements(HTMLParser):
    """Every start tag of a page, with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


class TestFile:
    def test_what_was_written_is_read(self, tmp_path):
        own, seen = header(note="compiled"), observations(events={2: [event(100)]})
        found = read_watched(write_watch(tmp_path / "watch.jsonl", own, seen), "mine")
        assert (found.name, found.header, list(found.observations)) == ("mine", own, seen)

    def test_a_cut_last_line_is_left_out(self, tmp_path):
        path = write_watch(tmp_path / "watch.jsonl", header(), observations(), cut=b'{"step":900,"lo')
        assert read_watched(path, "mine").step == observations()[-1].step

    def test_numbers_that_were_not_finite_are_null(self, tmp_path):
        seen = [Observation(0, [float("nan"), float("inf"), 2.0], grad_norm=float("inf"))]
        found = read_watched(write_watch(tmp_path / "watch.jsonl", header(), seen), "mine")
        assert found.observations[0].losses == [None, None, 2.0]
        assert found.observations[0].grad_norm is None

    def test_after_a_restart_the_later_lines_count(self):
        first, again = observations(steps=6, seed=1), observations(steps=8, seed=2)[3:]
        assert in_order([*first, *again]) == [*first[:3], *again]

    @pytest.mark.parametrize(
        ("line", "content", "words"),
        [
            (3, b"{", "line 3"),
            (3, b"", "line 3"),
            (2, b'{"step": "one"}', "step"),
            (4, b'{"step": -1}', "line 4"),
            (4, b'{"step": 1' + b"0" * 3000 + b"}", "line 4"),
            (2, b'{"step": 1, "events": [{"kind": "boredom"}]}', "events"),
            (2, b"\xff\xfe", "line 2"),
            (1, b"{}", "spheret.watch"),
            (1, b"[]", "spheret.watch"),
            (1, b'{"format": "spheret-watch", "version": 2}', "version 2"),
            (1, b'{"format": "spheret-watch", "version": 1}', "model"),
        ],
    )
    def test_a_damaged_line_is_named(self, tmp_path, line, content, words):
        path = write_watch(tmp_path / "watch.jsonl", header(), observations())
        lines = path.read_bytes().splitlines()
        lines[line - 1] = content
        path.write_bytes(b"\n".join(lines) + b"\n")
        with pytest.raises(DamagedDocument, match=words) as error:
            read_watched(path, "mine")
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("line", [0, 1, 2])
    def test_what_is_read_can_be_shown(self, tmp_path, line):
        path = write_watch(
            tmp_path / "watch.jsonl", header(2), observations(2, 2, 2, events={1: [event(2)]}, places=1)
        )
        lines, shown = path.read_bytes().splitlines(), 0
        for _, _, damaged in damage.damages(json.loads(lines[line])):
            content = b"\n".join([*lines[:line], damage.dump(damaged).encode(), *lines[line + 1 :], b""])
            damage.overwrite(path, content)
            try:
                found = read_watched(path, "mine")
            except DamagedDocument:
                continue
            watched_page(found.header, found.observations)
            shown += 1
        assert shown > 10

    def test_an_empty_file_is_no_training_yet(self, tmp_path):
        for content in (b"", b'{"format": "spheret'):
            (tmp_path / "watch.jsonl").write_bytes(content)
            with pytest.raises(DamagedDocument):
                read_watched(tmp_path / "watch.jsonl", "mine")

    def test_a_long_training_is_thinned(self, tmp_path):
        seen = observations(sublayers=2, steps=3 * MOST_COLUMNS + 7, every=2, places=0)
        found = read_watched(write_watch(tmp_path / "watch.jsonl", header(2), seen), "mine")
        assert MOST_COLUMNS / 2 < len(found.shown) <= MOST_COLUMNS
        assert found.last == seen[-1]
        # every loss and every event stays
        assert [each.losses for each in found.observations] == [each.losses for each in seen]

    def test_which_paths_are_watched(self, tmp_path):
        write_run(tmp_path / "runs" / "a", "pre-ln")
        write_watch(tmp_path / "runs" / "a" / "watch.jsonl", header(), observations())
        inside = write_watch(tmp_path / "runs" / "b" / "watch.jsonl", header(), observations())
        alone = write_watch(tmp_path / "elsewhere.jsonl", header(), observations())
        runs = tmp_path / "runs"
        assert find_watched([inside]) == ([inside], [])
        assert find_watched([inside.parent, alone]) == ([inside, alone], [])
        # a run directory is a run, whatever else it holds
        assert find_watched([runs / "a"]) == ([], [runs / "a"])
        assert find_watched([runs]) == ([inside], [runs])
        assert find_watched([tmp_path / "absent"]) == ([], [tmp_path / "absent"])


class TestHeadline:
    def test_without_an_alarm(self):
        assert headline(watched(seen=[])) == "No step was watched yet."
        assert headline(watched()) == "No alarm by step 250."
        assert "1 warning" in headline(watched(seen=observations(events={1: [event(50, level="warning")]})))

    def test_the_first_alarm_is_named(self):
        events = {1: [event(40, level="warning")], 2: [event(100, where="the batch")], 4: [event(200)]}
        words = headline(watched(seen=observations(events=events)))
        assert "2 alarms" in words
        assert "step 100 in the batch" in words


class TestFigures:
    def test_the_loss_has_every_step(self):
        _, chart = curves(watched())["loss"]
        assert chart["xs"][0] == list(range(251))
        (line,) = chart["series"][0]["lines"]
        losses = [loss for each in observations() for loss in each.losses]
        assert line["y"] == pytest.approx(losses, rel=1e-3)

    def test_many_steps_keep_their_spikes(self):
        seen = [Observation(50 * k, [1.0] * 49 + [9.0 if k == 33 else 1.0]) for k in range(1, 61)]
        _, chart = curves(watched(seen=seen))["loss"]
        (line,) = chart["series"][0]["lines"]
        assert len(line["y"]) <= MOST_POINTS
        assert max(line["high"]) == 9
        assert max(line["y"]) < 9

    def test_a_loss_that_is_not_finite_leaves_a_gap(self):
        _, chart = curves(watched(seen=[Observation(4, [3.0, None, 1e300, 2.0])]))["loss"]
        assert chart["xs"] == [[1, 4]]

    def test_the_alarm_of_a_loss_that_is_not_finite_stands_at_the_end_of_the_line(self):
        seen = observations()
        last = Observation(300, [2.0] * 9 + [None] * 41, events=[event(260, kind="not finite", sublayer=None)])
        _, chart = curves(watched(seen=[*seen, last]))["loss"]
        assert chart["xs"][0][-1] == chart["marks"][0]["x"] == 259

    def test_alarms_are_marked(self):
        events = {2: [event(90), event(90, sublayer=1)], 4: [event(200, level="warning", kind="dead")]}
        found = watched(seen=observations(events=events))
        _, chart = curves(found)["loss"]
        assert [(mark["x"], mark["text"]) for mark in chart["marks"]] == [(90, "exploding"), (200, "dead")]
        drawings = {drawing.name: drawing.svg for drawing in draw(found)[0]}
        assert "exploding</text>" in drawings["loss"]
        # three rings on each map, each with its rim
        assert drawings["norm-time"].count("<circle") == 6

    def test_every_measure_has_a_chart_and_a_map(self):
        drawings, charts = draw(watched())
        names = [drawing.name for drawing in drawings]
        for measure in (*STREAM, *UPDATES):
            stem = measure.key.replace("_", "-")
            assert {f"{stem}-depth", f"{stem}-time"} <= set(names)
            last = charts[f"{stem}-depth"]["series"][0]
            seen = [getattr(each, measure.key) for each in observations()[-1].sublayers]
            assert last["lines"][0]["y"] == pytest.approx([value for value in seen if value is not None], rel=1e-3)
        assert len(names) == len(set(names)) == 2 + 2 * len((*STREAM, *UPDATES))

    @pytest.mark.parametrize(
        ("own", "seen"),
        [
            (header(), observations(events={1: [event(50)]})),
            (header(1), observations(1, steps=1)),
            (header(0), observations(0)),
            (header(3), [Observation(0, [1.0])]),
            (header(3), [Observation(5, [None], grad_norm=0.0)]),
            (header(2), [Observation(5, [-1.0, -1.0], grad_norm=1e-200), *observations(2)[1:]]),
            (header(4), observations(2)),
        ],
    )
    def test_figures_are_valid_and_named_by_the_sections(self, own, seen):
        found = watched(own, in_order(seen))
        drawings, charts = draw(found)
        for drawing in drawings:
            root = ElementTree.fromstring(drawing.svg)
            assert not re.search(r"\b(nan|inf)\b", ElementTree.tostring(root, "unicode"))
        text = watched_page(own, seen)
        shown = {each["id"].removeprefix("figure-") for each in Elements(text).all("figure")}
        assert shown == {drawing.name for drawing in drawings}
        assert charts.keys() <= shown

    def test_scales_have_a_least_span(self):
        flat = spread_scale([3.0, 3.0], 0, 1)
        assert 0.3 <= flat.high - flat.low < 0.35
        flat = spread_scale([0.0, 0.0], 0, 1)
        assert flat.high - flat.low == pytest.approx(0.01)
        flat = spread_scale([3.0, 3.0], 0, 1, log=True)
        assert flat.high / flat.low > 2

    @pytest.mark.parametrize(
        ("scale", "ticks"),
        [
            (Scale(0, 1, 0, 100), [0, 0.2, 0.4, 0.6, 0.8, 1]),
            (Scale(-3, 42, 0, 100), [0, 10, 20, 30, 40]),
            (Scale(1, 100, 0, 100, log=True), [1, 2, 5, 10, 20, 50, 100]),
            (Scale(1e-6, 1, 0, 100, log=True), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]),
        ],
    )
    def test_ticks_are_round(self, scale, ticks):
        assert scale.ticks == pytest.approx(ticks)
        assert scale.place(scale.low) == pytest.approx(0)
        assert scale.place(scale.high) == pytest.approx(100)

    def test_a_point_lies_where_the_axes_say(self):
        line = {"x": 0, "y": [0.0, 1.0]}
        series = {"label": "a", "colour": 0, "dash": [], "diverged": True, "lines": [line]}
        chart = {"x": "step", "y": "y", "log": False, "xs": [[0, 10]], "series": [series], "range": [0, 1]}
        paths = re.findall(r'd="M50.0 246.0L448.0 26.0"', draw_chart("a", "a", chart).svg)
        assert len(paths) == 1

    def test_the_colours_of_a_map(self):
        values = np.array([[0.0, 1.0], [0.5, np.nan]])
        svg = draw_map("a", "a", values, [0, 1], "x", "y", ends=(0, 1)).svg
        data = re.search(r"base64,([^\"]+)", svg)[1]
        pixels = np.array(Image.open(io.BytesIO(base64.b64decode(data))))
        # the first row lies at the bottom, and what was not measured is transparent
        assert pixels.shape == (2, 2, 4)
        assert pixels[1, 0].tolist() == [0x00, 0x22, 0x4E, 255]
        assert pixels[1, 1].tolist() == [0xFE, 0xE8, 0x38, 255]
        assert pixels[0, 1, 3] == 0

    def test_the_colours_are_those_of_matplotlib(self):
        ours = np.array([list(bytes.fromhex(colour)) for colour in CIVIDIS])
        theirs = 255 * colormaps["cividis"](np.linspace(0, 1, len(CIVIDIS)))[:, :3]
        assert abs(ours - theirs).max() < 2


class TestPage:
    def test_the_verdict_comes_first(self):
        text = watched_page(header(), observations(events={3: [event(150, where="layers.1.mlp")]}))
        main_part = unescape(text[text.index("<main>") :])
        assert (
            main_part.index(headline(watched(seen=observations(events={3: [event(150, where="layers.1.mlp")]}))))
            < 500
        )
        for words in (event(0).sentence, event(0).remedy):
            assert words in main_part

    def test_it_needs_nothing_beside_it(self):
        text = watched_page(header(), observations())
        elements = Elements(text)
        assert not [each for each in elements.all("a") if not each["href"].startswith("#")]
        images = [each["href"] for each in elements.all("image")]
        assert images
        assert all(address.startswith("data:image/png;base64,") for address in images)

    def test_it_is_read_again_while_the_training_goes_on(self):
        def refreshed(text):
            return [each["content"] for each in Elements(text).all("meta") if each.get("http-equiv") == "refresh"]

        assert refreshed(watched_page(header(), observations(), refresh=20)) == ["20"]
        assert refreshed(watched_page(header(), observations())) == []

    def test_equal_observations_give_equal_bytes(self):
        assert watched_page(header(), observations()) == watched_page(header(), observations())

    def test_numbers_that_are_not_finite_are_as_those_that_were_not_measured(self):
        def seen(value):
            found = observations()
            found[2] = replace(found[2], losses=[value, *found[2].losses[1:]], grad_norm=value)
            found[-1].sublayers[1] = replace(found[-1].sublayers[1], norm=value, update=value)
            found[-1].places[0] = replace(found[-1].places[0], grad_norm=value)
            return found

        expected = watched_page(header(), seen(None))
        assert watched_page(header(), seen(float("nan"))) == expected
        assert watched_page(header(), seen(float("inf"))) == expected

    def test_hostile_names_are_text(self):
        names = [SublayerName(k, f"{NASTY}{k}", NASTY) for k in (1, 2)]
        own = replace(header(2, model=NASTY, note=NASTY), sublayers=names)
        nasty = event(50, 1, where=NASTY, sentence=NASTY, remedy=NASTY)
        seen = observations(2, events={1: [nasty]})
        seen[-1].places.append(PlaceObservation(NASTY, 1.0, 1.0))
        seen[-1].on_bound.append(NASTY)
        plain = Elements(watched_page(header(2, note="note"), observations(2, events={1: [event(50, 1)]})))
        text = watched_page(own, seen)
        for page, most in ((text, len(plain.all("script"))), (summary_html(own, seen), 0)):
            assert len(Elements(page).all("script")) == most
            assert "alert(1)" in page

    def test_the_table_has_the_last_numbers(self, tmp_path):
        write_watch(tmp_path / "w" / "watch.jsonl", header(), observations())
        report([tmp_path / "w"], tmp_path / "report")
        last = observations()[-1]
        for measure in (*STREAM, *UPDATES):
            found = cell(tmp_path / "report", "sublayers", "layers.0.mlp", measure.name)
            value = getattr(last.sublayers[1], measure.key)
            assert (float(found["value"]) if found["value"] else None) == value
            if value is not None:
                assert found["source"] == f"w[{last.step}].sublayers[2].{measure.key}"

    def test_what_was_not_measured_is_said(self):
        seen = observations()
        for each in seen:
            each.sublayers = [replace(row, sink=None) for row in each.sublayers]
        text = unescape(watched_page(header(), seen))
        assert re.search(r"<p>Not measured[^<]*\bsink\b", text)
        assert "sink-depth" not in text
        assert not re.search(r"<p>Not measured[^<]*\bsink\b", unescape(watched_page(header(), observations())))

    def test_parameters_only_says_why(self):
        text = unescape(watched_page(header(0, note="No sum was found."), observations(0)))
        assert "<p>No sum was found.</p>" in text
        assert 'id="table-places"' in text
        assert "grad-norm-time" in text
        assert "norm-depth" not in charts_of(text)


class TestWriting:
    def test_a_page_of_ours_is_replaced(self, tmp_path):
        path = tmp_path / "new" / "watch.html"
        write_page(path, header(), observations(), refresh=5)
        write_page(path, header(), observations())
        assert path.read_text() == watched_page(header(), observations())
        assert [entry.name for entry in path.parent.iterdir()] == ["watch.html"]

    @pytest.mark.parametrize("content", ["<!doctype html><title>mine</title>", "notes"])
    def test_any_other_file_stays(self, tmp_path, content):
        path = tmp_path / "watch.html"
        path.write_text(content)
        with pytest.raises(FileExistsError, match=re.escape(str(path))):
            write_page(path, header(), observations())
        assert path.read_text() == content

    def test_links_and_directories_are_refused(self, tmp_path):
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "link").symlink_to(tmp_path / "mine")
        (tmp_path / "folder").mkdir()
        for name in ("link", "folder"):
            with pytest.raises((ValueError, OSError)):
                write_page(tmp_path / name, header(), observations())
        assert (tmp_path / "mine").read_text() == "mine"


class TestSummary:
    def test_it_is_a_fragment_that_stands_alone(self):
        seen = observations(events={k: [event(50 * k, sentence=f"At {k}.")] for k in range(6)})
        text = summary_html(header(), seen)
        elements = Elements(text)
        assert not {"html", "head", "script", "style", "link"} & {tag for tag, _ in elements.found}
        assert headline(watched(seen=seen)) in unescape(text)
        assert len(elements.all("svg")) == 1
        # the last five of six
        assert "At 5." in text
        assert "At 0." not in text

    def test_before_the_first_step(self):
        assert Elements(summary_html(header(), [])).all("table") == []


class TestReport:
    def test_a_watched_training_alone(self, tmp_path, capsys):
        path = write_watch(tmp_path / "mine" / "watch.jsonl", header(), observations(events={2: [event(100)]}))
        assert main(["report", str(path), "--out", str(tmp_path / "report")]) == 0
        assert "1 alarm" in capsys.readouterr().out.splitlines()[-1]
        text = (tmp_path / "report" / "report.html").read_text()
        assert charts_of(text)["loss"]["marks"]
        # what the page links to is there
        links = [each["href"] for each in Elements(text).all("a") if not each["href"].startswith("#")]
        assert links
        assert all((tmp_path / "report" / link).is_file() for link in links)

    def test_beside_runs_and_others(self, tmp_path):
        write_run(tmp_path / "all" / "run", "pre-ln")
        for name in ("one", "two"):
            write_watch(tmp_path / "all" / name / "watch.jsonl", header(), observations(events={2: [event(100)]}))
        report([tmp_path / "all"], tmp_path / "report")
        text = (tmp_path / "report" / "report.html").read_text()
        ids = [
            each["id"] for tag, each in Elements(text).found if "id" in each and tag in ("section", "figure", "table")
        ]
        assert len(ids) == len(set(ids))
        assert {"watched-watched-1", "watched-watched-2", "figure-loss-watched-2", "figure-training"} <= set(ids)
        assert {row["table"] for row in cells(tmp_path / "report")} >= {"results", "events-watched-1"}
        assert "figure-loss" not in ids

    def test_a_damaged_file_is_a_sentence(self, tmp_path, capsys):
        path = write_watch(tmp_path / "watch.jsonl", header(), observations())
        path.write_bytes(path.read_bytes() + b"{}\n")
        assert main(["report", str(path), "--out", str(tmp_path / "report")]) == 2
        error = capsys.readouterr().err
        assert "line 8" in error
        assert "Traceback" not in error
        assert not (tmp_path / "report").exists()


def test_a_page_is_made_without_matplotlib():
    # drawing with it takes seconds, while a training waits
    code = """
import sys
from watched_helpers import event, header, observations
from spheret.lab.watched import summary_html, watched_page
seen = observations(events={2: [event(100)]})
watched_page(header(), seen), summary_html(header(), seen)
print("matplotlib" in sys.modules)
"""
    path = os.pathsep.join(map(str, (Path(__file__).parents[1] / "helpers", Path(__file__).parents[2])))
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert run.stdout == "False\n"
