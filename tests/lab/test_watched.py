"""Watched trainings: the file, the page that is written meanwhile, the summary of notebooks, `spheret report`."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_helpers import cell, cells, write_run
from watched_helpers import event, header, observations, write_watch

from spheret.cli import main
from spheret.lab.page.page import page
from spheret.lab.report import run_findings, sections_of
from spheret.lab.runs import read_groups
from spheret.lab.sections.watched import (
    MOST_LINES,
    MOST_POINTS,
    STREAM,
    UPDATES,
    loss_chart,
    watched_sections,
)
from spheret.lab.watch_file import MOST_COLUMNS, Watched, find_watched, in_order, read_all, read_watched
from spheret.lab.watched import watched_page, write_page
from spheret.observe.records import Observation
from spheret.support.charts import draw

CURVES = "sotu-bytes-curves"


def watched(own=None, seen=None):
    return Watched("watch", own or header(), observations() if seen is None else seen)


def charts(found):
    return [chart for section in watched_sections(found) for chart in section.charts]


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


class TestFigures:
    def test_the_loss_has_every_step(self):
        ((line,),) = [panel.lines for (chart,) in [loss_chart(watched())] for panel in chart.panels]
        assert line.x == list(range(251))
        assert line.y == [loss for each in observations() for loss in each.losses]

    def test_numbers_next_to_zero_are_zero(self):
        found = watched(seen=[replace(each, losses=[5e-324], grad_norm=5e-324) for each in observations()])
        assert set(found.losses[1]) == set(found.norms[1]) == {0.0}

    def test_many_steps_keep_their_spikes(self):
        seen = [Observation(50 * k, [1.0] * 49 + [9.0 if k == 33 else 1.0]) for k in range(1, 61)]
        (line,) = loss_chart(watched(seen=seen))[0].panels[0].lines
        assert len(line.y) <= MOST_POINTS
        assert max(line.high) == 9
        assert max(line.y) < 9

    def test_the_alarm_of_a_loss_that_is_not_finite_stands_at_the_end_of_the_line(self):
        seen = observations()
        last = Observation(300, [2.0] * 9 + [None] * 41, events=[event(260, kind="not finite", sublayer=None)])
        (panel,) = loss_chart(watched(seen=[*seen, last]))[0].panels
        assert panel.lines[0].x[-1] == panel.marks[0].x == 259

    def test_alarms_are_marked(self):
        events = {2: [event(90), event(90, sublayer=1)], 4: [event(200, level="warning", kind="dead")]}
        found = {chart.name: chart.panels[0] for chart in charts(watched(seen=observations(events=events)))}
        for name in ("loss", "norm-time"):
            assert [(mark.x, mark.text) for mark in found[name].marks] == [(90, "exploding"), (200, "dead")]

    def test_every_measure_is_shown_over_depth_and_over_time(self):
        found = {chart.name: chart.panels[0].lines for chart in charts(watched())}
        for measure in (*STREAM, *UPDATES):
            stem, last = measure.key.replace("_", "-"), observations()[-1]
            seen = [getattr(each, measure.key) for each in last.sublayers]
            assert found[f"{stem}-depth"][0].y == [value for value in seen if value is not None]
            assert 1 < len(found[f"{stem}-time"]) <= MOST_LINES
            assert found[f"{stem}-time"][-1].x[-1] == last.step
        assert len(found) == 2 + 2 * len((*STREAM, *UPDATES))

    @pytest.mark.parametrize(
        ("own", "seen"),
        [
            (header(1), observations(1, steps=1)),
            (header(3), [Observation(0, [1.0])]),
            (header(3), [Observation(5, [None], grad_norm=0.0)]),
            (header(2), [Observation(5, [-1.0, -1.0], grad_norm=1e-200), *observations(2, steps=3)[1:]]),
        ],
    )
    def test_charts_are_drawn_and_named_by_the_sections(self, own, seen):
        found = charts(watched(own, in_order(seen)))
        # the first ones: of the measures all are alike
        for chart in found[:4]:
            assert draw(chart, with_png=False).svg
        text = watched_page(own, seen)
        shown = {each["id"].removeprefix("figure-") for each in Elements(text).all("figure")}
        assert shown == {chart.name for chart in found}
        assert not shown or not re.search(r"\b(NaN|Infinity)\b", json.dumps(charts_of(text)))


class TestPage:
    def test_the_table_has_the_last_numbers(self, tmp_path):
        (tmp_path / "report.html").write_text(page("w", watched_sections(Watched("w", header(), observations()))))
        last = observations()[-1]
        for measure in (*STREAM, *UPDATES):
            found = cell(tmp_path, "sublayers", "layers.0.mlp", measure.name)
            value = getattr(last.sublayers[1], measure.key)
            assert (float(found["value"]) if found["value"] else None) == value
            if value is not None:
                assert found["source"] == f"w[{last.step}].sublayers[2].{measure.key}"


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


class TestReport:
    def test_a_watched_training_alone(self, tmp_path, capsys):
        path = write_watch(tmp_path / "mine" / "watch.jsonl", header(0), observations(0, events={2: [event(100)]}))
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
        files, others = find_watched([tmp_path / "all"])
        text = page("all", sections_of(run_findings(read_groups(others), read_all(files))))
        (tmp_path / "report.html").write_text(text)
        ids = [
            each["id"] for tag in ("section", "figure", "table") for each in Elements(text).all(tag) if "id" in each
        ]
        assert len(ids) == len(set(ids))
        assert {"watched-watched-1", "watched-watched-2", "figure-loss-watched-2", f"figure-{CURVES}"} <= {*ids}
        assert {row["table"] for row in cells(tmp_path)} >= {"runs", "events-watched-1"}
        assert "figure-loss" not in ids
