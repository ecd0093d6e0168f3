"""What is warned of once, where it happens: rows of zeros that enter the sphere, and scalars that decay."""

import copy
import warnings

import pytest
import torch
from torch import nn

import spheret
from spheret import ScaleNorm, SpheretNorm, parameter_groups

D = 8


def warned(function, word):
    """How many warnings with this word a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return sum(word in str(each.message) for each in caught)


def rows(zero=True):
    x = torch.randn(2, 3, D)
    x[0, 1] *= not zero
    return x.requires_grad_()


class TestZeroRows:
    def test_one_is_named_once_per_module(self):
        norm = ScaleNorm(D)
        assert warned(lambda: [norm(rows()) for _ in range(5)], "zeros") == 1
        assert warned(lambda: norm(rows()), "zeros") == 0
        assert warned(lambda: ScaleNorm(D)(rows()), "zeros") == 1

    def test_only_the_first_passes_are_looked_at(self):
        norm = ScaleNorm(D)
        assert warned(lambda: [norm(rows(zero=False)) for _ in range(3)], "zeros") == 0
        assert warned(lambda: norm(rows()), "zeros") == 0

    def test_nothing_without_a_gradient(self):
        norm = ScaleNorm(D)
        assert warned(lambda: norm(rows().detach()), "zeros") == 0
        with torch.no_grad():
            assert warned(lambda: norm(rows()), "zeros") == 0
        assert warned(lambda: norm(rows()), "zeros") == 1

    def test_channels(self):
        x = torch.ones(2, D, 3, requires_grad=True)
        assert warned(lambda: ScaleNorm(D, channel_dim=1)(x), "zeros") == 0
        assert warned(lambda: ScaleNorm(D, channel_dim=1)(x * torch.tensor([1.0, 0, 1])), "zeros") == 1

    def test_other_modes_are_left_alone(self):
        norm = ScaleNorm(D)
        torch.compiler.reset()
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        assert warned(lambda: compiled(rows()), "zeros") == 0
        assert warned(lambda: torch.func.vmap(norm)(rows()), "zeros") == 0
        assert warned(lambda: torch.func.grad(lambda x: norm(x).sum())(rows().detach()), "zeros") == 0
        assert warned(lambda: norm.to("meta")(rows().to("meta")), "zeros") == 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry_norm, self.mlp = ScaleNorm(D), nn.Linear(D, D)
        self.norm = SpheretNorm(D, 1, learnable_p=True)

    def forward(self, x):
        h = self.entry_norm(x)
        return self.norm(h, self.mlp(h))


def train(model, optimizer):
    for _ in range(3):
        model(torch.randn(4, D)).square().sum().backward()
        optimizer.step()


class TestDecay:
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_it_is_named_once(self, kind):
        model = Net()
        optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.01)
        with pytest.warns(UserWarning, match="parameter_groups") as caught:
            train(model, optimizer)
        # a step size, a radius and a learned p
        assert ["3 step sizes and radii" in str(each.message) for each in caught] == [True]
        twin = copy.deepcopy(model)
        assert warned(lambda: train(twin, kind(twin.parameters(), lr=1e-3, weight_decay=0.01)), "decay") == 0

    @pytest.mark.parametrize(
        ("groups", "weight_decay"),
        [
            (lambda model: parameter_groups(model, 0.1), 0.1),
            (lambda model: model.mlp.parameters(), 0.1),
            (nn.Module.parameters, 0.0),
        ],
    )
    def test_nothing_where_they_do_not_decay(self, groups, weight_decay):
        model = Net()
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3, weight_decay=weight_decay)
        assert warned(lambda: train(model, optimizer), "decay") == 0

    def test_a_gpt(self):
        model = spheret.GPT(spheret.GPTConfig(layers=1, heads=1, width=D, block=8, vocab=10, head_bias="zero"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4).long(), torch.ones(1, 4).long()).backward()
        assert warned(optimizer.step, "decay") == 1
