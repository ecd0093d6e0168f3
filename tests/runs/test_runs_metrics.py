"""metrics.jsonl: what was written comes back, a gap is named, and lines beyond a checkpoint are removed."""

import json
import math
from dataclasses import asdict

import msgspec
import pytest

from spheret.observe.records import Event, SublayerObservation
from spheret.runs.metrics import Log, MetricsRecord, whole_metrics


def line(step, **keys):
    return {
        "step": step, "loss": 1.0 / step, "lr": 1e-3, "grad_norm": 1.0, "spikes": 0, "tokens_per_second": 9.0,
        "seconds": 1.0 * step, **keys,
    }  # fmt: skip


def record(plain):
    return msgspec.convert(plain, MetricsRecord)


def write(path, steps):
    log = Log(path, 0)
    for step in steps:
        log.append(record(line(step)))
    log.close()


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "metrics.jsonl", range(1, 11))
    return tmp_path / "metrics.jsonl"


def steps(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_what_was_written_comes_back(tmp_path):
    measured = {"angle_mean": 0.1, "angle_max": math.nan, "norm": 1.0, "drift": 0.0, "grad_norm": math.inf}
    sublayer = asdict(SublayerObservation(1, **measured))
    common = {"common_output": 0.3}
    event = asdict(Event("collapsed", 4, "sublayer 1", "tokens collapse", measured="cosine", now=0.99))
    lines = [
        line(1, backend="native", start={"own_logit": 3.1, "loss": 6.0, "expected": 5.5}),
        line(2, val_loss=2.5, radius=None, on_bound=["a"], sublayers=[sublayer], val_documents=[[0, 5, 1.5]]),
        line(3, val_loss=2.4, radius=None, on_bound=[], sublayers=[{**sublayer, "angle_max": 0.2, **common}]),
        line(4, events=[event]),
        {"step": 5, "loss": None, "stopped": "the loss is not finite"},
    ]
    log = Log(tmp_path / "metrics.jsonl", 0)
    for each in lines:
        log.append(record(each))
    log.close()
    # null for what JSON does not have, and for a radius that the stream does not have
    sublayer |= {"angle_max": None, "grad_norm": None}
    lines[2]["sublayers"][0]["grad_norm"] = None
    path = tmp_path / "metrics.jsonl"
    assert [json.loads(text) for text in path.read_text().splitlines()] == lines
    read = whole_metrics(path, 5)
    assert read == [record(each) for each in lines]
    assert [each.alarm for each in read] == [None, None, None, "tokens collapse", None]
    assert [each.evaluated for each in read] == [False, True, True, False, False]
    assert whole_metrics(tmp_path / "nothing", 0) == []


# the lines that are left of ten, and the gap
GAPS = {
    "end": ([1, 2, 3, 4, 5, 6], "6 to step 11"),
    "last": (range(1, 10), "9 to step 11"),
    "start": ([4, 5, 6, 7, 8, 9, 10], "0 to step 4"),
    "middle": ([1, 2, 3, 5, 6, 7, 8, 9, 10], "3 to step 5"),
    "all": ([], "0 to step 11"),
    "twice": ([1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10], "2 to step 2"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_gap_is_named_and_nothing_is_cut_off(tmp_path, gap):
    path = tmp_path / "metrics.jsonl"
    left, message = GAPS[gap]
    write(path, left)
    before = path.read_bytes()
    for read in (whole_metrics, Log):
        with pytest.raises(ValueError, match=f"metrics.jsonl .*{message}: copy"):
            read(path, 10)
        assert path.read_bytes() == before


def test_lines_beyond_a_checkpoint_are_removed(path):
    with path.open("ab") as file:
        file.write(b'{"step": 11, "lo')
    assert len(whole_metrics(path, 7)) == 10
    Log(path, 7).close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    # also if they are damaged, or out of order
    with path.open("ab") as file:
        file.write(b"\xff\n\n{}\n")
    Log(path, 7).close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    Log(path, 0).close()
    assert steps(path) == []
