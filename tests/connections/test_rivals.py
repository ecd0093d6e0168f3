"""beam, res-post and residual-multiplier against transformers' own layers, and ProRes with every scheme."""

import math

import pytest
import torch
from oracle import rows
from safetensors.torch import load, save
from small_models import TINY, randomize, tokens
from states import assert_same, distance, state_before
from torch import nn
from transformers import BeamConfig, GraniteConfig, Olmo2Config
from transformers.models.beam.modeling_beam import BeamDecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

from spheret import GPT, SCHEMES, GPTConfig, retract, scheme

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


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.inf])
def test_a_multiplier_must_be_above_0(multiplier):
    with pytest.raises(ValueError, match=r"multiplier .*0"):
        scheme("residual-multiplier", multiplier=multiplier)


def model(name, prores=10.0, **changes):
    config = GPTConfig(**{**TINY, "layers": 3, **changes}, scheme=name, scheme_options={"prores": prores})
    return randomize(GPT(config))


@pytest.mark.parametrize("name", SCHEMES)
class TestProRes:
    def test_the_branch_of_block_b_has_the_factor_t_over_T_b(self, name):
        built = scheme(name, prores=10.0)
        connections = randomize(nn.ModuleList(built.connect_block(D, 2, BLOCKS)))
        f = 0.3 * rows(6, D, seed=1).float()
        for connection in connections:
            h = state_before(built, connection.sublayer, 2 * BLOCKS, rows(6, D).float())
            full, still = connection.write(h, f), None
            moved = []
            for update in (0, 1, 5, 20, 30):
                connection.at_update(update)
                assert connection.warmup.factor.item() == pytest.approx(min(update / 20, 1))
                out = connection.write(h, f)
                still = out if update == 0 else still
                moved.append(distance(out, still))
            # without its branch the stream stays as it is, and each update lets in more of it
            assert moved == sorted(moved)
            assert moved[-2] == moved[-1] > moved[1] > 0
            assert_same(connection.write(h, f), full)

    def test_without_an_update_it_is_the_plain_scheme(self, name):
        warm, plain = model(name), model(name, None)
        x = tokens()
        assert torch.equal(warm(x), plain(x))
        warm.at_update(1)
        assert not torch.equal(warm(x), plain(x))
        # blocks 1, 2 and 3 are done after 10, 20 and 30 updates
        warm.at_update(30)
        assert torch.equal(warm(x), plain(x))
        assert {p for p, _ in warm.named_parameters()} == {p for p, _ in plain.named_parameters()}


class TestProResState:
    def test_the_factor_is_saved_and_reset(self):
        warm = model("pre-ln")
        warm.at_update(7)
        state = load(save(warm.state_dict()))
        assert state["blocks.2.mlp_connection.warmup.factor"].item() == pytest.approx(7 / 30)
        twin = model("pre-ln")
        twin.load_state_dict(state)
        assert torch.equal(twin(tokens()), warm(tokens()))
        with torch.device("meta"):
            empty = GPT(warm.config)
        empty.to_empty(device="cpu").reset_parameters()
        assert empty.blocks[2].mlp_connection.warmup.factor.item() == 1

    def test_a_spherical_step_is_that_much_smaller(self):
        warm = model("proj-spheretnorm")
        connection = warm.blocks[1].attention_connection
        connection.norm.reset_parameters()
        connection.at_update(5)
        step = connection.retraction_step()
        assert step.alpha.item() == connection.alpha.item() == pytest.approx(0.25 / math.sqrt(3))
        h, f = rows(6, D), rows(6, D, seed=1)
        out = connection.double().write(h, f)
        torch.testing.assert_close(out, retract(h, f, 0.25 / math.sqrt(3), "projection"), rtol=1e-6, atol=1e-6)
        cosine = (h * out).sum(-1) / (h.norm(dim=-1) * out.norm(dim=-1))
        torch.testing.assert_close(connection.angle(h, f).cos(), cosine, rtol=0, atol=1e-7)

    @pytest.mark.parametrize("prores", [0.0, -3.0, math.inf])
    def test_it_is_a_positive_number_of_updates(self, prores):
        with pytest.raises(ValueError, match=r"prores of keel.* 0"):
            scheme("keel", prores=prores)
