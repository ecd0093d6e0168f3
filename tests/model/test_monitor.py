"""What is measured of the stream during training, against its definitions in float64."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from spheret.model.gpt import GPT, GPTConfig
from spheret.model.head import HEADS, own_logit
from spheret.model.monitor import (
    common_gradients,
    common_share,
    expected_start,
    keeps_its_norm,
    measure_stream,
    own_logit_and_loss,
)

SIZES = {"layers": 3, "heads": 2, "width": 16, "block": 12, "vocab": 40}


def build(scheme="proj-spheretnorm", **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(scheme=scheme, **{**SIZES, **options}))
    ids = torch.randint(40, (3, 13))
    return model.double(), ids[:, :-1], ids[:, 1:]


def test_the_common_share_is_the_mean_over_the_rest():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 50, 8, generator=generator, dtype=torch.float64)
    rows[..., 0] += 30
    flat = rows.reshape(-1, 8)
    mean = flat.sum(0) / 200
    rest = math.sqrt(sum(float((row - mean) @ (row - mean)) for row in flat) / 200)
    assert float(common_share(rows)) == pytest.approx(float(mean.norm()) / rest, rel=1e-12)
    assert float(common_share(torch.ones(3, 8))) == math.inf


def shares_token_by_token(model, x, y):
    """The same shares from delta_t and y_t of every token, which autograd materialises."""
    writers = [branch.output for block in model.blocks for branch in (block.attention, block.mlp)]
    kept = []
    handles = [w.register_forward_hook(lambda module, args, out: kept.append((args[0], out))) for w in writers]
    logits = model(x)
    for handle in handles:
        handle.remove()
    loss = cross_entropy(logits.flatten(0, 1), y.flatten())
    deltas = torch.autograd.grad(loss, [out for _, out in kept])
    shares = []
    for (inputs, _), delta in zip(kept, deltas, strict=True):
        inputs, delta = inputs.detach().flatten(0, -2), delta.flatten(0, -2)
        gradient = sum(torch.outer(d, v) for d, v in zip(delta, inputs, strict=True))
        common = len(delta) * torch.outer(delta.mean(0), inputs.mean(0))
        shares.append(float(common.norm() / (gradient - common).norm()))
    return shares


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"recompute": True}, {"dropout": 0.3}, {"mlp": "swiglu"}])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm"])
def test_the_common_share_of_a_gradient_is_that_of_its_tokens(scheme, options):
    model, x, y = build(scheme, **options)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    random = torch.get_rng_state()
    shares = common_gradients(model, x, y)
    assert torch.equal(torch.get_rng_state(), random)
    # neither the gradients nor the mode nor later passes are changed
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert shares == pytest.approx(shares_token_by_token(model.eval(), x, y), rel=1e-9)
    # it is measured in a block without gradients, too
    with torch.no_grad():
        assert common_gradients(model, x, y) == shares


def test_half_precision_changes_little():
    model, x, y = build("pre-ln")
    exact = common_gradients(model, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert common_gradients(model.float(), x, y) == pytest.approx(exact, rel=0.1)


def test_a_sublayer_record_holds_the_share_of_its_branch():
    model, x, y = build()
    outputs = []
    model.blocks[1].mlp.register_forward_hook(lambda module, args, out: outputs.append(out))
    records = measure_stream(model, x, y).sublayers
    assert records[3].common_output == float(common_share(outputs[0]))


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
    expected = 3.0 if bias == "unigram" else math.log(40)
    assert expected_start(model, 3.0) == expected
    assert expected_start(model, None) == math.log(40)


def test_only_spherical_streams_keep_their_norm():
    kept = {name: keeps_its_norm(build(name)[0]) for name in ("pre-ln", "post-ln", "geonorm", "proj-spheretnorm")}
    assert kept == {"pre-ln": False, "post-ln": False, "geonorm": True, "proj-spheretnorm": True}
