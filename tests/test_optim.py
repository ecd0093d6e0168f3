"""The optimiser of a training run."""

import inspect
import sys

import pytest
import torch

from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import AdamW, parameter_groups

TINY = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": 64}


@pytest.fixture
def without_dynamo(monkeypatch):
    """Every import of torch._dynamo is an error, also where an earlier test has imported it."""
    for method in (torch.optim.AdamW.add_param_group, torch.optim.AdamW.zero_grad):
        monkeypatch.delattr(inspect.unwrap(method), "__dynamo_disable", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)


def _train(optimizer_class):
    torch.manual_seed(0)
    model = GPT(GPTConfig(scheme="proj-spheretnorm", **TINY))
    optimizer = optimizer_class(parameter_groups(model, 0.1), lr=0.3, betas=(0.9, 0.95), fused=True)
    x = torch.randint(64, (2, 17))
    for _ in range(3):
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    return model


def test_an_update_does_not_import_dynamo(without_dynamo):
    _train(AdamW)


def test_it_is_torchs_adamw_to_the_bit_with_its_hooks():
    ours, theirs = _train(AdamW), _train(torch.optim.AdamW)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    # the hook after a step keeps the step sizes within their bounds: without it this rate would carry them out
    assert all(m.attention_connection.alpha.item() <= 1.0 for m in ours.each_block())
    assert all(float(b.attention_connection.norm.a.detach()) <= 0.5414 for b in ours.each_block())
