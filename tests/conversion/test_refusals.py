"""What convert refuses: one clear sentence each, and the model as it was."""

import ast
import re
import types
from pathlib import Path

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
        self.gate, self.drop = nn.Linear(8, 8), 0.1

    def forward(self, h):
        if self.kind == "no residual":
            return self.branch(self.norm(h))
        f = self.branch(self.norm(h))
        if self.kind == "gated":
            return h + f * self.gate(h).sigmoid()
        if self.kind == "dropout":
            f = nn.functional.dropout(f, 0.2, self.training)
        if self.kind == "hidden reader":
            return h + self.gate(f * h.mean())
        if self.kind == "two dropouts":
            f = self.branch(nn.functional.dropout(self.norm(h), self.drop, self.training))
            return h + nn.functional.dropout(f, self.drop, self.training)
        if self.kind == "multiplied":
            return (h + f) * self.gate.bias.cos()
        if self.kind == "fails":
            return h + self.branch(self.gate)
        if self.kind in ("fails on the sphere", "another shape"):
            h = 1000 * h
            h = h + self.branch(self.norm(h))
            large, y = h.abs().max() > 100, self.gate(h)
            return y if large else y[:, :1] if self.kind == "another shape" else self.gate(h)
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


class Own(nn.Module):
    """A model whose own code adds, in no layer."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.branch, self.head, self.kind = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.layer = Block()

    def forward(self, h):
        if self.kind == "integers":
            return self.layer(h).argmax(-1)
        if self.kind == "gated":
            return self.head(h + self.branch(self.norm(h)).sigmoid())
        h = 1000 * h
        h = h + self.branch(self.norm(h))
        y = self.head(h)
        return (y, y.mean(1)) if h.abs().max() > 100 else y


def converted(model):
    return spheret.convert(model, example_inputs=X)[0]


def saved(model):
    model.config = types.SimpleNamespace(spheret={"scheme": "proj-spheretnorm"})
    return model


def twice(block):
    return nn.Sequential(block, block, nn.LayerNorm(8))


def made_in_inference_mode():
    with torch.inference_mode():
        return network("plain")


def quantised():
    return torch.ao.quantization.quantize_dynamic(network("plain", "plain"), {nn.Linear}, dtype=torch.qint8)


def one_entry():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(1, 1, 4, norm_first=True), 2, enable_nested_tensor=False)


HERE = r"test_refusals\.py:\d+"
# every refusal, by how the model is made: its place in the model, its reason, and other arguments of convert
REFUSALS = {
    "unknown": (lambda: network("plain", "gated"), rf"in 1 \(Block\), {HERE} \(return h \+ f", "no module returns"),
    "unknown outside": (lambda: Own("gated"), rf"in Own \(Own\), {HERE}", "no module returns"),
    "dropout": (lambda: network("plain", "dropout"), r"in 1 \(Block\)", r"dropout with p = 0\.2"),
    "two dropouts": (lambda: network("two dropouts"), r"^0 \(the branch that ends in 0\.branch\)", "attribute drop "),
    "one entry": (one_entry, r"in layers\.0 \(TransformerEnc", "rows of one entry", {"example_inputs": X[..., :1]}),
    "shared": (lambda: twice(Block()), r"^0 \(the branch that ends in 0\.branch\)", "more than once in one forward"),
    "multiplied": (lambda: network("multiplied"), r"after 0\.branch", "neither read nor returned"),
    "hidden reader": (lambda: network("plain", "hidden reader"), r"what 1\.gate \(", "where no hook sees it"),
    "another shape": (lambda: network("another shape"), r"what 1 \(LayerNorm", "another shape"),
    "fails": (lambda: network("plain", "fails"), r"In 1\.branch: TypeError", "failed with the given example_inputs"),
    "fails later": (
        lambda: network("fails on the sphere"),
        r"In 0\.gate: RuntimeError",
        "takes, so its residual sums",
    ),
    "no residual": (lambda: network("no residual"), "^Sequential", r"no residual sum h \+ f"),
    "other outputs": (lambda: Own("other outputs"), "converted Own", "other outputs"),
    "integers": (lambda: Own("integers"), r"\(that of layer\.branch\)", "no floating-point tensor"),
    "quantised": (quantised, r"^0\.branch", "is quantised"),
    "inference mode": (made_in_inference_mode, r"^0\.norm\.weight", r"torch\.inference_mode"),
    "meta": (lambda: network("plain").to("meta"), r"^0\.norm\.weight", "meta device"),
    # these concern the whole model
    "no parameters": (nn.Identity, "^Identity", "no parameters"),
    "converted": (lambda: converted(network("plain")), "this model", "converted already"),
    "saved": (lambda: saved(network("plain")), "this model", r"conversion\.load"),
    "no example": (lambda: network("plain"), "^Sequential", "does not say what it takes", {"example_inputs": None}),
    "no batches": (lambda: network("plain"), "batches", "batches is empty", {"batches": []}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_place_and_the_reason(name):
    made, place, reason, *other = REFUSALS[name]
    model = made()
    keys, first = list(model.state_dict()), steps(model)
    with pytest.raises(ConversionError, match=place) as refused:
        spheret.convert(model, **{"example_inputs": X, **(other[0] if other else {})})
    assert re.search(reason, str(refused.value))
    assert str(refused.value).endswith(".")
    assert list(model.state_dict()) == keys
    assert steps(model) == first
    if not first:
        assert_untouched(model, model.state_dict())


def raised(name):
    """The file and line at which this refusal is raised."""
    made, _, _, *other = REFUSALS[name]
    with pytest.raises(ConversionError) as refused:
        spheret.convert(made(), **{"example_inputs": X, **(other[0] if other else {})})
    last = refused.traceback[-1]
    return last.path.name, last.lineno + 1


def test_every_refusal_is_in_the_table():
    lines = {raised(name) for name in REFUSALS}
    for path in Path(spheret.conversion.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and "ConversionError(" in ast.unparse(node):
                reached = any((path.name, line) in lines for line in range(node.lineno, node.end_lineno + 1))
                assert reached, f"{path.name}:{node.lineno}"


def test_a_layer_without_a_residual_is_listed():
    model = network("plain", "no residual", "plain")
    before = model.eval()(X)
    _, report = spheret.convert(model, example_inputs=X)
    assert report.left == (("1", "the layer has no residual sum h + f"),)
    assert "left: 1: the layer has no residual sum h + f." in str(report)
    assert torch.allclose(model(X), before, atol=1e-5)


def test_shared_blocks():
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


def test_inference_mode():
    model = network("plain")
    with torch.inference_mode(), pytest.raises(ConversionError, match="convert was called under"):
        spheret.convert(model, example_inputs=X)


def test_a_model_that_is_not_converted():
    model = spheret.revert(converted(network("plain")))
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
    ]:
        with pytest.raises(ValueError, match=sentence):
            spheret.convert(model, example_inputs=X, **arguments)
        assert_untouched(model, model.state_dict())
    with pytest.raises(TypeError, match="takes a torch module, got int"):
        spheret.convert(3)


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
