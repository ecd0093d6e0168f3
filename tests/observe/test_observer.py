"""The observer of `spheret train`: what it measures, against definitions in float64, and that it changes nothing."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

from spheret.connections import PAPER_SCHEMES, SCHEMES
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.head import HEADS, own_logit
from spheret.observe.measures import common_share, mean_cosine
from spheret.observe.observer import NonFinite, Observer, own_logit_and_loss, radius_of, start_of
from spheret.observe.records import Start

SIZES = {"layers": 3, "heads": 2, "width": 16, "block": 12, "vocab": 40}


def build(scheme="proj-spheretnorm", **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(scheme=scheme, **{**SIZES, "head_bias": "zero", **options}))
    ids = torch.randint(40, (3, 13))
    return model, ids[:, :-1], ids[:, 1:]


def observer_of(model, precision=nullcontext):
    return Observer(model, precision, 3.0, warmup=0, steps=100)


def test_mean_cosine_and_common_share():
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    flat = torch.nn.functional.normalize(x.reshape(15, 7), dim=-1)
    pairs = flat @ flat.T
    assert float(mean_cosine(x)) == pytest.approx(float((pairs.sum() - pairs.trace()) / (15 * 14)), abs=1e-12)
    x[..., 0] += 30
    mean = x.reshape(-1, 7).sum(0) / 15
    rest = math.sqrt(sum(float((row - mean) @ (row - mean)) for row in x.reshape(-1, 7)) / 15)
    assert float(common_share(x)) == pytest.approx(float(mean.norm()) / rest, rel=1e-12)
    assert float(common_share(torch.ones(3, 8))) == math.inf


@pytest.mark.parametrize("name", SCHEMES)
def test_looking_changes_nothing(name):
    model, x, y = build(name, dropout=0.2)
    model.train()
    random = torch.get_rng_state()
    observer = observer_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    observer.see_gradients(1)
    assert len(observer.observe(1, x, y).sublayers) == 6
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("inf")


class TestNotFinite:
    def find(self, model, x, y):
        return observer_of(model).find_not_finite(7, [(x, y)]).event

    @pytest.mark.parametrize("name", PAPER_SCHEMES)
    def test_the_first_bad_gradient(self, name):
        model, x, y = build(name)
        model.blocks[1].mlp.output.register_forward_hook(lambda module, inputs, out: _Poison.apply(out))
        event = self.find(model, x, y)
        assert (event.kind, event.step, event.measured) == ("not finite", 7, "gradient")
        assert event.sublayer == 4
        assert event.parameter in dict(model.named_parameters())

    def test_the_first_bad_output(self):
        model, x, y = build("pre-ln")
        model.blocks[1].attention.output.register_forward_hook(lambda module, inputs, out: out * math.inf)
        event = self.find(model, x, y)
        assert (event.sublayer, event.measured) == (3, "branch")
        assert "sublayer 3 (attention of block 2)" in event.sentence

    def test_bad_weights(self):
        model, x, y = build("pre-ln")
        model.blocks[1].mlp.hidden.weight.data[0, 0] = torch.nan
        event = self.find(model, x, y)
        assert (event.sublayer, event.parameter, event.measured) == (4, "blocks.1.mlp.hidden.weight", "weights")
        with pytest.raises(NonFinite, match=event.parameter):
            observer_of(model).check_weights(7)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", ["none", "unigram"])
def test_the_start_is_read_without_the_bias(head, bias):
    torch.manual_seed(0)
    counts = torch.arange(1, 41) if bias == "unigram" else None
    model = GPT(GPTConfig(scheme="proj-spheretnorm", head=head, head_bias=bias, **SIZES), counts).train()
    ids = torch.randint(40, (3, 13))
    own, loss = own_logit_and_loss(model, ids[:, :-1], ids[:, 1:])
    assert model.training
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1])
    assert loss == pytest.approx(float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())), rel=1e-6)
    plain = logits if model.head_bias is None else logits - model.head_bias.detach()
    assert own == pytest.approx(own_logit(plain, ids[:, :-1]), abs=1e-5)
    for entropy, expected in ((3.0, 3.0 if bias == "unigram" else math.log(40)), (None, math.log(40))):
        assert start_of(model, ids[:, :-1], ids[:, 1:], entropy) == Start(own, loss, expected)


def test_only_spherical_streams_have_a_radius():
    assert [name for name in PAPER_SCHEMES if radius_of(build(name)[0]) is not None] == [
        "geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm",
    ]  # fmt: skip


@pytest.mark.parametrize(("loss", "words"), [(3.5, "0.50 above"), (2.38, "0.62 below")])
def test_a_loss_below_the_expected_one_is_below_it(loss, words):
    assert Start(None, loss, 3.0).distance.startswith(words)
