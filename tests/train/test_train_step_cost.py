"""The bare training step and its cost, measured side by side."""

import math
import time
from dataclasses import replace

import pytest
import torch

from spheret.connections import SCHEMES
from spheret.data import open_data
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import parameter_groups
from spheret.train.recipes import complete
from spheret.train.step_cost import FEWEST_ROUNDS, MOST_ROUNDS, measure_step_costs, share_parameters, training_step

CPU = torch.device("cpu")
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


class Slow(GPT):
    """A model whose every forward pass takes 30 ms of the processor longer."""

    def forward(self, *arguments):
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        return super().forward(*arguments)


def test_the_costs_of_several_schemes(prepared, monkeypatch):
    given = {"model": TINY, "data": {"path": str(prepared)}, "train": {"steps": 4, "batch_size": 2}}
    config = complete({**given, "model": {**TINY, "scheme": "pre-ln"}}, "cpu", 1, 257, 320)
    train = replace(config.train, tokens_per_update=2 * config.train.tokens_per_update)
    configs = {
        name: replace(config, model=replace(config.model, scheme=name), train=train)
        for name in ("pre-ln", "keel", "proj-spheretnorm")
    }
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    seconds, rounds, spread = measure_step_costs(configs, open_data(prepared), CPU, 1)
    assert list(seconds) == list(configs)
    assert all(value > 0 for value in seconds.values())
    assert FEWEST_ROUNDS <= rounds <= MOST_ROUNDS
    assert 0 <= spread < math.inf
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    # the processor's clock may be coarser than an update, e.g. while a timer of the process runs
    with monkeypatch.context() as patch:
        patch.setattr("time.process_time", lambda: 0.0)
        timed, _, spread = measure_step_costs(configs, open_data(prepared), CPU, 1)
    assert all(value > 0 for value in timed.values())
    assert spread < math.inf
    # an update has two micro-batches
    monkeypatch.setattr("spheret.train.step_cost.GPT", Slow)
    slower, _, _ = measure_step_costs(configs, open_data(prepared), CPU, 1)
    assert all(value >= 0.06 for value in slower.values())
