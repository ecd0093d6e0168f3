"""What a race, a study and a report say last: the verdict, with who failed and at which rates."""

from report_helpers import read_group, write_run

from spheret.lab.outcome import print_outcome
from spheret.lab.report import run_findings, sections_of

QUALITIES = {"keel": 0.0, "pre-ln": 0.5, "proj-spheretnorm": 1.0}
PAGE = "report/report.html"


def runs_of(tmp_path, seeds):
    """The runs of three schemes, the best last by name."""
    for name, quality in QUALITIES.items():
        for seed in range(seeds):
            write_run(tmp_path / f"{name}-{seed}", name, seed=seed, quality=quality)
    return read_group([tmp_path])


def printed(group, capsys):
    print_outcome([group.answer], PAGE)
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
    lines = printed(group, capsys)
    assert lines[-2:] == [PAGE, headline(group)]
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
