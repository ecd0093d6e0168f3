"""Watched training is bitwise equal to unwatched training, and `close` leaves the model as it was."""

from functools import partial

import pytest
import torch
from small_models import tokens
from watched_training import gpt, llama

import spheret

X = tokens(batch=4, time=33, vocab=64)


def checkpointed(model, **options):
    model.gradient_checkpointing_enable(options)
    model.enable_input_require_grads()
    return model


def recomputed(model):
    model.recompute = True
    return model


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


# the model; what is done to it; which model the watch is given, the outer one or the inner one; how it is trained
CASES = {
    "a strangers model": (llama, lambda m: m, "outer", {}),
    "ours": (gpt, lambda m: m, "outer", {}),
    "autocast": (llama, lambda m: m, "outer", {"half": True}),
    "several streams": (partial(gpt, scheme="mhc"), lambda m: m, "outer", {"half": True}),
    "accumulation": (gpt, lambda m: m, "outer", {"parts": 3}),
    "checkpointing": (llama, checkpointed, "outer", {}),
    "reentrant checkpointing": (llama, lambda m: checkpointed(m, use_reentrant=True), "outer", {}),
    "recompute": (gpt, recomputed, "outer", {}),
    "compiled": (llama, compiled, "outer", {}),
    "ours compiled": (gpt, compiled, "outer", {"half": True}),
    "compiled layers": (llama, compiled_layers, "outer", {}),
    "the model inside of a compiled one": (llama, compiled, "inner", {}),
}


def trained(make, prepare, given, watched, half=False, parts=1, dropout=True):
    options = {"attention_dropout": 0.1} if make is llama else {"dropout": 0.1}
    model = make(layers=3, **options)
    if make is llama:
        model.config.use_cache = False
    torch.manual_seed(5)
    outer = prepare(model.train())
    watch = spheret.watch(outer if given == "outer" else model, 4, quiet=True) if watched else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []

    def call():
        if make is llama:
            return outer(input_ids=X, labels=X).loss
        return outer(X[:, :-1], X[:, 1:])

    for _ in range(9):
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
    attributes = [sorted(vars(m)) for m in model.modules()]
    weights = [p.detach() for p in model.parameters()]
    return losses, weights, (keys, list(model.state_dict()), hooks, attributes), watch


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name):
    make, prepare, given, options = CASES[name]
    torch.compiler.reset()
    losses, weights, left, _ = trained(make, prepare, given, False, **options)
    torch.compiler.reset()
    watched_losses, watched_weights, watched_left, watch = trained(make, prepare, given, True, **options)
    assert watched_losses == losses
    assert all(map(torch.equal, watched_weights, weights))
    assert watched_left == left
    assert [each.step for each in watch.observations] == [1, 4, 8]
    if given == "inner":
        assert watch.header.found == "parameters only"
    else:
        assert all(s.norm is not None for each in watch.observations for s in each.sublayers)


def test_nothing_is_done_between_the_watched_steps():
    model = llama(layers=2)
    watch = spheret.watch(model, 100, quiet=True)
    calls = []
    for step in range(1, 5):
        loss = model(input_ids=X, labels=X).loss
        loss.backward()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        calls.append((step, hooks))
        watch.step(loss)
    # only the two of the model itself
    assert calls[0][1] > 10
    assert [hooks for _, hooks in calls[1:]] == [2, 2, 2]
    watch.close()


def test_an_inner_error_leaves_no_trace():
    model = llama(layers=2)
    with spheret.watch(model, 1, quiet=True), pytest.raises(IndexError):
        model(input_ids=X + 10_000)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
