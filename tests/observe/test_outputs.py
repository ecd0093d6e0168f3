"""Where a watch speaks: the file, the terminal, the loop's own logger."""

import json
import math
from unittest.mock import Mock

import pytest
import torch
from small_models import tokens
from watched_training import llama

import spheret
from spheret.observe import Event

X = tokens(batch=2, time=33, vocab=64)


def train(model, steps=6, every=2, start=0, **options):
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
    watch = train(llama(layers=2), out=tmp_path / "seen", quiet=True)
    header, *observations = lines(tmp_path / "seen" / "watch.jsonl")
    assert header["format"] == "spheret-watch"
    assert [each["name"] for each in header["sublayers"]] == [each.name for each in watch.header.sublayers]
    assert [each["step"] for each in observations] == [1, 2, 4, 6]
    # every loss stands there once
    assert sum(len(each["losses"]) for each in observations) == 6
    assert [s["norm"] for s in observations[-1]["sublayers"]] == [s.norm for s in watch.observations[-1].sublayers]


def test_a_restarted_loop_appends(tmp_path):
    train(llama(layers=2), out=tmp_path, quiet=True)
    path = tmp_path / "watch.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 7, "los')
    train(llama(layers=2), start=6, steps=2, out=tmp_path, quiet=True)
    _, *observations = lines(path)
    assert path.read_bytes().startswith(whole)
    # the first step after a restart is watched, too
    assert [each["step"] for each in observations] == [1, 2, 4, 6, 7, 8]


def test_another_model_is_refused(tmp_path):
    train(llama(layers=2), out=tmp_path, quiet=True)
    whole = (tmp_path / "watch.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"watch\.jsonl"):
        train(llama(layers=3), out=tmp_path, quiet=True)
    assert (tmp_path / "watch.jsonl").read_bytes() == whole


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
    model = llama(layers=2)
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
    model = llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    train(model, steps=2, on_alarm=told.append)
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


def test_loggers(tmp_path):
    run, writer, rows = Run(), Mock(spec=["add_scalar"]), []
    train(llama(layers=2), log=run, quiet=True)
    train(llama(layers=2), log=writer, quiet=True)
    train(llama(layers=2), log=lambda values, step: rows.append((step, dict(values))), quiet=True)
    assert run.rows == rows
    drawn = [(*pair, step) for step, row in rows for pair in row.items()]
    assert [call.args for call in writer.add_scalar.mock_calls] == drawn
    assert [step for step, _ in rows] == [1, 2, 4, 6]
    assert {"watch/grad_norm", "watch/norm/001", "watch/angle_mean/004", "watch/update/lm_head"} <= rows[0][1].keys()
    assert all(isinstance(value, float) and math.isfinite(value) for _, values in rows for value in values.values())
