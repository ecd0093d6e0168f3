"""The bare training step that benchmarks time."""

import pytest
import torch
from scripts import script

from spheret.connections import SCHEMES
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import parameter_groups

share_parameters, training_step = (
    getattr(script("benchmarks/measuring.py"), name) for name in ("share_parameters", "training_step")
)
TINY = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": 320, "head_bias": "none"}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_that_shares_parameters_is_the_model(name):
    first, model = GPT(GPTConfig(scheme="pre-ln", **TINY)), GPT(GPTConfig(scheme=name, **TINY))
    share_parameters(model, first)
    assert model.tokens.weight is first.tokens.weight
    assert model.blocks[1].mlp.output.weight is first.blocks[1].mlp.output.weight
    own = GPT(model.config)
    own.load_state_dict(model.state_dict())
    x = torch.randint(320, (2, 17))
    torch.testing.assert_close(model(x[:, :-1], x[:, 1:]), own(x[:, :-1], x[:, 1:]))
    # all of it can be trained by one optimiser that also has the parameters of the first
    groups = parameter_groups(torch.nn.ModuleList([first, model]), 0.1)
    before = model.tokens.weight.clone()
    training_step(model, model, torch.optim.AdamW(groups, lr=1e-3), [(x[:, :-1], x[:, 1:])])()
    assert not torch.equal(model.tokens.weight, before)
    assert all(p.isfinite().all() and p.grad is None for p in model.parameters())


def test_micro_batches_make_one_update():
    x = torch.randint(320, (4, 17))
    results = []
    for batches in ([x], [x[:2], x[2:]]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(scheme="pre-ln", **TINY))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training_step(model, model, optimizer, [(part[:, :-1], part[:, 1:]) for part in batches])()
        results.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*results)
