"""A restarted watch, and values that are not finite."""

import math
from dataclasses import asdict

import pytest
import torch
from small_models import tokens
from watched_training import Chain, llama, loss_of

import spheret


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


def watched(stops=()):
    """Train with a spike, and stop after some updates and continue from the state. What was said and seen."""
    model, chain = llama(layers=1), Chain(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch = spheret.watch(model, 10, quiet=True)
    events, observations = [], []
    for step in range(1, 61):
        loss = loss_of(model, chain.batch()) * (4 if step == 50 else 1)
        loss.backward()
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in stops:
            state = watch.state_dict()
            events, observations = [*events, *watch.events], [*observations, *watch.observations]
            watch.close()
            watch = spheret.watch(model, 10, quiet=True)
            watch.load_state_dict(state)
    watch.close()
    return events + watch.events, [{**asdict(each), "seconds": None} for each in (*observations, *watch.observations)]


def test_a_restarted_watch_sees_and_says_the_same():
    events, observations = watched()
    assert ("spike", 50) in [(event.kind, event.step) for event in events]
    assert watched((30, 53)) == (events, observations)
