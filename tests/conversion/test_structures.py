"""Ways in which models write their residual sums: each is converted exactly, also with dropout in training mode."""

import random
from random import random as uniform_random

import numpy as np
import pytest
import torch
from torch import nn

import spheret
from spheret.conversion import anneal, steps, watched
from spheret.observe.finding import find_sublayers

WIDTH, LAYERS = 8, 3
# ways in which the stream is used beside the norm that reads it where it leaves
A, B = 0.8, 1.7
BESIDE = ("the model returns the stream, too", "the last norm reads a rearrangement, too")
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 6, 4, 3, generator=torch.Generator().manual_seed(0))


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
        gain = torch.linspace(-1, 0.8, 1 if kind == "one gain" else WIDTH)
        self.gain = nn.Parameter(gain, requires_grad="gain" in kind)

    def forward(self, h, bias=None):
        kind, shape = self.kind, h.shape
        if kind == "scaled sum":
            return A * h + self.dropout(self.first(self.norm(h))) * B
        if kind == "scaled parallel branches":
            x = self.norm(h)
            return (self.dropout(self.first(x)) + self.second(x) / 2) * B + h * 2 * A
        if kind in ("gains per channel", "one gain"):
            return h + self.gain * self.dropout(self.first(self.norm(h)))
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
    "scaled sum", "scaled parallel branches", "gains per channel", "one gain",
    "flattened stream", "flattened branch", "quotient", "one dropout inside and at the end",
    "one dropout behind both branches", "bias for every layer", "a module that adds what it is given", *BESIDE,
]  # fmt: skip


def run(model, x):
    torch.manual_seed(1)
    returned = model(x)
    return torch.cat(returned) if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("kind", [*KINDS, "split lists"])
def test_exact_start_and_what_follows(kind):
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


@pytest.mark.parametrize(("kind", "ratio"), [("scaled sum", B / A), ("gains per channel", None)])
def test_a_scaled_sum_is_a_step_by_its_ratio(kind, ratio):
    """At t = 1 a h + b f is a retraction along b f/a, and h + g f is one along g f."""
    torch.manual_seed(0)
    model, x = Network(kind).double().eval(), X.double()
    spheret.convert(model, example_inputs=x)
    anneal(model, 1.0)
    h = steps(model)[0].entry_norm(model.embed(x))
    for layer, step in zip(model.layers, steps(model), strict=True):
        # with the hooks, the modules would return other things
        f = nn.functional.linear(layer.norm(h), layer.first.weight, layer.first.bias)
        h = spheret.retract(h, f * (layer.gain if ratio is None else ratio), step.alpha)
    torch.testing.assert_close(model(x), model.norm(h), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "factor"), [("scaled sum", B / A), ("gains per channel", None)])
def test_an_observer_sees_the_branch_that_is_added(kind, factor):
    model = Network(kind).eval()
    (end,) = find_sublayers(model, lambda: model(X)).sublayers[0].ends
    torch.testing.assert_close(end.scaled(X), X * (model.layers[0].gain if factor is None else factor))


# how code draws a number by which it skips a layer at random, here rarely
DRAWS = {
    "torch.rand": lambda: torch.rand([]),
    "uniform_": lambda: torch.empty(1).uniform_().item(),
    "bernoulli": lambda: 1 - torch.bernoulli(torch.tensor(0.01)),
    "random.random": lambda: random.random(),
    "an imported random": lambda: uniform_random(),
    "numpy.random.rand": lambda: np.random.rand(1),  # noqa: NPY002
}


class Skipping(Network):
    """Leaves out layers at random in training mode, as layerdrop does, or always those of `skipped`."""

    def __init__(self, draw):
        super().__init__("scaled sum")
        self.draw, self.skipped = draw, ()

    def forward(self, x):
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            if not (self.training and (self.draw() < 0.01 or number in self.skipped)):
                h = layer(h)
        return self.norm(h)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_stream_whose_first_layer_is_left_out_is_on_the_sphere(kind):
    seed()
    model = Skipping(DRAWS[kind]).double().eval()
    before = model(X.double())
    spheret.convert(model, example_inputs=X.double())
    torch.testing.assert_close(model(X.double()), before, rtol=0, atol=1e-10)
    anneal(model.train(), 1.0)
    model.draw, model.skipped = (lambda: 1), (0,)
    records = []
    with watched(model, lambda *both: records.append(both)):
        model(X.double()).sum().backward()
    assert [step for step, _ in records] == steps(model)[1:]
    for step, record in records:
        for rows in (record.stream, record.after):
            torch.testing.assert_close(rows.norm(dim=-1), step.radius.detach().expand(2, 5))


def draws():
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


class Stateful(Network):
    """Keeps counts in a buffer and an attribute, a state of the batch, and draws from every generator."""

    def __init__(self):
        super().__init__("quotient")
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.log, self._state = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.log.append(draws())
        assert self._state is None or self._state.shape == x.shape
        self._state, self.new = x + self.log[-1][0], 1
        return super().forward(x)


def test_the_trial_leaves_no_state_behind():
    model = Stateful().eval()
    seed()
    expected = draws()
    seed()
    spheret.convert(model, example_inputs=X, batches=[X, X[:, :2]])
    assert draws() == expected
    assert (float(model.calls), model.count, model.log, model._state) == (0, 0, [], None)
    assert not hasattr(model, "new")


class Windows(nn.Module):
    """The first branch reads the stream in another order, as in Swin v2; the second one reads the stream."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))

    def forward(self, h, positions):
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


class Sliced(nn.Module):
    """Sums on a part of the stream, as TimeSformer's attention has them, then a plain residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, positions):
        first, rest = h[:, :1], h[:, 1:]
        rest = rest + self.mix(self.norm(rest.clone()))
        h = torch.cat((first, rest), 1)
        return h + self.last(self.second_norm(h))


class NoResidual(nn.Module):
    """Its second layer has no residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.branch, self.calls = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, h, positions):
        f = self.branch(self.norm(h))
        return f if positions is None else h + f


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList(kind() for _ in range(LAYERS)), kind
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h):
        positions = h.cumsum(1).tanh()
        for number, layer in enumerate(self.layers):
            h = layer(h, None if self.kind is NoResidual and number == 1 else positions)
        return self.norm(h)


class Positions(Network):
    """An unknown sum in front of the layers."""

    def forward(self, x):
        return super().forward(x + torch.tanh(self.reads(x)) * x)


# a model, its converted sums, and of the sums that are left: their places in order, and a word of the reason
LEFT = {
    "in another order": (lambda: Stack(Windows), LAYERS, ["layers.1", "layers.2"], "none is a stream"),
    "positions": (lambda: Stack(PositionsEverywhere), 2 * LAYERS, ["layers.1", "layers.2"], "several layers"),
    "a part": (lambda: Stack(Sliced), LAYERS, ["layers.0", "layers.1", "layers.2"], "a part"),
    "no residual": (lambda: Stack(NoResidual), LAYERS - 1, ["layers.1"], "no residual"),
    "outside": (lambda: Positions("quotient"), LAYERS, ["Positions"], "outside of the layers"),
}


@pytest.mark.parametrize("name", LEFT)
def test_sums_that_are_left_are_named(name):
    made, number, places, word = LEFT[name]
    torch.manual_seed(0)
    model = made().double().eval()
    before = model(X.double())
    _, report = spheret.convert(model, example_inputs=X.double())
    assert len(report.converted) == number
    for place in places:
        assert any(where.startswith(place) and word in why for where, why in report.left)
    assert all(where in str(report) for where, _ in report.left)
    torch.testing.assert_close(model(X.double()), before, rtol=0, atol=1e-10)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.GroupNorm(1, 6), nn.AvgPool2d(3, 1, 1)]) for _ in range(2))

    def forward(self, h):
        for norm, pool in self.layers:
            h = h + pool(norm(h))
        return h


def test_a_group_norm_tells_the_channels():
    model = Images().eval()
    before = model(IMAGES)
    spheret.convert(model, example_inputs=IMAGES)
    assert [(step.channel_dim, step.connection.dim) for step in steps(model)] == [(1, 6), (1, 6)]
    torch.testing.assert_close(model(IMAGES), before)


class ResidualBlock(nn.Module):
    """torchvision's BasicBlock: one relu serves the branch and the sum, in place."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_one_relu_may_serve_the_branch_and_the_sum(t):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 1), ResidualBlock(), ResidualBlock(), nn.AvgPool2d(3)).eval()
    before = model(IMAGES)
    _, report = spheret.convert(model, example_inputs=IMAGES)
    assert [row.name for row in report.converted] == ["1.bn2", "2.bn2"]
    anneal(model, t)
    after = model(IMAGES)
    assert torch.allclose(after, before, atol=1e-5) == (t == 0)
    after.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(spheret.revert(model)(IMAGES), before)
