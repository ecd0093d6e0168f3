"""Measurements of the stream against hand-made cases and independent computations."""

import math

import pytest
import torch
from trained_models import config, trained, windows

from spheret import GPT, SCHEMES
from spheret.analysis import dynamics as d
from spheret.analysis.sublayers import decoder_of
from spheret.connections import angle_between
from spheret.model.probes import probe


def test_massive():
    x = torch.ones(3, 5)
    x[1, 2] = -40.0
    assert d.massive(x) == 40


def test_effective_rank():
    assert d.effective_rank(torch.eye(6)[None]) == pytest.approx(6)
    assert d.effective_rank(torch.outer(torch.rand(9), torch.rand(4))[None]) == pytest.approx(1, abs=1e-6)
    # two equal directions and nothing else
    assert d.effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0]))) == pytest.approx(2)


def test_sink():
    weights = torch.zeros(1, 2, 3, 3)
    weights[0, 0, :, 0] = 1.0
    weights[0, 1] = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.75, 0.25, 0]])
    assert d.sink(weights) == [1.0, 0.5]
    assert d.sink(torch.ones(1, 2, 1, 1)) == []


def test_angles():
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    b = torch.tensor([[0.0, 2.0], [-3.0, 0.0], [1.0, 1e-6]])
    assert angle_between(a, b).tolist() == pytest.approx([math.pi / 2, math.pi, 1e-6], rel=1e-5)
    distances = d.angular_distances([a, b])
    assert distances[0][0] == 0
    assert distances[0][1] == distances[1][0] == pytest.approx((0.5 + 1 + 1e-6 / math.pi) / 3)


def test_consecutive_updates():
    e = torch.eye(2)
    states = [torch.zeros(1, 2), e[:1], e[:1] + e[1:], e[:1]]
    assert d.consecutive(states) == [None, 0.0, -1.0]


class TestRemoval:
    def test_a_removed_sublayer_leaves_the_stream(self):
        model = trained("pre-ln")
        x, _ = windows()
        seen = []
        with torch.no_grad(), decoder_of(model).removed(3), probe(model, lambda s: seen.append((s.h, s.out))):
            model.stream(x)
        whole = []
        with torch.no_grad(), probe(model, lambda s: whole.append((s.h, s.out))):
            model.stream(x)
        assert torch.equal(seen[3][0], seen[1][1])
        assert torch.equal(whole[3][0], whole[2][1])
        assert not torch.equal(whole[3][0], whole[1][1])

    def test_removing_a_branch_of_zeros_changes_nothing(self):
        torch.manual_seed(0)
        model = GPT(config("pre-ln")).eval()
        with torch.no_grad():
            for p in model.blocks[1].mlp.output.parameters():
                p.zero_()
        effects = d.removals(model, *windows())
        assert effects[3] == 0
        assert all(effect != 0 for effect in effects[:3])


def test_gradients_are_those_of_backward_and_leave_none():
    torch.manual_seed(0)
    model = GPT(config("proj-spheretnorm")).eval()
    x, y = windows()
    model.blocks[0].mlp.hidden.weight.grad = torch.ones_like(model.blocks[0].mlp.hidden.weight)
    norms = d.gradients(model, x, y)
    assert torch.equal(model.blocks[0].mlp.hidden.weight.grad, torch.ones(128, 32))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    model.zero_grad()
    model(x, y).backward()
    for index, part in enumerate(["attention", "mlp"] * 2):
        block = model.blocks[index // 2]
        squares = [
            p.grad.double().square().sum()
            for name in (part, f"{part}_connection")
            for p in getattr(block, name).parameters()
        ]
        assert norms["weights"][index] == pytest.approx(float(sum(squares).sqrt()), rel=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    model = trained(name, steps=3)
    record = d.dynamics(model, *windows())
    assert record.loss == pytest.approx(float(model(*windows()).detach()), rel=1e-4)
    assert len(record.sublayers) == 4
    for index, sublayer in enumerate(record.sublayers):
        numbers = [value for value in vars(sublayer).values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
        assert 1 <= sublayer.effective_rank <= 32
        assert -1 <= sublayer.token_cosine <= 1 + 1e-9
        assert sublayer.massive >= 1
        assert (sublayer.sink is None) == (index % 2 == 1)
    assert all(p.grad is None for p in model.parameters())
    distances = torch.tensor(record.angular_distance)
    assert distances.shape == (5, 5)
    torch.testing.assert_close(distances, distances.mT)
    if name.endswith("spheretnorm") or name == "geonorm":
        norms = [sublayer.norm for sublayer in record.sublayers]
        assert norms == pytest.approx([record.entry_norm] * 4, rel=1e-5)
