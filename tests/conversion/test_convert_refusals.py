"""Models and options that `convert` refuses: one table, with a noun of each sentence, and the model as it was.

What else the library refuses is in tests/reliability/refusals/conversion.py.
"""

import types
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import spheret
from spheret.conversion import ConversionError, steps

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A Pre-Norm layer whose code can be made strange."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.norm, self.branch, self.kind = nn.LayerNorm(8), nn.Linear(8, 8), kind
        self.gate, self.drop = nn.Linear(8, 8), 0.1
        self.gain = nn.Parameter(torch.arange(8.0))

    def forward(self, h):
        if self.kind == "no residual":
            return self.branch(self.norm(h))
        f = self.branch(self.norm(h))
        if self.kind == "gated":
            return h + f * self.gate(h).sigmoid()
        if self.kind == "dropout":
            f = nn.functional.dropout(f, 0.2, self.training)
        if self.kind == "hidden reader":
            # a factor that no module reads: no hook gives it the stream's length
            return h + self.gate(f * h.mean())
        if self.kind == "two dropouts":
            f = self.branch(nn.functional.dropout(self.norm(h), self.drop, self.training))
            return h + nn.functional.dropout(f, self.drop, self.training)
        if self.kind == "scaled per channel":
            return self.gate.bias.exp() * h + 0.5 * f
        if self.kind == "negative":
            return -0.5 * h + f
        if self.kind == "gain of zeros":
            return h + self.gain * f
        if self.kind == "random branch":
            return h + (f * (torch.rand(len(h), 1, 1) < 0.5) if self.training else f)
        if self.kind == "multiplied":
            return (h + f) * self.gate.bias.cos()
        if self.kind == "fails":
            return h + self.branch(self.gate)
        if self.kind in ("fails on the sphere", "another shape"):
            h = 1000 * h
            h = h + self.branch(self.norm(h))
            large, y = h.abs().max() > 100, self.gate(h)
            return y if large else y[:, :1] if self.kind == "another shape" else self.gate(h[..., :4])
        return h + f


def network(*kinds):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for kind in kinds), nn.LayerNorm(8))


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


class Own(nn.Module):
    """A model with code of its own, and a last sum behind which only what `returns` makes can be compared."""

    def __init__(self, kind="plain", returns=lambda x: x):
        super().__init__()
        self.layers = nn.Sequential(*(Block("plain" if kind == "layers" else kind) for _ in range(2)))
        self.kind, self.returns = kind, returns
        self.norm, self.branch, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h):
        if self.kind == "layers":
            return self.returns(self.layers(h))
        if self.kind == "unknown sum":
            return self.head(h + self.branch(self.norm(h)).sigmoid())
        if self.kind == "other outputs":
            h = 1000 * h
            h = h + self.branch(self.norm(h))
            y = self.head(h)
            return (y, y.mean(1)) if h.abs().max() > 100 else y
        return self.returns(self.head(self.norm(self.layers(h))))


class BlockResiduals(nn.Module):
    """A sum inside a block, whose input is mixed from the states before it, as in Inkling 2."""

    def __init__(self):
        super().__init__()
        self.mix, self.branch = Mix(), nn.Linear(8, 8)

    def forward(self, h):
        states = torch.stack([h, h.sin()], dim=-2)
        return h + self.branch(self.mix(states, h))


class Mix(nn.Module):
    def forward(self, states, h):
        return torch.cat([states, h.unsqueeze(-2)], dim=-2).mean(-2)


def converted():
    return spheret.convert(network("plain"), example_inputs=X)[0]


def saved():
    model = network("plain")
    model.config = types.SimpleNamespace(spheret={"scheme": "proj-spheretnorm"})
    return model


def shared():
    block = Block()
    return nn.Sequential(block, block, nn.LayerNorm(8))


def made_in_inference_mode():
    with torch.inference_mode():
        return network("plain")


def quantised():
    return torch.ao.quantization.quantize_dynamic(network("plain", "plain"), {nn.Linear}, dtype=torch.qint8)


def one_entry():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(1, 1, 4, norm_first=True), 2, enable_nested_tensor=False)


# how the model is made, the module that the sentence names, a noun of the reason, and other arguments of convert
MODELS = [
    (partial(network, "plain", "gated"), "1 (Block), test_convert_refusals.py:", "no module returns"),
    (partial(Own, "unknown sum"), "Own (Own), test_convert_refusals.py:", "no module returns"),
    (partial(network, "plain", "dropout"), "1 (Block)", "dropout"),
    (partial(network, "two dropouts"), "0.branch", "attribute drop "),
    (one_entry, "layers.0", "one entry", {"example_inputs": X[..., :1]}),
    (shared, "0.branch", "more than once"),
    (partial(network, "scaled per channel"), "0 (Block), test_convert_refusals.py:", "per channel"),
    (partial(network, "negative"), "0 (Block), test_convert_refusals.py:", "positive"),
    (partial(network, "plain", "gain of zeros"), "1.gain", "zeros"),
    (partial(network, "plain", "random branch"), "1 (the branch", "training mode"),
    (lambda: nn.Sequential(BlockResiduals(), nn.LayerNorm(8)), "0.mix", "earlier states"),
    (partial(network, "multiplied"), "0.branch", "neither read nor returned"),
    (partial(network, "plain", "hidden reader"), "1.gate", "no hook sees it"),
    # it is found whatever the model returns
    *((partial(Own, "hidden reader", made), "layers.1.gate", "hook") for made in (Answer, Opaque, torch.argmax, id)),
    (partial(network, "another shape"), "1 (LayerNorm", "shape"),
    (partial(network, "plain", "fails"), "1.branch", "example_inputs"),
    (partial(network, "fails on the sphere"), "0.gate", "residual sums"),
    (partial(network, "no residual"), "Sequential", "no residual sum"),
    (partial(Own, "other outputs"), "Own", "other outputs"),
    *(
        (partial(Own, "layers", made), "layers.1.branch", "compared")
        for made in (Slotted, torch.argmax, lambda h: 0 * h)
    ),
    (quantised, "0.branch", "quantised"),
    (made_in_inference_mode, "0.gain", "inference_mode"),
    (lambda: network("plain").to("meta"), "0.gain", "meta"),
    # these concern the whole model, or the arguments
    (nn.Identity, "Identity", "no parameters"),
    (converted, "this model", "converted already"),
    (saved, "this model", "hub.load"),
    (partial(network, "plain"), "Sequential", "example_inputs", {"example_inputs": None}),
    (partial(network, "plain"), "batches", "empty", {"batches": []}),
    (partial(network, "plain"), "schedul", "option", {"schedul": "sqrt"}),
    (partial(network, "plain"), "alpha", "float32", {"alpha": 1e-320}),
    (partial(network, "plain"), "entry_norm", "radius", {"entry_norm": False}),
    (partial(network, "plain"), "branch_norm", "branches", {"branch_norm": True}),
    (partial(network, "plain"), "branch_norm", "branches", {"scheme": "normed-spheretnorm"}),
]


@pytest.mark.parametrize(("row"), MODELS, ids=lambda row: f"{row[1]}: {row[2]}")
def test_a_refusal_names_the_place_and_the_reason(row):
    made, place, noun, *other = row
    model = made()
    keys, first, hooks = list(model.state_dict()), steps(model), hooks_of(model)
    with pytest.raises(ValueError) as refused:
        spheret.convert(model, **{"example_inputs": X, **(other[0] if other else {})})
    assert isinstance(refused.value, ConversionError) or "scheme" in other[0] or other[0].keys() <= ARGUMENTS
    assert place in str(refused.value)
    assert noun in str(refused.value)
    assert list(model.state_dict()) == keys
    assert steps(model) == first
    assert hooks_of(model) == hooks


ARGUMENTS = {"alpha", "schedul", "entry_norm", "branch_norm"}


def hooks_of(model):
    return [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]


def test_convert_under_inference_mode():
    model = network("plain")
    with torch.inference_mode(), pytest.raises(ConversionError):
        spheret.convert(model, example_inputs=X)


@pytest.mark.parametrize("returns", [Answer, Opaque, torch.argmax, lambda y: 0 * y, lambda y: None])
def test_whatever_a_model_returns_it_is_converted_if_it_can_be_compared(returns):
    _, report = spheret.convert(Own(returns=returns), example_inputs=X)
    assert report.difference < 1e-5
    assert len(report.converted) == 2
