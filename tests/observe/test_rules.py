"""Planted faults are named, normal trainings raise no alarm, and models keep their state."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trainings
from torch import nn
from trainings import FAULTS, NORMAL, Decoder, Mixing, counting, decoder, false_alarms, planted

import spheret

# one fault of each kind, and a few trainings; the others are slow tests. A sphere's radius starts on its bound
QUICK_FAULTS = (
    "the learning rate times 33", "weights without an optimiser", "detached", "a gain of zero",
    "16 times as large at the start", "gradients never zeroed", "attention logits that grow", "one expert gets all",
    "weight decay 30", "collapse", "a batch of noise", "a weight that is NaN", "a branch times zero",
    "a group with 30 times the rate", "the loss is maximised",
)  # fmt: skip
QUICK = ("a sphere", "experts", "low-rank adapters")


def some(names, quick):
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(FAULTS, QUICK_FAULTS))
def test_a_planted_fault_is_named(name):
    first, right = planted(name)
    assert right, first
    assert first.remedy


@pytest.mark.slow
def test_nine_of_ten_faults_are_named_where_few_steps_are_watched():
    found = {name: planted(name, 50, 1) for name in FAULTS}
    wrong = {name: first for name, (first, right) in found.items() if not right}
    assert 10 * len(wrong) <= len(FAULTS), wrong


@pytest.mark.parametrize("kind", QUICK)
def test_a_normal_training_raises_no_alarm(kind):
    assert false_alarms(kind, 0, (10,)) == []


@pytest.mark.slow
def test_at_most_two_of_many_normal_trainings_have_an_alarm():
    found = {(kind, seed): false_alarms(kind, seed, (10, 50)) for kind in NORMAL for seed in trainings.SEEDS}
    wrong = {key: alarms for key, alarms in found.items() if alarms}
    assert len(found) >= 60
    assert len(wrong) <= 2, wrong


def test_sensitivity_decides():
    loud = decoder(scale=trainings.scaled(45, 46, 4.0), steps=50)
    assert loud.run(sensitivity=0.2).alarms == []
    assert loud.run(sensitivity=5.0).alarms[0].step <= 45


def test_a_gradient_that_the_loss_does_not_show_is_named():
    """At a watched step, one sublayer has a far larger gradient."""
    training = decoder()
    module = training.model.blocks[1].mlp

    def each(training, step):
        if step == 40:
            for p in module.parameters():
                p.register_hook(lambda grad: 3000 * grad)

    training.each = each
    first = training.run(5).alarms[0]
    assert (first.kind, first.step, first.where, first.measured) == ("spike", 40, "blocks.1.mlp", "gradient")


def test_a_mixer_is_seen():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixing(), Mixing()), torch.randn(3, 5, 6)
    with spheret.watch(model, quiet=True) as watch:
        y = model(x)
        y.square().mean().backward()
        watch.step(1.0)
    assert [each.name for each in watch.header.sublayers] == ["0.tokens", "1.tokens"]
    assert watch.observations[0].sublayers[1].norm == pytest.approx(float(y.detach().norm(dim=-1).mean()), rel=1e-5)


class Remembers(nn.Module):
    """Its hidden state, a counter, a buffer and random numbers go on from call to call."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden, self.calls, self.seen = nn.GRUCell(4, 4), None, 0, []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.hidden = torch.zeros(len(x), 4) if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x + random.random() + float(np.random.rand()), self.hidden)  # noqa: NPY002
        self.mean.add_(self.hidden.detach().mean(0))
        self.calls += 1
        self.seen.append(self.calls)
        return self.hidden.sum() * self.calls + self.mean.sum()


def test_the_trial_leaves_the_state_of_a_model_alone():
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Remembers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = spheret.watch(model, 1, quiet=True) if watched else None
        for _ in range(3):
            loss = model(torch.ones(5, 4))
            loss.backward()
            if watch is not None:
                watch.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.state_dict().values(), torch.tensor([model.calls, *model.seen])])
    assert all(map(torch.equal, *ends))


def test_a_first_forward_that_raises_does_not_blind():
    model = Decoder()
    with spheret.watch(model, 1, quiet=True) as watch:
        with pytest.raises(IndexError):
            model(torch.full((2, 5), trainings.VOCAB))
        x = counting(1)
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        watch.step(math.log(trainings.VOCAB))
    assert len(watch.header.sublayers) == 6
