"""What a race prints at its end, from runs with numbers of a formula."""

import re

import pytest
from report_helpers import write_run

from spheret.lab.outcome import print_outcome
from spheret.lab.runs import read_groups
from spheret.lab.sections.answer import conclusion, headline, ranking_table
from spheret.lab.verdicts import comparisons


def rows(group, compared):
    return [[cell.text for cell in row] for row in ranking_table(group, compared).rows]


QUALITIES = {"keel": 0.0, "pre-ln": 0.5, "proj-spheretnorm": 1.0}


def outcome(tmp_path, seeds, **more):
    """The runs of three schemes, the best last by name."""
    for name, quality in QUALITIES.items():
        for seed in range(seeds):
            write_run(tmp_path / f"{name}-{seed}", name, seed=seed, quality=quality, **more.get(name, {}))
    (group,) = read_groups([tmp_path])
    return group, comparisons(group)


def test_the_best_comes_first_with_its_distance_to_the_others(tmp_path, capsys, monkeypatch):
    group, compared = outcome(tmp_path, 5)
    assert list(group.contestants) == ["proj-spheretnorm", "pre-ln", "keel"]
    first, second, third = table = rows(group, compared)
    assert first[2:4] == ["-", "-"]
    low, high = map(float, second[3].split(" to "))
    assert low <= float(second[2]) <= high
    assert float(second[2]) == pytest.approx(0.5, abs=0.3)
    # the sentence of the page has the numbers of the table
    losses = [float(row[1].split()[0]) for row in table]
    found = [float(number) for number in re.findall(r"\d\.\d{3}", headline(group))]
    assert found == pytest.approx([losses[0], losses[1] - losses[0], losses[2] - losses[0]], abs=0.0011)
    assert headline(group).startswith(f"{first[0]} has the lowest validation loss")
    assert f"The next, {second[0]}, is" in headline(group)
    assert f"the last, {third[0]}," in headline(group)
    assert conclusion(group, compared).startswith(
        "proj-spheretnorm is better than every other contestant on these seeds"
    )
    # no cell is cut on a narrow terminal
    monkeypatch.setenv("COLUMNS", "30")
    print_outcome(read_groups([tmp_path]))
    *_, sentence = printed = capsys.readouterr().out.splitlines()
    assert sentence == conclusion(group, compared)
    for row in table:
        assert any(all(cell in line for cell in row) for line in printed)


def test_one_seed_has_no_winner(tmp_path):
    sentence = conclusion(*outcome(tmp_path, 1))
    assert "no pair has a winner" in sentence
    assert "the noise of the validation text alone; repeat with --seeds 5, or `spheret study PLAN.toml`" in sentence


def test_a_diverged_contestant_comes_last(tmp_path):
    group, compared = outcome(tmp_path, 1, **{"proj-spheretnorm": {"diverged": 30}})
    assert list(group.contestants) == ["pre-ln", "keel", "proj-spheretnorm"]
    assert rows(group, compared)[-1][1:4] == ["diverged", "-", "-"]


def test_equal_contestants_and_none_that_finished(tmp_path):
    for seed in range(3):
        for name in ("keel", "pre-ln"):
            write_run(tmp_path / "equal" / f"{name}-{seed}", name, seed=seed)
    (group,) = read_groups([tmp_path / "equal"])
    assert conclusion(group, comparisons(group)).startswith("No pair has a winner on 3 seeds, which does not mean ")
    write_run(tmp_path / "one" / "keel-1", "keel", diverged=30)
    (group,) = read_groups([tmp_path / "one"])
    assert "nothing can be concluded: take lower rates with --lr" in conclusion(group, comparisons(group))
    assert headline(group) == ""
