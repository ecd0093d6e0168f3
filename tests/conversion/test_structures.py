"""Ways in which models write their residual sums: each is converted exactly, also with dropout in training mode."""

import pytest
import torch
from torch import nn

import spheret
from spheret.conversion import ConversionError, anneal, steps

WIDTH, LAYERS = 8, 3
# ways in which the stream is used beside the norm that reads it where it leaves
BESIDE = ("the model returns the stream, too", "the last norm reads a rearrangement, too")
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Add(nn.Module):
    def forward(self, f, h):
        return f + h


class Block(nn.Module):
    """A Pre-Norm layer in one of several ways of writing."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.kind = nn.Dropout(0.3), kind
        self.add = Add()

    def forward(self, h, bias=None):
        kind, shape = self.kind, h.shape
        if kind == "flattened stream":
            h = h.reshape(-1, WIDTH)
            return (h + self.dropout(self.first(self.norm(h)))).view(shape)
        if kind == "flattened branch":
            return h + self.dropout(self.first(self.norm(h).flatten(0, 1))).view(h.shape)
        if kind in ("quotient", *BESIDE):
            return h + self.dropout(self.first(self.norm(h))) / 3
        if kind == "one dropout inside and at the end":
            return h + self.dropout(self.second(self.dropout(self.first(self.norm(h)).relu())))
        if kind == "one dropout behind both branches":
            x = self.norm(h)
            return self.dropout(self.first(x)) + self.dropout(self.second(x)) + h
        if kind == "a module that adds what it is given":
            return self.add(self.dropout(self.first(self.norm(h))), h)
        # a tensor that every layer is given, and adds to something of its own
        assert kind == "bias for every layer"
        x = self.norm(h)
        return h + self.dropout(self.first(x + bias.sin().relu()))


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers, self.norm = nn.ModuleList(Block(kind) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.embed, self.reads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, x)
        if self.kind == "the model returns the stream, too":
            return self.norm(h), h
        if self.kind == "the last norm reads a rearrangement, too":
            return self.norm(torch.cat([self.norm(h), h.transpose(0, 1).flip(0).transpose(0, 1)], dim=1))
        return self.norm(h)


class SplitLists(nn.Module):
    """Layers that are no modules: the model's own code adds, and its parts stand in one list per kind."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, h):
        for norm, branch in zip(self.norms, self.branches, strict=True):
            h = h + branch(norm(h))
        return h


KINDS = [
    "flattened stream", "flattened branch", "quotient", "one dropout inside and at the end",
    "one dropout behind both branches", "bias for every layer", "a module that adds what it is given", *BESIDE,
]  # fmt: skip


def run(model, x):
    torch.manual_seed(1)
    returned = model(x)
    return torch.cat(returned) if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("kind", [*KINDS, "split lists"])
def test_exact_start_and_the_way_from_it(kind):
    torch.manual_seed(0)
    model = (SplitLists() if kind == "split lists" else Network(kind)).double().eval()
    x = X.double()
    before, trained = run(model, x), run(model.train(), x)
    _, report = spheret.convert(model, example_inputs=x)
    assert len(report.converted) == LAYERS
    assert not report.left
    # the same dropouts are drawn in the same order
    torch.testing.assert_close(run(model, x), trained, rtol=0, atol=1e-10)
    torch.testing.assert_close(run(model.eval(), x), before, rtol=0, atol=1e-10)
    for t in (0.5, 1.0):
        anneal(model, t)
        model.zero_grad()
        run(model, x).square().sum().backward()
        assert all(p.grad.isfinite().all() for step in steps(model) for p in step.parameters())
    assert torch.equal(run(spheret.revert(model), x), before)


class Windows(nn.Module):
    """The first branch reads the stream in another order, as in Swin v2; the second one reads the stream."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))

    def forward(self, h):
        h = h + self.first(h.roll(1, dims=1))
        return h + self.second(h)


class Shift(nn.Module):
    """Adds positions that every layer is given, as DETR's decoder does."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions):
        return self.attention(x + positions)


class PositionsEverywhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other = Shift(), Shift()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, h, positions):
        h = self.norms[0](h + self.own(h, positions))
        return self.norms[1](h + self.other(h, positions))


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList(kind() for _ in range(LAYERS)), kind
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h):
        positions = h.cumsum(1).tanh()
        for layer in self.layers:
            h = layer(h) if self.kind is Windows else layer(h, positions)
        return self.norm(h)


@pytest.mark.parametrize(("kind", "each", "why"), [
    (Windows, 1, "none is a stream that a branch reads"),
    (PositionsEverywhere, 2, "something that several layers add"),
])  # fmt: skip
def test_sums_that_look_like_residuals_are_left_and_named(kind, each, why):
    torch.manual_seed(0)
    model = Stack(kind).double().eval()
    before = model(X.double())
    _, report = spheret.convert(model, example_inputs=X.double())
    assert len(report.converted) == each * LAYERS
    assert {layer for where, reason in report.left if why in reason for layer in where[7]} >= set("12")
    torch.testing.assert_close(model(X.double()), before, rtol=0, atol=1e-10)


class Positions(Network):
    """An unknown sum in front of the layers."""

    def forward(self, x):
        return super().forward(x + torch.tanh(self.reads(x)) * x)


def test_an_unknown_sum_outside_of_the_layers_is_left_and_named():
    torch.manual_seed(0)
    model = Positions("quotient").eval()
    before = model(X)
    _, report = spheret.convert(model, example_inputs=X)
    assert len(report.converted) == LAYERS
    assert ["test_structures.py" in where and "outside of the layers" in why for where, why in report.left] == [True]
    torch.testing.assert_close(model(X), before)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.GroupNorm(1, 6), nn.AvgPool2d(3, 1, 1)]) for _ in range(2))

    def forward(self, h):
        for norm, pool in self.layers:
            h = h + pool(norm(h))
        return h


def test_a_group_norm_tells_the_channels():
    images = torch.randn(2, 6, 4, 3, generator=torch.Generator().manual_seed(0))
    model = Images().eval()
    before = model(images)
    spheret.convert(model, example_inputs=images)
    assert [(step.channel_dim, step.connection.dim) for step in steps(model)] == [(1, 6), (1, 6)]
    torch.testing.assert_close(model(images), before)


class Picky(nn.Module):
    """It does not run with a stream on the sphere."""

    def __init__(self):
        super().__init__()
        self.norm, self.branch, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = 1000 * x
        h = h + self.branch(self.norm(h))
        if h.abs().max() < 500:
            raise KeyError("too small")
        return self.last(h)


def test_what_fails_after_the_conversion_is_refused_in_a_sentence():
    model = Picky()
    with pytest.raises(ConversionError, match=r"the converted Picky fails .* KeyError: 'too small'"):
        spheret.convert(model, example_inputs=X)
    assert not steps(model)
    model(X)
