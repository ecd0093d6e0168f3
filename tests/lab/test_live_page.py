"""The page of a race or a study while it runs."""

import re
import time

import pytest
from planted import planted
from report_helpers import write_run

from spheret.cli import main
from spheret.lab import live_page
from spheret.lab.live_page import REFRESH, LivePage
from spheret.lab.report import run_findings, write_report
from spheret.lab.runs import read_groups

REFRESHED = f'<meta http-equiv="refresh" content="{REFRESH}">'

SETTINGS = """
[model]
layers = 1
heads = 2
width = 16
block = 16
[train]
steps = 10
batch_size = 2
[evaluation]
eval_windows = 8
"""
HEAD = 'title = "a"\nreference = "pre-ln"\n'
PART = """
[[parts]]
name = "a"
contestants = ["pre-ln", "keel"]
rates = [1e-3, 2e-3]
extend = 0
seeds = 1
"""


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def runs(tmp_path):
    """Three runs, one of them in training."""
    for seed in (1, 2):
        write_run(tmp_path / "race" / f"pre-ln-{seed}", "pre-ln", seed)
    write_run(tmp_path / "race" / "keel-1", "keel", until=45)
    return tmp_path / "race"


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(live_page, "SECONDS", 0.0)
    monkeypatch.setattr(live_page, "SHARE", 1e9)


def live(runs, quiet=False, findings=None):
    return LivePage(runs / "report", findings or (lambda: run_findings(read_groups([runs]))), "race", quiet)


def files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_every_run_is_on_the_page(runs, at_once, capsys):
    page = live(runs)
    page.update()
    text = (runs / "report" / "report.html").read_text()
    assert REFRESHED in text
    # the curves of those that have ended and of the one in training, alive and as pictures
    assert re.search(r'"training":.*?"label":"keel"', text)
    for name in ("training", "gradients", "sotu-bytes-curves"):
        figure = text[text.index(f'<figure id="figure-{name}"') :]
        assert "<svg" in figure[: figure.index("</figure>")]
    for link in re.findall(r'href="(figures/[^"]+|tables[^"]+)"', text):
        assert (runs / "report" / link).is_file()
    # where it is is said once
    page.update()
    assert capsys.readouterr().err.count("report.html") == 1


def test_the_report_at_the_end_is_the_same(runs, at_once, tmp_path):
    found = run_findings(read_groups([runs]))
    write_report(found, runs / "report")
    expected = files(runs / "report")
    with live(runs) as page:
        page.update()
        assert files(runs / "report") != expected
        write_report(found, runs / "report")
    assert files(runs / "report") == expected
    assert REFRESHED.encode() not in b"".join(expected.values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_stopped_is_not_read_again(runs, at_once, error):
    page = live(runs)
    page.update()
    page.__exit__(error, error(), None)
    text = (runs / "report" / "report.html").read_text()
    assert REFRESHED not in text
    assert 'id="figure-training"' in text


def test_nothing_is_written_too_soon_or_before_there_is_something(runs, monkeypatch):
    asked = []

    def nothing():
        asked.append(time.monotonic())
        time.sleep(0.02)

    with live(runs, findings=nothing) as page:
        page.update()
    assert not asked
    monkeypatch.setattr(live_page, "SECONDS", 0.0)
    monkeypatch.setattr(live_page, "SHARE", 0.1)
    page = live(runs, findings=nothing)
    for _ in range(10):
        page.update()
        time.sleep(0.005)
    # each took 20 ms, of which a tenth may be spent
    assert len(asked) == 1
    assert not (runs / "report").exists()


def test_strangers_files_stay_and_the_runs_go_on(runs, at_once, capsys):
    (runs / "report").mkdir()
    (runs / "report" / "report.html").write_text("mine")
    with live(runs) as page:
        page.update()
        page.update()
    assert (runs / "report" / "report.html").read_text() == "mine"
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["race", "study"])
def test_a_real_one(command, at_once, tmp_path, monkeypatch, capsys):
    seen = []
    really = live_page.write_files

    def spy(directory, contents):
        seen.append(contents["report.html"].decode())
        return really(directory, contents)

    monkeypatch.setattr(live_page, "write_files", spy)
    with planted(tmp_path / "corpus"):
        words = [
            "race",
            "--config",
            str(write(tmp_path / "c.toml", SETTINGS)),
            "--schemes",
            "pre-ln,keel",
            "--lr",
            "1e-3",
        ]
        if command == "study":
            words = ["study", str(write(tmp_path / "plan.toml", HEAD + SETTINGS + PART))]
        assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert seen
    assert all(REFRESHED in page for page in seen)
    assert REFRESHED not in (tmp_path / "out" / "report" / "report.html").read_text()
    assert capsys.readouterr().err.count("report.html") == 1
