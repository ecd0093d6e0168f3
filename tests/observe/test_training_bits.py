"""Watched training is bitwise equal to unwatched training, and `close` leaves the model as it was."""

from functools import partial

import pytest
import torch
from small_models import tokens
from watched_training import gpt, llama

import spheret

X = tokens(batch=4, time=33, vocab=64)


def same(model):
    return model


def checkpointed(model):
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


# the model, what is done to it, autocast, and micro-batches per update
CASES = {
    "a strangers model": (llama, same, False, 1),
    "ours in micro-batches": (gpt, same, False, 3),
    "several streams with autocast": (partial(gpt, scheme="mhc"), same, True, 1),
    "checkpointing": (llama, checkpointed, False, 1),
    "compiled": (gpt, partial(torch.compile, backend="aot_eager"), True, 1),
}
SLOW = ("compiled",)


def trained(make, prepare, half, parts, watched):
    options = {"attention_dropout": 0.1} if make is llama else {"dropout": 0.1}
    model = make(layers=2, **options)
    torch.manual_seed(5)
    torch.compiler.reset()
    outer = prepare(model.train())
    watch = spheret.watch(outer, 3, quiet=True) if watched else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []

    def call():
        if make is llama:
            return outer(input_ids=X, labels=X, use_cache=False).loss
        return outer(X[:, :-1], X[:, 1:])

    for _ in range(5):
        for _ in range(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = call() / parts
            loss.backward()
        if watch is not None:
            watch.step(loss * parts)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        # a validation in between is not what is watched
        with torch.no_grad():
            call()
    keys = list(model.state_dict())
    if watch is not None:
        watch.close()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    left = keys, list(model.state_dict()), hooks, [sorted(vars(m)) for m in model.modules()]
    return losses, [p.detach() for p in model.parameters()], left, watch


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_training_is_the_same(name):
    losses, weights, left, _ = trained(*CASES[name], False)
    watched_losses, watched_weights, watched_left, watch = trained(*CASES[name], True)
    assert watched_losses == losses
    assert all(map(torch.equal, watched_weights, weights))
    assert watched_left == left
    assert [each.step for each in watch.observations] == [1, 3]
    assert all(s.norm is not None for each in watch.observations for s in each.sublayers)


def test_nothing_is_done_between_the_watched_steps():
    model = llama(layers=2)
    hooks = []
    with spheret.watch(model, 100, quiet=True) as watch:
        for _ in range(3):
            loss = model(input_ids=X, labels=X).loss
            loss.backward()
            hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
            watch.step(loss)
    # only the two of the model itself
    assert hooks[0] > 10
    assert hooks[1:] == [2, 2]


def test_an_inner_error_leaves_no_trace():
    model = llama(layers=2)
    with spheret.watch(model, 1, quiet=True), pytest.raises(IndexError):
        model(input_ids=X + 10_000)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
