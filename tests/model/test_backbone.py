"""The options of the backbone: against transformers' Llama, Qwen3 and Granite, and in products with each other."""

import itertools
import json
import math

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
from spheret.hub.llama import tensors
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

    def test_its_blocks_keep_less_than_transformers(self):
        """Also with the norms of queries and keys, which Llama does not have."""
        kept = {}
        for name in ("llama", "qwen3"):
            for each in pair(name, torch.float32):
                seen = {}
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t, seen=seen: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
                ):
                    out = each.stream(tokens()) if isinstance(each, GPT) else each.model(tokens()).last_hidden_state
                assert out.requires_grad
                own = {p.untyped_storage().data_ptr() for p in each.parameters()}
                sizes = (t.untyped_storage().nbytes() for place, t in seen.items() if place not in own)
                kept[name, isinstance(each, GPT)] = sum(sizes)
        assert kept["qwen3", True] < 0.95 * kept["llama", False]
        assert kept["llama", True] < 0.9 * kept["llama", False] < kept["qwen3", False]

    def test_the_rotation_is_transformers_bit_for_bit(self):
        _, other = pair("llama", torch.float32)
        positions = torch.arange(1000)
        cos, sin = other.model.rotary_emb(torch.zeros(1), positions[None])
        for own, its in zip(rotation(positions, 4, 10_000.0), (cos, sin), strict=True):
            assert torch.equal(own[:, :, 0], its[..., :2])


# products that make sense; every scheme meets most options below
PRODUCTS = [
    dict(zip(("positions", "mlp", "norm", "qk_norm", "kv_heads", "bias"), values, strict=True))
    for values in itertools.product(
        ("learned", "rope"), ("gelu", "swiglu", "relu2"), ("layernorm", "rmsnorm"), (False, True), (None, 1, 2),
        (False, True),
    )
][::7]  # fmt: skip


class TestProducts:
    @pytest.mark.parametrize("options", PRODUCTS, ids=lambda o: "-".join(map(str, o.values())))
    def test_the_model_is_what_its_options_say(self, options):
        """The same function in plain torch, from the weights."""
        model = randomize(GPT(GPTConfig(**{**TINY, "heads": 4, **options}, scheme="pre-ln")).double())
        x = tokens(2, 9)
        torch.testing.assert_close(model(x), plain_logits(model, x), rtol=1e-9, atol=1e-9)

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

    def test_recompute_autocast_and_left_padding(self):
        config = {**GROUPED, "scheme": "pre-ln", **LLAMA, "qk_norm": True, "dropout": 0.1}
        losses = []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = GPT(GPTConfig(**config, recompute=recompute))
            torch.manual_seed(1)
            loss = model(tokens(), tokens(seed=1))
            loss.backward()
            losses.append((loss, *(p.grad for p in model.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            half = model(tokens(), tokens(seed=1))
        assert half.item() == pytest.approx(model(tokens(), tokens(seed=1)).item(), rel=2e-2)
        model = randomize(model).double()
        prompt = tokens(1, 6)
        padded = torch.cat([torch.zeros(1, 3).long(), prompt], dim=1)
        alone = model.generate(prompt, 6, temperature=0)
        assert torch.equal(model.generate(padded, 6, temperature=0, padding=torch.tensor([3]))[:, 3:], alone)


def plain_logits(model, x):
    """A pre-ln GPT of any backbone in torch's functions."""
    c = model.config
    heads, kv, d = c.heads, c.kv_heads or c.heads, c.width // c.heads

    def norm(h, m):
        if c.norm == "rmsnorm":
            return F.rms_norm(h, h.shape[-1:], m.weight, 1e-5)
        return F.layer_norm(h, h.shape[-1:], m.weight, m.bias, 1e-5)

    def split(y, number):
        return y.unflatten(-1, (number, d)).transpose(1, 2)

    def turn(y):
        """Complex multiplication by exp(i position base^(-2j/d)), in the float32 angles of the model."""
        position = torch.arange(y.shape[2]).float()[:, None]
        angle = position * (1.0 / 10_000 ** (torch.arange(0, d, 2).float() / d))
        pairs = torch.complex(y[..., : d // 2], y[..., d // 2 :])
        turned = pairs * torch.complex(angle.cos(), angle.sin()).to(torch.complex128)
        return torch.cat([turned.real, turned.imag], dim=-1)

    h = model.tokens.weight[x]
    if c.positions == "learned":
        h = h + model.positions.weight[: x.shape[1]]
    future = torch.full((x.shape[1],) * 2, -math.inf, dtype=h.dtype).triu(1)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        y = F.linear(norm(h, block.attention_connection.inner_norm), attention.qkv.weight, attention.qkv.bias)
        q, k, v = y.split([heads * d, kv * d, kv * d], dim=-1)
        q, k, v = split(q, heads), split(k, kv), split(v, kv)
        if c.qk_norm:
            q = F.rms_norm(q, (d,), attention.qkv_norm.q_norm.weight, 1e-5)
            k = F.rms_norm(k, (d,), attention.qkv_norm.k_norm.weight, 1e-5)
        if c.positions == "rope":
            q, k = turn(q), turn(k)
        k, v = (z.repeat_interleave(heads // kv, dim=1) for z in (k, v))
        mixed = (q @ k.mT / math.sqrt(d) + future).softmax(-1) @ v
        h = h + F.linear(mixed.transpose(1, 2).flatten(2), attention.output.weight, attention.output.bias)
        u = F.linear(norm(h, block.mlp_connection.inner_norm), mlp.hidden.weight, mlp.hidden.bias)
        if c.mlp == "swiglu":
            gate, rest = u.chunk(2, dim=-1)
            u = gate * torch.sigmoid(gate) * rest
        else:
            u = F.gelu(u) if c.mlp == "gelu" else u.clamp(min=0) ** 2
        h = h + F.linear(u, mlp.output.weight, mlp.output.bias)
    return norm(h, model.final_norm) @ model.tokens.weight.T


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
                kinds[norm] = {type(m) for m in model.modules()} & {LayerNorm, RMSNorm}
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
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"positions": "rotary"}, "unknown positions 'rotary'"),
            ({"mlp": "swishglu"}, "Did you mean 'swiglu'"),
            ({"norm": "rms"}, "Did you mean 'rmsnorm'"),
            ({"kv_heads": 3, "heads": 4}, "heads 4 is not divisible by kv_heads 3: kv_heads may be 1, 2 or 4"),
            ({"kv_heads": 0}, "kv_heads must be a positive integer"),
            ({"kv_heads": 2.0}, "kv_heads must be a positive integer"),
            ({"positions": "rope", "width": 6, "heads": 2}, "turns pairs of entries, and a head of width/heads = 3"),
            ({"rope_base": 500.0}, "rope_base 500 is of positions = rope, and these are learned"),
            ({"positions": "rope", "rope_base": 0.0}, "rope_base must be above 0"),
            (
                {"mlp": "swiglu", "activation": "gelu_tanh"},
                "activation gelu_tanh is of mlp = gelu, and this is swiglu",
            ),
            ({"scheme": "ngpt", "qk_norm": True}, "qk_norm norms the queries and keys, and ngpt norms them itself"),
            ({"scheme": "hybridnorm", "qk_norm": True}, "hybridnorm norms them itself"),
            ({"scheme": "ngpt", "kv_heads": 1}, "kv_heads must be heads = 2, got 1"),
        ],
    )
    def test_wrong_combinations(self, changes, message):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**{**TINY, **changes})

    def test_ngpt_without_its_scales_takes_both(self):
        options = {"inner_scales": False}
        GPTConfig(**TINY, scheme="ngpt", scheme_options=options, qk_norm=True, kv_heads=1)

    def test_documents(self):
        plain = GPTConfig(**TINY, scheme="pre-ln").as_dict()
        assert not {"positions", "rope_base", "mlp", "norm", "qk_norm", "kv_heads"} & plain.keys()
        modern = GPTConfig.preset("modern-S", scheme="pre-ln")
        assert GPTConfig.from_dict(json.loads(json.dumps(modern.as_dict()))) == modern
        assert "rope_base" not in modern.as_dict()

    @pytest.mark.parametrize(("size", "kv_heads"), [("modern-S", 4), ("modern-M", 4), ("modern-L", 5)])
    def test_presets(self, size, kv_heads):
        modern, paper = GPTConfig.preset(size, scheme="pre-ln"), GPTConfig.preset(size[-1], scheme="pre-ln")
        assert (modern.layers, modern.heads, modern.width) == (paper.layers, paper.heads, paper.width)
        assert (modern.positions, modern.mlp, modern.norm, modern.qk_norm) == ("rope", "swiglu", "rmsnorm", True)
        assert (modern.kv_heads, modern.bias) == (kv_heads, False)
        # the gate's third matrix is made up for by a narrower hidden layer
        assert 8 / 3 * modern.width <= modern.shape.hidden < 8 / 3 * modern.width + 16
        assert GPTConfig.preset(size, kv_heads=None, qk_norm=False).kv_heads is None
