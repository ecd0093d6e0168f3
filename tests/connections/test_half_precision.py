"""Step sizes in bfloat16: an optimiser's steps are rounded away. This is said, and one call repairs it."""

import warnings

import pytest
import torch
from torch import nn

import spheret
from spheret.connections import float32_scalars

TOKENS = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(0))


def gpt():
    torch.manual_seed(0)
    options = {"alpha": 0.5, "radius": 2.0}
    config = spheret.GPTConfig(
        layers=2, heads=2, width=8, block=8, vocab=11, scheme="proj-spheretnorm", scheme_options=options
    )
    return spheret.GPT(config).bfloat16()


def scalars(model):
    kinds = (spheret.SpheretNorm, spheret.ScaleNorm)
    found = [p for module in model.modules() if isinstance(module, kinds) for p in module.parameters()]
    assert len(found) == 5
    return found


def train(model):
    """How many of the learnable scalars have moved in 20 steps."""
    before = [p.detach().clone() for p in scalars(model)]
    optimizer = torch.optim.AdamW(spheret.parameter_groups(model, 0.01), lr=3e-4)
    for _ in range(20):
        model(TOKENS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(not torch.equal(p, old) for p, old in zip(scalars(model), before, strict=True))


def test_it_is_said_once_and_can_be_repaired():
    model = gpt()
    with pytest.warns(UserWarning, match="float32_scalars") as caught:
        moved = train(model)
    assert len(caught) == 1
    assert moved <= 1
    model = gpt()
    float32_scalars(model)
    assert {p.dtype for p in scalars(model)} == {torch.float32}
    assert sum(p.dtype == torch.float32 for p in model.parameters()) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(model) >= 4
    twin = gpt()
    float32_scalars(twin)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_data_parallel_takes_both_dtypes():
    model = gpt()
    float32_scalars(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(TOKENS).float().square().mean().backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
