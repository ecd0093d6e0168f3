"""The options of the backbone: against transformers' Llama, Qwen3 and Granite, and in products with each other."""

import json

import pytest
import torch
import torch.nn.functional as F
from small_models import TINY, randomize, tokens
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from spheret import GPT, SCHEMES, GPTConfig
from spheret.connections import LayerNorm, RMSNorm
from spheret.model.branches import activate, rotate, rotation

LLAMA = {"positions": "rope", "mlp": "swiglu", "norm": "rmsnorm"}
GROUPED = {**TINY, "heads": 4, "kv_heads": 2}
# the scheme, its options, transformers' classes, the options of both
RIVALS = {
    "llama": ("pre-ln", LlamaConfig, LlamaForCausalLM, {"bias": False}, {}),
    "llama with biases": ("pre-ln", LlamaConfig, LlamaForCausalLM, {"bias": True}, {}),
    "llama, another base": ("pre-ln", LlamaConfig, LlamaForCausalLM, {"bias": False, "rope_base": 100.0}, {}),
    "qwen3": ("pre-ln", Qwen3Config, Qwen3ForCausalLM, {"bias": False, "qk_norm": True}, {}),
    "granite": (
        "residual-multiplier", GraniteConfig, GraniteForCausalLM, {"bias": False},
        {"residual_multiplier": 0.22, "attention_multiplier": 0.5},
    ),
}  # fmt: skip


def wide_norm(self, x):
    """transformers' RMSNorm without its rounding to float32."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def tensors(model):
    """The weights of a GPT under transformers' names, as views."""
    shape = model.config.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "embed_tokens.weight", model.tokens.weight
    yield "norm.weight", model.get_parameter("final_norm.weight")
    for layer, block in enumerate(model.each_block()):
        attention, mlp, start = block.attention, block.mlp, f"layers.{layer}"
        norms = {
            "input_layernorm": block.attention_connection.get_parameter("inner_norm.weight"),
            "post_attention_layernorm": block.mlp_connection.get_parameter("inner_norm.weight"),
        }
        if attention.qkv_norm is not None:
            norms["self_attn.q_norm"] = attention.qkv_norm.get_parameter("q_norm.weight")
            norms["self_attn.k_norm"] = attention.qkv_norm.get_parameter("k_norm.weight")
        for name, gain in norms.items():
            yield f"{start}.{name}.weight", gain
        for part in ("weight", "bias") if model.config.bias else ("weight",):
            q, k, v = getattr(attention.qkv, part).split([queries, keys, keys])
            gate, up = getattr(mlp.hidden, part).chunk(2)
            for name, tensor in {
                "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
                "self_attn.o_proj": getattr(attention.output, part),
                "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": getattr(mlp.output, part),
            }.items():  # fmt: skip
                yield f"{start}.{name}.{part}", tensor


def pair(name, dtype):
    """Our model and transformers' with the same weights."""
    scheme, config_class, model_class, ours, theirs = RIVALS[name]
    model = randomize(GPT(GPTConfig(**GROUPED, scheme=scheme, **LLAMA, **ours)).to(dtype))
    c = model.config
    biases = {"attention_bias": c.bias} | ({"mlp_bias": c.bias} if config_class is LlamaConfig else {})
    config = config_class(
        vocab_size=c.vocab, max_position_embeddings=c.block, hidden_size=c.width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.shape.head_dim,
        intermediate_size=c.shape.hidden, rms_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, **biases, **theirs,
    )  # fmt: skip
    other = model_class(config).to(dtype)
    other.model.load_state_dict(dict(tensors(model)), strict=True)
    other.tie_weights()
    return model, other.eval()


class TestAgainstTransformers:
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
    @pytest.mark.parametrize("name", RIVALS)
    def test_logits_loss_gradients_and_generation(self, name, dtype, tolerance, monkeypatch):
        if dtype == torch.float64:
            for norm in (LlamaRMSNorm, Qwen3RMSNorm, GraniteRMSNorm):
                monkeypatch.setattr(norm, "forward", wide_norm)
        model, other = pair(name, dtype)
        x, y = tokens(), tokens(seed=1)
        truth = other(x).logits
        assert (model(x) - truth).abs().max() <= tolerance * truth.abs().max()
        loss, other_loss = model(x, y), F.cross_entropy(truth.flatten(0, 1), y.flatten())
        assert abs(loss - other_loss) <= tolerance * other_loss
        loss.backward()
        other_loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                # `tensors` names the weights: filled with their gradients, it names these
                p.copy_(p.grad)
        theirs = dict(other.model.named_parameters())
        for key, gradient in tensors(model):
            truth = theirs.pop(key).grad
            # the backward pass of small heads rounds a few times more
            assert (gradient - truth).norm() <= 5 * tolerance * truth.norm(), key
        assert not theirs

    @pytest.mark.parametrize("name", ["llama", "qwen3"])
    def test_cached_generation(self, name):
        model, other = pair(name, torch.float32)
        prompt = tokens(2, 5)
        ours = model.generate(prompt, 12, temperature=0)
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours, other.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
        assert torch.equal(ours, model.generate(prompt, 12, temperature=0, cached=False))
        # the keys and values of half the heads
        assert model.blocks[0].attention.qkv.weight.shape == (2 * 16, 16)

    def test_the_rotation_is_transformers_bit_for_bit(self):
        _, other = pair("llama", torch.float32)
        positions = torch.arange(1000)
        cos, sin = other.model.rotary_emb(torch.zeros(1), positions[None])
        for own, its in zip(rotation(positions, 4, 10_000.0), (cos, sin), strict=True):
            assert torch.equal(own[:, :, 0], its[..., :2])


class TestProducts:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_every_scheme_on_the_modern_backbone(self, name):
        grouped = {} if name == "ngpt" else {"kv_heads": 2}
        own = name in ("ngpt", "hybridnorm")
        config = GPTConfig(**{**TINY, "heads": 4}, scheme=name, **LLAMA, qk_norm=not own, bias=False, **grouped)
        model = randomize(GPT(config))
        prompt = tokens(2, 5)
        greedy = model.double().generate(prompt, 5, temperature=0)
        assert torch.equal(greedy, model.generate(prompt, 5, temperature=0, cached=False))
        x, y = tokens(2, 9), tokens(2, 9, seed=1)
        model(x, y).backward()
        assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())
        assert not [key for key, _ in model.named_parameters() if "positions" in key or key.endswith("bias")]


def test_relu2():
    mlp = randomize(GPT(GPTConfig(**TINY, scheme="pre-ln", mlp="relu2")).double()).blocks[0].mlp
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), mlp.output(mlp.hidden(x).clamp(min=0) ** 2))


def test_the_gradients_of_swiglu():
    hidden = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 2, 5, dtype=torch.float64)
    gate, rest = hidden.chunk(2, dim=-1)
    (truth,) = torch.autograd.grad(F.silu(gate) * rest, hidden, g)
    out = activate(hidden, "swiglu")
    torch.testing.assert_close(torch.autograd.grad(out, hidden, g)[0], truth, rtol=1e-12, atol=1e-14)

    def function(x):
        return activate(x, "swiglu")

    assert torch.autograd.gradcheck(function, (hidden,), check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (hidden,))
    with torch.no_grad():
        assert torch.equal(function(hidden), out)


class TestInside:
    def test_ngpt_scales_the_gate_and_turns_before_its_scale(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="ngpt", **LLAMA)).double())
        block, x = model.blocks[0], torch.randn(2, 9, 16, dtype=torch.float64)
        mlp = block.mlp
        gate, rest = mlp.hidden(x).chunk(2, dim=-1)
        gate, rest = gate * mlp.hidden_norm.gate_norm.weight * 4, rest * mlp.hidden_norm.rest_norm.weight
        torch.testing.assert_close(mlp(x), mlp.output(F.silu(gate) * rest))
        attention = block.attention
        q, k, _ = (part.unflatten(-1, (2, 8)) for part in attention.qkv(x).chunk(3, dim=-1))
        s = 4 * attention.qkv_norm.weight.view(2, 8)
        turn = rotation(torch.arange(9), 8, 10_000.0)
        for own, part, factor in zip(attention.queries_keys_values(x), (q, k), (8 * s, s), strict=False):
            expected = factor * F.normalize(rotate(part, turn), dim=-1)
            torch.testing.assert_close(own, expected.transpose(1, 2))

    def test_hybridnorm_norms_queries_keys_and_values(self):
        model = randomize(GPT(GPTConfig(**GROUPED, scheme="hybridnorm")).double())
        attention, x = model.blocks[0].attention, torch.randn(2, 9, 16, dtype=torch.float64)
        parts = attention.qkv(x).split([16, 8, 8], dim=-1)
        norms = (attention.qkv_norm.q_norm, attention.qkv_norm.k_norm, attention.qkv_norm.v_norm)
        for own, part, norm in zip(attention.queries_keys_values(x), parts, norms, strict=True):
            expected = F.rms_norm(part.unflatten(-1, (-1, 4)), (4,), norm.weight, 1e-5)
            torch.testing.assert_close(own, expected.transpose(1, 2))

    def test_norm_reaches_every_scheme_that_has_a_choice(self):
        for name in SCHEMES:
            kinds = {}
            for norm in ("layernorm", "rmsnorm"):
                model = GPT(GPTConfig(**TINY, scheme=name, norm=norm))
                own = [m for path, m in model.named_modules() if not path.endswith("branch_norm")]
                kinds[norm] = {type(m) for m in own} & {LayerNorm, RMSNorm}
            if hasattr(model.scheme, "norm"):
                assert "rmsnorm" not in kinds or kinds["rmsnorm"] in ({RMSNorm}, set()), name
                assert kinds["layernorm"] in ({LayerNorm}, set()), name
            else:
                assert kinds["layernorm"] == kinds["rmsnorm"], name
        assert GPTConfig(
            norm="rmsnorm", scheme="pre-ln", scheme_options={"norm": "layernorm"}
        ).build_scheme().norm == ("layernorm")
        # what the scheme's own source says stays the default
        assert GPTConfig(scheme="keel").build_scheme().norm == "rmsnorm"

    def test_the_value_rows_are_those_that_deepnorm_makes_smaller(self):
        states = []
        for name in ("pre-ln", "deepnorm"):
            torch.manual_seed(0)
            states.append(GPT(GPTConfig(**GROUPED, scheme=name)).blocks[0].attention.qkv.weight)
        pre, deep = states
        assert torch.equal(deep[:-8], pre[:-8])
        torch.testing.assert_close(deep[-8:], 16**-0.25 * pre[-8:])


class TestConfig:
    def test_ngpt_without_its_scales_takes_both(self):
        options = {"inner_scales": False}
        GPTConfig(**TINY, scheme="ngpt", scheme_options=options, qk_norm=True, kv_heads=1)

    def test_documents(self):
        modern = GPTConfig.preset("modern-S", scheme="pre-ln")
        assert GPTConfig.from_dict(json.loads(json.dumps(modern.as_dict()))) == modern

    @pytest.mark.parametrize(("size", "kv_heads"), [("modern-S", 4), ("modern-M", 4), ("modern-L", 5)])
    def test_presets(self, size, kv_heads):
        modern, paper = GPTConfig.preset(size, scheme="pre-ln"), GPTConfig.preset(size[-1], scheme="pre-ln")
        assert (modern.layers, modern.heads, modern.width) == (paper.layers, paper.heads, paper.width)
        assert (modern.positions, modern.mlp, modern.norm, modern.qk_norm) == ("rope", "swiglu", "rmsnorm", True)
        assert (modern.kv_heads, modern.bias) == (kv_heads, False)
        # the gate's third matrix is made up for by a narrower hidden layer
        assert 8 / 3 * modern.width <= modern.shape.hidden < 8 / 3 * modern.width + 16
        assert GPTConfig.preset(size, kv_heads=None, qk_norm=False).kv_heads is None
