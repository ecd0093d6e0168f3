import ast
import copy
import json
import math
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from small_models import TINY, randomize, tokens
from torch import nn

from spheret import GPT, SCHEMES, GPTConfig
from spheret.hub.gpt2 import to_gpt2
from spheret.model.probes import probe

SPHERICAL = ("geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm")

PRE_LN = {"S": 124_475_904, "M": 354_871_296, "L": 774_090_240}


class TestSize:
    @pytest.mark.parametrize("size", PRE_LN)
    def test_the_papers_parameters(self, size):
        with torch.device("meta"):
            counts = {
                name: GPT(GPTConfig.preset(size, scheme=name)).parameter_count()
                for name in ("pre-ln", "peri-ln", *SPHERICAL)
            }
        assert counts["pre-ln"] == PRE_LN[size]
        fewer = {"S": 36_839, "M": 98_255, "L": 184_247}[size]
        assert {PRE_LN[size] - counts[name] for name in SPHERICAL} == {fewer}
        assert counts["peri-ln"] - PRE_LN[size] == {"S": 36_864, "M": 98_304, "L": 184_320}[size]


class TestInitialisation:
    def test_spread(self):
        for width, expected in ((16, 0.02 * math.sqrt(48)), (768, 0.02), (1024, 0.02)):
            model = GPT(GPTConfig(layers=1, heads=2, width=width, block=8, vocab=500, scheme="pre-ln"))
            for weight, factor in (
                (model.tokens.weight, 1),
                (model.blocks[0].mlp.hidden.weight, 1),
                (model.blocks[0].mlp.output.weight, 1 / math.sqrt(2)),
            ):
                assert weight.std().item() == pytest.approx(expected * factor, rel=0.1)
            assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))

    def test_the_same_draws_for_every_scheme(self):
        states = {}
        for name in SCHEMES:
            torch.manual_seed(0)
            states[name] = GPT(GPTConfig(**TINY, scheme=name)).state_dict()
        for name, state in states.items():
            for key in ("tokens.weight", "positions.weight"):
                drawn = states["pre-ln"][key]
                if (name, key) == ("ngpt", "tokens.weight"):
                    torch.testing.assert_close(state[key], F.normalize(drawn))
                else:
                    assert torch.equal(state[key], drawn)
        deep, pre = states["deepnorm"], states["pre-ln"]
        small = 16**-0.25
        key = "blocks.1.attention.qkv.weight"
        assert torch.equal(deep[key][:32], pre[key][:32])
        torch.testing.assert_close(deep[key][32:], small * pre[key][32:])
        torch.testing.assert_close(states["lns"]["blocks.1.mlp.output.weight"], 2 * pre["blocks.1.mlp.output.weight"])


class TestReset:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_from_the_meta_device(self, name):
        config = GPTConfig(**{**TINY, "head_bias": "zero"}, scheme=name)
        fresh = GPT(config)
        with torch.device("meta"):
            model = GPT(config)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        torch.manual_seed(3)
        model.reset_parameters()
        for key, p in fresh.state_dict().items():
            if p.dim() < 2:
                assert torch.equal(model.state_dict()[key], p), key
        torch.manual_seed(3)
        fresh.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
        spread = model.blocks[0].mlp.output.weight.std().item()
        drawn = 0.02 * math.sqrt(48) * fresh.scheme.initialisation(4).output
        # columns of nGPT's weight are unit vectors of 16 entries
        assert spread == pytest.approx(1 / 4 if name == "ngpt" else drawn, rel=0.1)

    def test_a_unigram_bias_starts_at_0_again(self):
        model = GPT(GPTConfig(**{**TINY, "head_bias": "unigram"}), torch.arange(1.0, 51))
        model.reset_parameters()
        assert (model.head_bias == 0).all()


class TestAgainstOthers:
    @pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=str)
    def test_pre_ln_is_transformers_gpt2(self, activation, dtype, tolerance):
        model = randomize(GPT(GPTConfig(**TINY, scheme="pre-ln", activation=activation)).to(dtype))
        other = to_gpt2(model).to(dtype).eval()
        x, y = tokens(), tokens(seed=1)
        logits, truth = model(x), other(x).logits
        assert (logits - truth).abs().max() <= tolerance * truth.abs().max()
        loss, truth = model(x, y), F.cross_entropy(other(x).logits.flatten(0, 1), y.flatten())
        assert abs(loss - truth) <= tolerance * truth
        loss.backward()
        truth.backward()
        pairs = [
            (model.tokens.weight, other.transformer.wte.weight),
            (model.positions.weight, other.transformer.wpe.weight),
            (model.blocks[0].attention.qkv.weight, other.transformer.h[0].attn.c_attn.weight),
            (model.blocks[1].mlp.hidden.bias, other.transformer.h[1].mlp.c_fc.bias),
            (model.blocks[0].attention_connection.inner_norm.weight, other.transformer.h[0].ln_1.weight),
            (model.final_norm.bias, other.transformer.ln_f.bias),
        ]
        for mine, its in pairs:
            truth_grad = its.grad.T if its.grad.shape != mine.grad.shape else its.grad
            assert (mine.grad - truth_grad).norm() <= 1e-4 * truth_grad.norm()

    def test_post_ln_blocks_are_torch_encoder_layers(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="post-ln")).double())
        h = torch.randn(2, 9, 16, dtype=torch.float64)
        mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
        for block in model.blocks:
            layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True).double()
            layer.self_attn.in_proj_weight.data, layer.self_attn.in_proj_bias.data = (
                block.attention.qkv.weight, block.attention.qkv.bias,
            )  # fmt: skip
            for torch_part, part in (
                (layer.self_attn.out_proj, block.attention.output),
                (layer.linear1, block.mlp.hidden),
                (layer.linear2, block.mlp.output),
                (layer.norm1, block.attention_connection.outer_norm),
                (layer.norm2, block.mlp_connection.outer_norm),
            ):
                torch_part.load_state_dict(part.state_dict())
            torch.testing.assert_close(block(h), layer(h, src_mask=mask), rtol=1e-10, atol=1e-10)


class TestGeneration:
    def test_top_k_and_top_p(self):
        from spheret.model.sampling import choose

        logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(2000, 1)
        generator = torch.Generator().manual_seed(0)
        assert set(choose(logits, 1.0, 2, None, generator).flatten().tolist()) == {0, 1}
        # 0.64 + 0.24 = 0.88: the set that holds 0.8 has two tokens
        assert set(choose(logits, 1.0, None, 0.8, generator).flatten().tolist()) == {0, 1}
        assert set(choose(logits, 1.0, None, 0.5, generator).flatten().tolist()) == {0}
        frequency = (choose(logits, 1.0, None, None, generator) == 0).float().mean()
        assert frequency == pytest.approx(0.644, abs=0.04)

    def test_seed_and_mode(self):
        model = GPT(GPTConfig(**TINY, dropout=0.5)).train()
        one, two = (model.generate(tokens(1, 4), 8, seed=1) for _ in range(2))
        assert torch.equal(one, two)
        assert model.training
        model.blocks[0].eval()
        model.generate(tokens(1, 4), 2)
        assert [block.training for block in model.blocks] == [False, True]
        assert model.generate(tokens(1, 4), 0).shape == (1, 4)

    @pytest.mark.parametrize("smallest", [{"top_p": 1e-308}, {"temperature": 1e-6}])
    def test_the_smallest_choice_is_the_likeliest_token(self, smallest):
        model, prompt = randomize(GPT(GPTConfig(**TINY))), tokens(2, 5)
        assert torch.equal(model.generate(prompt, 8, **smallest), model.generate(prompt, 8, temperature=0))


class TestCitizenship:
    @pytest.mark.parametrize(
        ("name", "head"),
        [
            ("pre-ln", "tied"),
            ("proj-spheretnorm", "shifted"),
            ("geonorm", "untied"),
            ("rezero", "tied"),
            ("ngpt", "tied"),
        ],
    )
    def test_compiles_into_one_graph(self, name, head):
        model = randomize(GPT(GPTConfig(**{**TINY, "layers": 1, "head": head}, scheme=name)))
        x, y = tokens(), tokens(seed=1)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        parameters, losses = list(model.parameters()), (compiled(x, y), model(x, y))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        for got, truth in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_recompute_is_bitwise_the_same(self, name):
        losses = []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = GPT(GPTConfig(**TINY, scheme=name, recompute=recompute, dropout=0.1))
            torch.manual_seed(1)
            loss = model(tokens(), tokens(seed=1))
            loss.backward()
            losses.append((loss, *(p.grad for p in model.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))

    def test_save_and_load_without_pickle(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="p-spheretnorm", scheme_options={"learnable_p": True})))
        config = json.loads(json.dumps(model.config.as_dict()))
        twin = GPT(GPTConfig.from_dict(config))
        twin.load_state_dict(load(save(model.state_dict())))
        assert torch.equal(twin(tokens()), model(tokens()))
        assert torch.equal(copy.deepcopy(model)(tokens()), model(tokens()))


class TestProbes:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_what_is_seen_is_what_happened(self, name):
        model = randomize(GPT(GPTConfig(**TINY, scheme=name)).double())
        seen = []
        with probe(model, seen.append):
            first = model(tokens())
        assert [s.number for s in seen] == [1, 2, 3, 4]
        for sublayer in seen:
            torch.testing.assert_close(sublayer.next_state, sublayer.connection.write(sublayer.state, sublayer.f))
            torch.testing.assert_close(sublayer.f, sublayer.branch(sublayer.connection.read(sublayer.state)))
            assert sublayer.h.shape == sublayer.out.shape == sublayer.f.shape
            cosine = F.cosine_similarity(sublayer.h, sublayer.out, dim=-1)
            torch.testing.assert_close(sublayer.angle.cos().double(), cosine, rtol=0, atol=1e-6)
        weights = seen[0].attention
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert (weights.triu(1) == 0).all()
        value = seen[0].branch.queries_keys_values(seen[0].branch_input)[2]
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(seen[0].branch.output(mixed), seen[0].f)
        assert seen[1].attention is None
        torch.testing.assert_close(model(tokens()), first)
        assert len(seen) == 4


def test_unigram_counts_start_the_bias():
    bias = GPT(GPTConfig(**{**TINY, "head_bias": "unigram"}), torch.tensor([3.0, 0.0, 1.0])).head_bias.detach()
    assert bias.exp().sum().item() == pytest.approx(1)
    assert (bias[0] - bias[2]).item() == pytest.approx(math.log(3))


def test_the_model_names_one_scheme_and_that_is_the_default():
    named = [
        (file.name, node.value)
        for file in files("spheret.model").iterdir()
        if file.name.endswith(".py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in SCHEMES
    ]
    assert named == [("config.py", GPTConfig().scheme)]
