"""step_cost.json: whole or measured again, and comparable only within one measurement."""

import json

import pytest

from spheret.runs.layout import RUN_FILES, STEP_COST
from spheret.runs.step_cost import StepCost, measured_together, read_step_cost

TOGETHER = {"pre-ln": 0.08, "keel": 0.09}


def cost(name, **changes):
    return StepCost.of(name, {**TOGETHER, **changes}, 7, "cpu", {"threads": 1})


def test_there_and_back(tmp_path):
    assert read_step_cost(tmp_path) is None
    cost("keel").write(tmp_path)
    assert read_step_cost(tmp_path) == cost("keel")
    assert read_step_cost(tmp_path).seconds == 0.09
    document = json.loads((tmp_path / STEP_COST).read_text())
    assert document["seconds"] == 0.09
    assert "interleaved in one process" in document["method"]
    # `--force` removes it with the run
    assert STEP_COST in RUN_FILES


def test_only_one_measurement_can_be_compared():
    assert measured_together([cost("pre-ln"), cost("keel"), cost("keel")])
    assert not measured_together([cost("pre-ln"), None])
    assert not measured_together([None, cost("pre-ln")])
    assert not measured_together([cost("pre-ln"), cost("keel", keel=0.1)])


@pytest.mark.parametrize(
    "text",
    [
        "{", "{}", '{"format": "spheret-step-cost", "version": 1}',
        json.dumps({
            "format": "spheret-step-cost", "version": 1, "contestant": "geonorm", "seconds": 0.1,
            "together": TOGETHER, "rounds": 7, "device": "cpu", "machine": {}, "method": "",
        }),
    ],
)  # fmt: skip
def test_a_damaged_file(tmp_path, text):
    (tmp_path / STEP_COST).write_text(text)
    with pytest.raises(ValueError, match=r"step_cost.json .*delete it, and run the race again to measure"):
        read_step_cost(tmp_path)
