"""beam, res-post, residual-multiplier and the gate of vp-gate against transformers' own layers."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_models import randomize
from transformers import BeamConfig, GraniteConfig, Olmo2Config
from transformers.models.beam.modeling_beam import BeamDecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkResidualGate, MuseSparkRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

from spheret import retract, scheme

D, BLOCKS = 16, 3
SHAPE = {
    "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5, "vocab_size": 32,
}  # fmt: skip
# by scheme: the config and the layer, the norms before and after attention, and those before and after the MLP
LAYERS = {
    "beam": (
        BeamConfig(**SHAPE, mlp_layer_types=["dense"] * BLOCKS),
        BeamDecoderLayer,
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "res-post": (
        Olmo2Config(**SHAPE),
        Olmo2DecoderLayer,
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ),
    "residual-multiplier": (
        GraniteConfig(**SHAPE, residual_multiplier=0.22),
        GraniteDecoderLayer,
        ("input_layernorm", None, "post_attention_layernorm", None),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_block_is_transformers_layer(name):
    config, layer_class, names = LAYERS[name]
    config._attn_implementation = "eager"
    for block in range(BLOCKS):
        torch.manual_seed(block)
        layer = randomize(layer_class(config, block))
        attention, mlp = scheme(name).connect_block(D, block + 1, BLOCKS)
        places = (attention.inner_norm, attention.output_norm, mlp.inner_norm, mlp.output_norm)
        for place, norm in zip(places, names, strict=True):
            if norm is not None:
                place.load_state_dict(getattr(layer, norm).state_dict())
        angles = torch.rand(1, 5, 4)
        turn = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
        h = torch.randn(2, 5, D, requires_grad=True)
        truth = layer(h, **turn)
        middle = attention(h, lambda x, layer=layer, turn=turn: layer.self_attn(hidden_states=x, **turn)[0])
        out = mlp(middle, layer.mlp)
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
        shared = [h, *layer.self_attn.parameters(), *layer.mlp.parameters()]
        own = [place.weight for place, norm in zip(places, names, strict=True) if norm is not None]
        theirs = [getattr(layer, norm).weight for norm in names if norm is not None]
        probe = torch.randn_like(out)
        mine = torch.autograd.grad((out * probe).sum(), shared + own)
        for gradient, its in zip(mine, torch.autograd.grad((truth * probe).sum(), shared + theirs), strict=True):
            assert (gradient - its).norm() <= 1e-5 * its.norm() + 1e-6


def test_beam_is_the_projection_retraction_for_orthogonal_branches_of_the_streams_length():
    h = torch.randn(6, D, dtype=torch.float64)
    f = torch.randn(6, D, dtype=torch.float64)
    f = f - (f * h).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    h, f = (math.sqrt(D) * x / x.norm(dim=-1, keepdim=True) for x in (h, f))
    for sublayer in range(1, 7):
        connection = scheme("beam").connect(D, sublayer, 6).double()
        torch.testing.assert_close(
            connection.write(h, f), retract(h, f, 1 / math.sqrt(sublayer), "projection"), rtol=2e-5, atol=2e-5
        )


def test_the_gate_is_transformers():
    theirs = MuseSparkResidualGate(SimpleNamespace(hidden_size=D, residual_gate_temperature=0.3))
    own = scheme("vp-gate").connect(D, 1, 2)
    with torch.no_grad():
        theirs.gate.copy_(torch.linspace(-3, 3, D))
        own.gate_norm.weight.copy_(theirs.gate / 0.3)
    h, f = (torch.randn(5, D, requires_grad=True) for _ in range(2))
    out, truth = own.write(h, f), theirs(h, MuseSparkRMSNorm(D, eps=1e-5, with_scale=False)(f))
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    mine = torch.autograd.grad((out * weights).sum(), (h, f, own.gate_norm.weight))
    its = torch.autograd.grad((truth * weights).sum(), (h, f, theirs.gate))
    for x, y in zip(mine, (*its[:2], 0.3 * its[2]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
