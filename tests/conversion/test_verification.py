"""A conversion is compared with the original at every call of a module, and its report names every sum left."""

from dataclasses import dataclass

import pytest
import torch
import transformers as tf
from torch import nn

import spheret
from spheret.conversion import ConversionError, anneal, steps

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, reads_the_stream):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reads_the_stream = reads_the_stream

    def forward(self, h):
        f = self.first(self.norm(h))
        # a factor that no module reads: no hook gives it the stream's length
        return h + self.last(f * h.mean() if self.reads_the_stream else f)


@dataclass
class Answer:
    logits: torch.Tensor


class Opaque:
    def __init__(self, logits):
        self.logits = logits


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


RETURNS = {
    "a tensor": lambda x: x,
    "a dataclass": Answer,
    "an object": Opaque,
    "integers": lambda x: x.argmax(-1),
    "zeros": lambda x: x,
    "a constant": lambda x: x,
    "nothing": lambda x: None,
}


class Network(nn.Module):
    def __init__(self, returns, reads_the_stream):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(reads_the_stream) for _ in range(3))
        self.norm, self.head, self.returns = nn.LayerNorm(8), nn.Linear(8, 4), returns
        if returns in ("zeros", "a constant"):
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, float(returns == "a constant"))

    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        return RETURNS[self.returns](self.head(self.norm(h)))


@pytest.mark.parametrize("returns", RETURNS)
def test_a_part_that_no_hook_sees_is_found_whatever_the_model_returns(returns):
    model = Network(returns, reads_the_stream=True)
    with pytest.raises(ConversionError, match=r"layers\.\d\.last \(Linear\).*reads the stream where no hook sees it"):
        spheret.convert(model, example_inputs=X)
    assert not steps(model)
    _, report = spheret.convert(Network(returns, reads_the_stream=False), example_inputs=X)
    assert report.difference < 1e-5
    assert len(report.converted) == 3


def test_a_last_sum_behind_which_nothing_can_be_compared_is_refused():
    class Bare(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.layers, self.kind = nn.Sequential(Block(False), Block(False)), kind

        def forward(self, x):
            return self.kind(self.layers(x))

    spheret.convert(Bare(Opaque), example_inputs=X)
    for kind in (Slotted, lambda h: h.argmax(-1), lambda h: 0 * h):
        model = Bare(kind)
        with pytest.raises(ConversionError, match="nothing that Bare returns"):
            spheret.convert(model, example_inputs=X)
        assert not steps(model)


class Sliced(nn.Module):
    """Sums on a part of the stream, as TimeSformer's attention has them, then a plain residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.norm2, self.last = (
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
        )

    def forward(self, h):
        first, rest = h[:, :1], h[:, 1:]
        rest = rest + self.mix(self.norm(rest.clone()))
        h = torch.cat((first, rest), 1)
        return h + self.last(self.norm2(h))


def test_sums_on_a_part_of_the_stream_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(Sliced(), Sliced(), nn.LayerNorm(8))
    before = model(X)
    _, report = spheret.convert(model, example_inputs=X)
    torch.testing.assert_close(model(X), before)
    assert [row.name for row in report.converted] == ["0.last", "1.last"]
    assert [(where.partition(",")[0], "a part" in why) for where, why in report.left] == [("0", True), ("1", True)]


def test_timesformer_names_the_sums_of_its_attention():
    config = tf.TimesformerConfig(
        image_size=16, patch_size=8, num_frames=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.TimesformerModel(config).eval()
    videos = {"pixel_values": torch.randn(1, 2, 3, 16, 16)}
    before = model(**videos).last_hidden_state
    _, report = spheret.convert(model, example_inputs=videos)
    torch.testing.assert_close(model(**videos).last_hidden_state, before, rtol=1e-4, atol=1e-5)
    hosts = [where.partition(",")[0] for where, _ in report.left]
    assert [sum(f"layer.{number}" in host for host in hosts) for number in range(2)] == [2, 2]


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
    model = nn.Sequential(nn.Conv2d(3, 6, 3), ResidualBlock(), ResidualBlock(), nn.AvgPool2d(6)).eval()
    images = torch.randn(2, 3, 8, 8)
    before = model(images)
    _, report = spheret.convert(model, example_inputs=images)
    assert [row.name for row in report.converted] == ["1.bn2", "2.bn2"]
    anneal(model, t)
    after = model(images)
    assert torch.allclose(after, before, atol=1e-5) == (t == 0)
    after.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(spheret.revert(model)(images), before)
