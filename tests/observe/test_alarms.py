"""Planted faults are named: what it is, and where. Normal runs raise no alarm."""

import pytest
import torch
from watched_training import NAMES, Chain, gpt, llama, loss_of, train

import spheret

# what the first alarm is to be, by the fault
FAULTS = {"rate": "exploding", "zero": "dead", "nan": "not finite", "batch": "spike"}
MODELS = {"llama": llama, "gpt": gpt}
# these collapse with every seed: little to learn beyond the frequencies, a tied head, a high rate
COLLAPSING = {"head": "tied", "lr": 1e-2, "spread": 0.7}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_planted_fault_is_named(model, fault):
    watch, name = train(MODELS[model], 1, fault)
    first = watch.alarms[0]
    assert first.kind == FAULTS[fault], first
    assert first.where == ("the batch" if fault == "batch" else name)
    assert first.remedy
    number = [each.sublayer for each in watch.header.sublayers if each.name == name]
    assert first.sublayer == (None if fault == "batch" else number[0])


def test_a_collapse_is_named():
    watch, _ = train(gpt, 0, "collapse", **COLLAPSING)
    # before training it is said that it may happen
    assert [event.kind for event in watch.events if event.kind != "plateau"] == ["head", "collapsed"]
    event = watch.alarms[0]
    last = next(each for each in reversed(watch.observations) if each.sublayers[0].cosine is not None)
    worst = max(last.sublayers, key=lambda each: each.cosine)
    assert (event.sublayer, event.where) == (worst.sublayer, NAMES[gpt](worst.sublayer - 1))


@pytest.mark.parametrize("model", MODELS)
def test_a_normal_run_raises_no_alarm(model):
    assert train(MODELS[model], 2)[0].events == []


def test_a_gradient_that_the_loss_does_not_show_is_named():
    """At a watched step, one sublayer has a far larger gradient."""
    model, chain, name = llama(3), Chain(3), NAMES[llama](5)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    watch = spheret.watch(model, 5, quiet=True)
    for step in range(1, 41):
        loss = loss_of(model, chain.batch())
        loss.backward()
        if step == 40:
            for p in model.get_submodule(name).parameters():
                p.grad *= 3000
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    first = watch.alarms[0]
    assert (first.kind, first.step, first.where, first.measured) == ("spike", 40, name, "gradient")
