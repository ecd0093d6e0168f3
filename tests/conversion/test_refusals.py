"""What convert refuses: one clear sentence each, and the model as it was."""

import copy

import pytest
import torch
import transformers as tf
from foreign_models import COMMON, VOCAB, WIDTH, build, example, output
from torch import nn

import spheret
from spheret.conversion import ConversionError, steps
from spheret.conversion.steps import Hook


class Block(nn.Module):
    """A Pre-Norm layer whose code can be made strange."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.norm, self.branch, self.kind = nn.LayerNorm(8), nn.Linear(8, 8), kind
        self.gate = nn.Linear(8, 8)

    def forward(self, h):
        if self.kind == "no residual":
            return self.branch(self.norm(h))
        f = self.branch(self.norm(h))
        if self.kind == "gated":
            return h + f * self.gate(h).sigmoid()
        if self.kind == "dropout":
            f = nn.functional.dropout(f, 0.1, self.training)
        if self.kind == "hidden reader":
            return h + self.gate(f * h.mean())
        return h + f


def network(*kinds):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for kind in kinds), nn.LayerNorm(8))


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def assert_untouched(model, before):
    assert not steps(model)
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not [hook for hook in hooks if isinstance(getattr(hook, "__self__", None), Hook)]
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (("no residual", "no residual"), r"Sequential has no residual sum h \+ f"),
        # half known: one layer is as it should be, the other is not
        (("plain", "gated"), r"unknown residual in 1 \(Block\), test_refusals\.py:\d+ \(return h \+ f \* self\.gate"),
        (("plain", "dropout"), r"unknown residual in 1 \(Block\).*dropout with p = 0\.1"),
        (("plain", "hidden reader"), "reads the stream where no hook sees it"),
    ],
)
def test_models_that_are_unknown_or_half_known(kinds, sentence):
    model = network(*kinds)
    before = model.state_dict()
    with pytest.raises(ConversionError, match=sentence):
        spheret.convert(model, example_inputs=X)
    assert_untouched(model, before)


def test_a_layer_without_a_residual_is_listed():
    model = network("plain", "no residual", "plain")
    before = model.eval()(X)
    _, report = spheret.convert(model, example_inputs=X)
    assert report.left == (("1", "the layer has no residual sum h + f"),)
    assert "left: 1: the layer has no residual sum h + f." in str(report)
    assert torch.allclose(model(X), before, atol=1e-5)


def test_shared_blocks():
    block = Block()
    with pytest.raises(ConversionError, match="more than once in one forward pass"):
        spheret.convert(nn.Sequential(block, block, nn.LayerNorm(8)), example_inputs=X)
    albert = tf.AlbertModel(tf.AlbertConfig(**COMMON, embedding_size=WIDTH))
    before = albert.state_dict()
    with pytest.raises(ConversionError, match="more than once in one forward pass"):
        spheret.convert(albert)
    assert_untouched(albert, before)


def test_tied_embeddings_are_no_shared_blocks():
    model = build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    spheret.convert(model)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_quantised_layers():
    model = network("plain", "plain")
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ConversionError, match="quantised linear layers"):
        spheret.convert(quantised, example_inputs=X)


def test_inference_mode():
    with torch.inference_mode():
        model = network("plain")
        with pytest.raises(ConversionError, match=r"torch\.inference_mode"):
            spheret.convert(model, example_inputs=X)
    with pytest.raises(ConversionError, match=r"torch\.inference_mode"):
        spheret.convert(model, example_inputs=X)


def test_twice_and_not_at_all():
    model, _ = spheret.convert(network("plain"), example_inputs=X)
    with pytest.raises(ConversionError, match="converted already"):
        spheret.convert(model, example_inputs=X)
    spheret.revert(model)
    with pytest.raises(ValueError, match="not converted, so there is nothing to revert"):
        spheret.revert(model)
    with pytest.raises(ValueError, match=r"call spheret\.convert"):
        spheret.conversion.anneal(model, 0.5)


def test_other_bad_input():
    model = network("plain")
    for arguments, sentence in [
        ({"scheme": "pre-ln"}, "pre-ln does not: take one of geonorm, proj-spheretnorm"),
        ({"scheme": "spheret"}, "Did you mean 'proj-spheretnorm'"),
        ({"start": "exakt"}, "Did you mean 'exact'"),
        ({"schedul": "sqrt"}, "unknown option of proj-spheretnorm"),
        ({"inner_norm": True}, "the model keeps the norms before its branches"),
        ({"entry_norm": False}, "needs the radius"),
        ({"prores": 10.0}, "with full branches"),
        ({"batches": []}, "batches is empty"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            spheret.convert(model, example_inputs=X, **arguments)
        assert_untouched(model, model.state_dict())
    with pytest.raises(ConversionError, match="does not say what it takes"):
        spheret.convert(model)
    with pytest.raises(ConversionError, match="failed with the given example_inputs"):
        spheret.convert(model, example_inputs=X[..., :3])
    with pytest.raises(TypeError, match="takes a torch module, got int"):
        spheret.convert(3)
    with pytest.raises(ConversionError, match="meta device"):
        spheret.convert(network("plain").to("meta"), example_inputs=X)
    with pytest.raises(ConversionError, match="no parameters"):
        spheret.convert(nn.Identity(), example_inputs=X)


@pytest.mark.parametrize("start", ["calibrated", "plain"])
def test_the_other_starts_have_no_side_channel(start):
    model = build("llama")
    inputs = example("llama", model)
    with torch.no_grad():
        before = output(model, inputs)
        _, report = spheret.convert(model, start=start, batches=[inputs, inputs])
        after = output(model, inputs)
    assert spheret.conversion.position(model) == 1
    assert report.start == start
    assert report.converted[0].rows == 72
    first = steps(model)[0]
    if start == "plain":
        assert report.converted[0].radius == pytest.approx(WIDTH**0.5)
        assert [row.alpha for row in report.converted] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])
    else:
        plain, _ = spheret.convert(build("llama"), start="plain")
        with torch.no_grad():
            worse = output(plain, inputs)
        assert float((after - before).square().mean()) < 0.3 * float((worse - before).square().mean())
        assert first.connection.norm.a is not None
    # and every start can go back to the original
    spheret.conversion.anneal(model, 0.0)
    with torch.no_grad():
        assert torch.allclose(output(model, inputs), before, atol=1e-4)


def test_the_fit_finds_a_step_size_that_all_rows_share():
    """Where every row has the same length and its branch is orthogonal, one step size is exact."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.swap = nn.RMSNorm(8), nn.Linear(8, 8, bias=False)
            with torch.no_grad():
                # an antisymmetric matrix maps each row to one that is orthogonal to it
                a = torch.randn(8, 8)
                self.swap.weight.copy_(0.3 * (a - a.T))

        def forward(self, h):
            return h + self.swap(self.norm(h))

    torch.manual_seed(0)
    model = nn.Sequential(Turning(), nn.RMSNorm(8))
    x = 2 * nn.functional.normalize(torch.randn(50, 8), dim=-1)
    with torch.no_grad():
        before = model(x)
        _, report = spheret.convert(model, start="calibrated", example_inputs=x)
        assert torch.allclose(model(x), before, atol=1e-4)
    assert report.converted[0].radius == pytest.approx(2.0)
    assert report.converted[0].alpha == pytest.approx(1.0, rel=1e-4)
    assert report.converted[0].kind == "pre-norm"


def test_one_of_our_own_models_converts_too():
    config = spheret.GPTConfig(layers=2, heads=2, width=16, block=8, vocab=VOCAB, scheme="pre-ln")
    model = spheret.GPT(config).eval()
    tokens = torch.randint(VOCAB, (2, 8))
    with torch.no_grad():
        before = model(tokens)
        _, report = spheret.convert(model)
        assert len(report.converted) == 4
        assert torch.allclose(model(tokens), before, atol=1e-5)
