"""Transfer of the best learning rate across sizes, from rows whose best rates are known."""

import math
import re

import numpy as np
import pytest
from study_helpers import bowl, plan_of, row, run_all

from spheret.lab.answers import group_answers
from spheret.lab.report import study_findings, write_report
from spheret.lab.sections.transfer import transfer_section, transfer_sentences
from spheret.lab.transfer import transfers

MAP = """
[model]
width = 32
heads = 4

[[parts]]
name = "width"
contestants = ["pre-ln", "post-ln", "keel"]
rates = [2e-3, 4e-3, 8e-3]
tuning_seeds = 2
seeds = 0
ladder = [{width = 64}, {width = 128}, {width = 256}]
"""
# the power of the width that the best rate follows
POWER = {"pre-ln": 0.0, "post-ln": -1.0, "keel": 0.5}


def best_rate(label, width):
    return 5e-3 * (width / 32) ** POWER[label]


def width_of(key):
    found = re.search(r"width(\d+)", key.group)
    return int(found[1]) if found else 32


def loss_of(key, deviation=0.0):
    return bowl(best_rate(key.contestant, width_of(key)), deviation=deviation)(key)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("plan"), MAP)


def found(plan, loss_of=loss_of):
    rows, _ = run_all(plan, loss_of)
    (transfer,) = transfers(group_answers(plan, rows))
    return transfer, rows


def test_powers_and_costs_are_those_of_the_losses(plan):
    transfer, _ = found(plan)
    assert (transfer.key, transfer.sizes) == ("width", (32, 64, 128, 256))
    for contestant in transfer.contestants:
        # the losses are parabolas of log(rate), so that the vertex is exact
        assert contestant.power == pytest.approx(POWER[contestant.label], abs=1e-9)
        base = contestant.rates[0].rate
        for width, each in zip(transfer.sizes, contestant.rates, strict=True):
            best = best_rate(contestant.label, width)
            assert each.vertex == pytest.approx(best)
            bowls = [0.1 * math.log2(rate / best) ** 2 for rate in (base, each.rate)]
            assert each.cost == pytest.approx(bowls[0] - bowls[1], abs=1e-12)
            assert len(each.kept) == 2


def test_noise_moves_a_vertex_as_a_fit_of_three_points_would(plan):
    transfer, _ = found(plan, lambda key: loss_of(key, deviation=0.05))
    seen = 0
    for contestant in transfer.contestants:
        for each in contestant.rates:
            if each.vertex is None:
                continue
            rates = list(each.entry.search.losses)
            near = [rates[rates.index(each.rate) + step] for step in (-1, 0, 1)]
            a, b, _ = np.polyfit(np.log(near), [each.entry.search.losses[rate] for rate in near], 2)
            assert each.vertex == pytest.approx(math.exp(-b / (2 * a)), rel=1e-6)
            seen += 1
    assert seen > 6


def test_the_rate_of_the_smallest_size_is_tried_at_every_size(plan):
    transfer, rows = found(plan)
    for contestant in transfer.contestants:
        for group in plan.groups:
            tried = {key.rate for key in rows if key.group == group.name and key.contestant == contestant.label}
            assert contestant.rates[0].rate in tried


def test_a_kept_rate_that_fails_is_said(plan):
    def failing(key):
        late = key.contestant == "post-ln" and width_of(key) == 256 and key.rate > 3e-3
        return row(key, 3.0, "collapsed") if late else loss_of(key)

    transfer, _ = found(plan, failing)
    contestant = next(each for each in transfer.contestants if each.label == "post-ln")
    assert contestant.rates[-1].kept is None
    words = transfer_sentences(transfer)[1]
    assert "power -1.00; keeping the best rate of width 32 fails at width 256" in words
    first, last = (each.entry.search.losses[each.rate] for each in (contestant.rates[0], contestant.rates[-1]))
    assert f"its lowest loss is {first:.3f} at width 32 and {last:.3f} at width 256" in words
    (table,) = transfer_section(transfer, first=True).tables
    cells = next(row for row in table.rows if row[0].text == "post-ln")
    assert cells[-1].text == "failed"


def test_before_a_second_size_has_runs_there_is_nothing_to_say(plan):
    rows, order = run_all(plan, loss_of)
    smallest = {key: rows[key] for key in order if key.group == "width"}
    assert transfers(group_answers(plan, {})) == []
    assert transfers(group_answers(plan, smallest)) == []
    begun = smallest | {key: rows[key] for key in order if key.group == "width-width64"}
    (transfer,) = transfers(group_answers(plan, begun))
    assert [each.cost is None for each in transfer.contestants[0].rates] == [False, False, True, True]
    assert transfer.contestants[0].power is None
    assert transfer_sentences(transfer)[0] == "pre-ln: not run at all sizes."


def test_the_page_begins_with_it(plan, tmp_path):
    rows, _ = run_all(plan, loss_of)
    page = write_report(study_findings(plan, rows), tmp_path / "report").read_text()
    assert re.search(r"<h2[^>]*>The answer: width", page)
    assert "post-ln: the best rate goes as width to the power -1.00" in page
    assert list((tmp_path / "report").rglob("width-transfer.svg"))
