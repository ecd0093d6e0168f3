"""Where a watch speaks: the file, the terminal, the loop's own logger."""

import json
import math

import pytest
import torch
from small_models import tokens
from watched_training import llama

import spheret
from spheret.observe import Event
from spheret.observe.outputs import Tracker

X = tokens(batch=2, time=33, vocab=64)


def train(model, steps=4, every=2, start=0, **options):
    watch = spheret.watch(model, every, **options)
    watch.steps = start
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        loss = model(input_ids=X, labels=X).loss
        loss.backward()
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return watch


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_has_all_that_was_seen(tmp_path):
    path, rows = tmp_path / "seen" / "watch.jsonl", []
    log = lambda values, step: rows.append((step, values))  # noqa: E731
    watch = train(llama(layers=1), out=path.parent, log=log, quiet=True)
    header, *observations = lines(path)
    assert header["format"] == "spheret-watch"
    assert [each["name"] for each in header["sublayers"]] == [each.name for each in watch.header.sublayers]
    assert [each["step"] for each in observations] == [step for step, _ in rows] == [1, 2, 4]
    # every loss stands there once
    assert sum(len(each["losses"]) for each in observations) == 4
    assert [s["norm"] for s in observations[-1]["sublayers"]] == [s.norm for s in watch.observations[-1].sublayers]
    # a function that logs gets the same
    assert [rows[-1][1][f"watch/norm/00{n}"] for n in (1, 2)] == [s["norm"] for s in observations[-1]["sublayers"]]
    assert {"watch/grad_norm", "watch/angle_mean/002", "watch/update/lm_head"} <= rows[0][1].keys()
    assert all(isinstance(value, float) and math.isfinite(value) for _, row in rows for value in row.values())
    # a restarted loop appends, and its first step is watched, too
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 5, "los')
    train(llama(layers=1), start=4, steps=2, out=path.parent, quiet=True)
    assert path.read_bytes().startswith(whole)
    assert [each["step"] for each in lines(path)[1:]] == [1, 2, 4, 5, 6]
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"watch\.jsonl"):
        train(llama(layers=2), steps=1, out=path.parent, quiet=True)
    assert path.read_bytes() == whole


def test_two_watches_do_not_mix_their_lines(tmp_path):
    with spheret.watch(llama(layers=1), out=tmp_path), pytest.raises(BlockingIOError, match="another watch"):
        spheret.watch(llama(layers=1), out=tmp_path)
    spheret.watch(llama(layers=1), out=tmp_path).close()


@pytest.mark.parametrize("content", [b"mine\n", b'{"format":"other"}\n', b"\xff\xfe"])
def test_a_strangers_file_is_left(tmp_path, content):
    (tmp_path / "watch.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"watch\.jsonl"):
        spheret.watch(llama(layers=1), out=tmp_path)
    assert (tmp_path / "watch.jsonl").read_bytes() == content


def test_numbers_that_are_not_finite_are_null(tmp_path):
    model = llama(layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    watch = train(model, steps=2, out=tmp_path, quiet=True)
    text = (tmp_path / "watch.jsonl").read_text()
    assert "NaN" not in text
    first = lines(tmp_path / "watch.jsonl")[1]
    assert first["losses"] == [None]
    assert first["grad_norm"] is None
    assert first["events"][0]["where"] == "model.layers.0.mlp"
    assert watch.alarms[0].kind == "not finite"


def test_the_terminal_and_the_callback_are_told(capsys):
    told = []
    model = llama(layers=1)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    train(model, steps=1, on_alarm=told.append)
    assert [(each.kind, each.where) for each in told] == [("not finite", "lm_head")]
    assert isinstance(told[0], Event)
    said = capsys.readouterr().err
    assert "ALARM at step 1" in said
    assert "lm_head.weight" in said


def test_a_model_without_a_stream_is_said(capsys):
    model = torch.nn.Linear(2, 2)
    watch = spheret.watch(model)
    model(torch.ones(3, 2)).sum().backward()
    watch.step(1.0)
    assert "Linear" in capsys.readouterr().err


class Run:
    """As Weights & Biases and trackio have it."""

    def __init__(self):
        self.rows = []

    def log(self, values, step):
        self.rows.append((step, values))


def test_a_run_of_a_tracker():
    run = Run()
    Tracker(run).log({"watch/grad_norm": 2.0}, 3)
    assert run.rows == [(3, {"watch/grad_norm": 2.0})]
