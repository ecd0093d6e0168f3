"""What a watch does about a bad update."""

import copy
import math
from dataclasses import asdict

import pytest
import torch
from small_models import tokens
from watched_training import Chain, llama, loss_of

import spheret
from spheret.observe import Stopped


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def test_a_bad_update_is_skipped_and_counted():
    model, chain = llama(layers=2), Chain(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    events = []
    watch = spheret.watch(model, 1000, policy="skip", on_alarm=events.append, quiet=True)
    made = []
    for step in range(1, 81):
        x = chain.noise() if step == 70 else chain.batch()
        loss = loss_of(model, x)
        loss.backward()
        if step == 40:
            model.lm_head.weight.grad[0, 0] = math.inf
        before, moments = [p.detach().clone() for p in model.parameters()], state_of(optimizer)
        made.append(watch.step(loss))
        optimizer.step()
        optimizer.zero_grad()
        if step in (40, 70):
            assert all(map(torch.equal, before, model.parameters()))
            assert str(moments) == str(state_of(optimizer))
    assert [step for step, makes in enumerate(made, start=1) if not makes] == [40, 70]
    assert watch.skipped == 2
    said = [(event.kind, event.step) for event in events if event.level == "warning"]
    assert said == [("spike", 40), ("spike", 70)]
    assert ("not finite", 40) in [(event.kind, event.step) for event in watch.alarms]


def test_a_run_stops_before_the_update():
    model = llama(layers=2)
    watch = spheret.watch(model, 1000, policy="stop", quiet=True)
    x = tokens(batch=2, time=33, vocab=64)
    loss = loss_of(model, x)
    loss.backward()
    assert watch.step(loss)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    loss = loss_of(model, x)
    loss.backward()
    with pytest.raises(Stopped) as stopped:
        watch.step(loss)
    assert stopped.value.event.where == "model.layers.1.mlp"
    assert "model.layers.1.mlp.up_proj.weight" in str(stopped.value)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_value_that_is_not_finite_is_found_where_the_weights_are(place):
    """An overflow inside of a branch, whose weights are finite."""
    model = llama(layers=3)
    module = model.model.layers[1].mlp.down_proj
    if place == "forward":
        module.register_forward_hook(lambda m, args, out: out * math.inf)
    else:
        module.register_full_backward_hook(lambda m, gi, go: tuple(g * math.inf for g in gi))
    watch = spheret.watch(model, quiet=True)
    loss = loss_of(model, tokens(batch=2, time=33, vocab=64))
    loss.backward()
    watch.step(loss)
    (event,) = watch.alarms
    assert (event.kind, event.where) == ("not finite", "model.layers.1.mlp")


def watched(policy, stop_at=None):
    """Train with spikes, and stop after some updates and continue from the states. What was said and seen."""
    model, chain = llama(layers=2), Chain(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch = spheret.watch(model, 10, policy=policy, quiet=True)
    events, observations = [], []
    for step in range(1, 81):
        loss = loss_of(model, chain.batch()) * (4 if step in (50, 70) else 1)
        loss.backward()
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == stop_at:
            state = watch.state_dict()
            events, observations = watch.events, watch.observations
            watch.close()
            watch = spheret.watch(model, 10, policy=policy, quiet=True)
            watch.load_state_dict(state)
    watch.close()
    observations = [asdict(each) for each in (*observations, *watch.observations)]
    return events + watch.events, [{**each, "seconds": None} for each in observations], watch.skipped


@pytest.mark.parametrize("policy", ["alarm", pytest.param("skip", marks=pytest.mark.slow)])
def test_a_restarted_watch_sees_and_says_the_same(policy):
    whole = watched(policy)
    assert ("spike", 50) in [(event.kind, event.step) for event in whole[0]]
    for stop_at in (30, 53):
        assert watched(policy, stop_at) == whole
