"""What a race, a study and a report say last: the verdict, with who failed and at which rates."""

import re

import pytest
from report_helpers import cell, cells, read_group, write_run, write_tables

from spheret.lab.outcome import print_outcome
from spheret.lab.report import run_findings, sections_of

QUALITIES = {"keel": 0.0, "pre-ln": 0.5, "proj-spheretnorm": 1.0}
PAGE = "report/report.html"
# of a contestant that collapses, and of two that do not
RATES = (0.001, 0.002, 0.004)
BY_RATE = {"pre-ln": (-0.1, 0.0, -0.1), "post-ln": (-0.5, -0.4, -0.5), "geonorm": (0.1, 0.1, 0.1)}


def runs_of(tmp_path, seeds, **more):
    """The runs of three schemes, the best last by name."""
    for name, quality in QUALITIES.items():
        for seed in range(seeds):
            write_run(tmp_path / f"{name}-{seed}", name, seed=seed, quality=quality, **more.get(name, {}))
    return read_group([tmp_path])


def printed(group, capsys, **options):
    print_outcome([group.answer], PAGE, **options)
    return capsys.readouterr().out.splitlines()


def table_of(lines):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def headline(group):
    """The first paragraph of the page."""
    return sections_of(run_findings([group]))[0].paragraphs[0]


def test_the_winner_with_its_distance_to_the_others(tmp_path, capsys, monkeypatch):
    group = runs_of(tmp_path, 3)
    answer = group.answer
    assert answer.standing.winner == "proj-spheretnorm"
    # no cell is cut on a narrow terminal
    monkeypatch.setenv("COLUMNS", "30")
    lines = printed(group, capsys, following="next: something")
    assert lines[-3:] == [PAGE, "next: something", headline(group)]
    rows = table_of(lines)
    assert [row[:2] for row in rows] == [["1", "proj-spheretnorm"], ["2", "pre-ln"], ["3", "keel"]]
    for row, entry in zip(rows, answer.entries, strict=True):
        gap = answer.gap(entry.label, "pre-ln")
        assert row[2:4] == ["0.003", f"{answer.seed_table.means[entry.label]:.3f}"]
        assert row[4] == ("-" if gap is None else f"{gap.estimate:+.3f}")
    # the sentence has the numbers of the table
    gap = answer.gap("proj-spheretnorm", "pre-ln")
    assert f"proj-spheretnorm ({answer.seed_table.means['proj-spheretnorm']:.3f}) wins" in lines[-1]
    assert f"{-gap.estimate:.3f} below the next, pre-ln" in lines[-1]


def test_quiet_prints_the_path_alone(tmp_path, capsys):
    group = runs_of(tmp_path, 1)
    assert printed(group, capsys, quiet=True, following="next: something") == [PAGE]


def test_one_seed_has_no_winner(tmp_path, capsys):
    group = runs_of(tmp_path, 1)
    lines = printed(group, capsys)
    assert "no winner" in lines[-1]
    assert not re.search(r"\bp [=<]", lines[-1])
    assert {row[5] for row in table_of(lines)} == {"-"}


def test_a_diverged_contestant_comes_last(tmp_path, capsys):
    group = runs_of(tmp_path, 2, **{"proj-spheretnorm": {"diverged": 30}})
    lines = printed(group, capsys)
    assert [row[1] for row in table_of(lines)] == ["pre-ln", "keel", "proj-spheretnorm"]
    assert table_of(lines)[-1][2:6] == ["-"] * 4
    assert "Diverged: proj-spheretnorm at 0.003" in lines[-1]


def test_equal_contestants_and_none_that_finished(tmp_path, capsys):
    for seed in range(3):
        for name in ("keel", "pre-ln"):
            write_run(tmp_path / "equal" / f"{name}-{seed}", name, seed=seed, quality=0.001 * (name == "keel"))
    group = read_group([tmp_path / "equal"])
    assert group.answer.standing.winner is None
    assert set(group.answer.standing.leaders) == {"keel", "pre-ln"}
    last = printed(group, capsys)[-1]
    assert "no winner" in last
    assert "wins" not in last
    for name, mean in group.answer.seed_table.means.items():
        assert f"{name} ({mean:.3f})" in last
    write_run(tmp_path / "one" / "keel-1", "keel", diverged=30)
    group = read_group([tmp_path / "one"])
    assert group.answer.standing is None
    assert printed(group, capsys)[-1].endswith("Diverged: keel at 0.003.")


class TestWhollyCollapsed:
    """Every run of a contestant collapsed, at a loss that is lower than those of the others."""

    @pytest.fixture(scope="class")
    def root(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("collapsed")
        for name, qualities in BY_RATE.items():
            for rate, quality in zip(RATES, qualities, strict=True):
                for seed in (1, 2):
                    write_run(
                        root / "runs" / f"{name}-lr{rate}-{seed}", name, seed, steps=20, quality=quality,
                        alarm="token collapse" if name == "geonorm" else None,
                        train={"lr": rate, "min_lr": rate / 10},
                    )  # fmt: skip
        write_tables([root / "runs"], root / "report")
        return root

    def test_it_is_named_with_its_rates_everywhere(self, root, capsys):
        group = read_group([root / "runs"])
        assert group.answer.failures == {"collapsed": {"geonorm": list(RATES)}}
        lines = printed(group, capsys)
        for text in (lines[-1], headline(group)):
            assert "Collapsed: geonorm at 0.001, 0.002 and 0.004" in text

    def test_it_is_never_ranked(self, root, capsys):
        group = read_group([root / "runs"])
        answer = group.answer
        lost = [run.val_loss.value for run in group.contestants["geonorm"]]
        assert max(lost) < min(answer.seed_table.means.values())
        assert (answer.standing.winner, answer.standing.behind) == ("pre-ln", ("post-ln",))
        assert [entry.label for entry in answer.entries] == ["pre-ln", "post-ln", "geonorm"]
        assert answer.by_label["geonorm"].mean == float("inf")
        assert table_of(printed(group, capsys))[-1][1:6] == ["geonorm", "-", "-", "-", "-"]
        report = root / "report"
        assert cell(report, "losses-sotu-bytes", "geonorm", "val loss")["text"] == "-"
        assert not [c for c in cells(report) if c["table"] == "pairs-sotu-bytes" and "geonorm" in c["row"]]
        rows = [line for line in (report / "tables.md").read_text().splitlines() if line.startswith("| geonorm")]
        assert rows
        assert not [line for line in rows if "**" in line or "<u>" in line]
