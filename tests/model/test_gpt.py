import ast
import copy
import json
import math
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from small_models import TINY, randomize, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from spheret import GPT, PAPER_SCHEMES, SCHEMES, GPTConfig, connections, parameter_groups
from spheret.connections.euclidean import NormedConnection, Residual
from spheret.data import prepare
from spheret.model.gpt import Attention
from spheret.model.probes import probe

SPHERICAL = ("geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm")

PRE_LN = {"S": 124_475_904, "M": 354_871_296, "L": 774_090_240}


class TestSize:
    @pytest.mark.parametrize("size", PRE_LN)
    def test_parameters(self, size):
        with torch.device("meta"):
            counts = {name: GPT(GPTConfig.preset(size, scheme=name)).parameter_count() for name in SCHEMES}
        layers, _, width = {"S": (12, 12, 768), "M": (24, 16, 1024), "L": (36, 20, 1280)}[size]
        pre, sublayers = PRE_LN[size], 2 * layers
        assert counts["pre-ln"] == pre
        assert {pre - counts[name] for name in SPHERICAL} == {{"S": 36_839, "M": 98_255, "L": 184_247}[size]}
        assert counts["peri-ln"] - pre == {"S": 36_864, "M": 98_304, "L": 184_320}[size]
        norms = sublayers * 2 * width
        expected = {
            "residual": -norms,
            "post-ln": -2 * width,
            "keel": -norms - 2 * width + (2 * sublayers - 1) * width,
            "pre-dyt": sublayers + 2,
            "derf": 2 * (sublayers + 1) + 1,
            "dyisru": (sublayers + 1) * (1 - width) + 1,
            "lns": 0,
            "mix-ln": 0,
            "deepnorm": -2 * width,
            # one step per block
            "rezero": -norms - 2 * width + layers,
            "layerscale": sublayers * width,
            # steps, s_qk and s_u per block, and s_z
            "ngpt": -norms - 2 * width + layers * (2 + 1 + 4) * width + 50_304,
            "orthogonal": 0,
            "scalenorm": (sublayers + 1) * (1 - 2 * width),
            # RMSNorms have no bias
            "beam": -width,
            "res-post": -(sublayers + 1) * width,
            # three norms of heads of 64
            "hybridnorm": layers * (width + 3 * 64) - (2 * sublayers + 1) * width,
            "residual-multiplier": -(sublayers + 1) * width,
            # s and b per sublayer, and the final RMSNorm alone
            "geonorm-affine": 2 * sublayers - norms - width,
            # r and m per block
            "x0": 2 * layers,
            # block b has b + 1 weights
            "denseformer": layers * (layers + 3) // 2,
            # RMSNorms, and a query per sublayer but the first, and at the exit
            "attn-res": -(sublayers + 1) * width + sublayers * width,
            # pre, mix, post, the norm, W and two scales
            "hyper": sublayers * (4 + 16 + 4 + 2 * width + 6 * width + 2),
            # RMSNorms, 24 rows of 4 streams, 24 biases and 3 scales; 4 rows, 4 biases and a scale at the exit
            "mhc": -(sublayers + 1) * width + sublayers * (24 * 4 * width + 27) + 16 * width + 5,
            # a step, pre, post and A per sublayer; the radius, and the weights at the exit
            "spherical-hyper": sublayers * (1 + 4 + 4 + 16) - norms + 1 + 4,
        }
        assert {name: counts[name] - pre for name in expected} == expected
        assert set(expected) | {"pre-ln", "peri-ln", *SPHERICAL} == set(SCHEMES)

    def test_learned_p_adds_one_parameter_per_sublayer(self):
        plain, learned = (
            GPT(GPTConfig(**TINY, scheme="p-spheretnorm", scheme_options={"learnable_p": p})) for p in (False, True)
        )
        assert learned.parameter_count() - plain.parameter_count() == 4

    def test_without_bias(self):
        model = GPT(GPTConfig(**TINY, scheme="pre-ln", bias=False))
        assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


class _Counted(TorchDispatchMode):
    """Counts the ops that run inside it, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_gradients_of_queries_keys_and_values_are_put_together_in_one_pass():
    attention = Attention(GPTConfig(**TINY))
    y = attention(torch.randn(2, 8, TINY["width"], requires_grad=True))
    with _Counted() as ops:
        y.backward(torch.ones_like(y))
    # the three are joined, and nothing is copied to another order of its dimensions
    assert ops.counts["cat"] + ops.counts["stack"] == 1
    assert not ops.counts["clone"]
    assert not ops.counts["copy_"]


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

    def test_the_first_branch_of_derf_reads_entries_of_usual_size(self):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=1, heads=2, width=64, block=24, vocab=500, scheme="derf"))
        seen = []
        with probe(model, seen.append):
            model(tokens(vocab=500))
        # erf of a normal variable of standard deviation 0.02 sqrt(2) sqrt(768)
        assert seen[0].branch_input.std().item() == pytest.approx(0.61, abs=0.02)

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
        config = GPTConfig(**TINY, scheme=name, head_bias="zero")
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
        model = GPT(GPTConfig(**TINY, head_bias="unigram"), torch.arange(1.0, 51))
        model.reset_parameters()
        assert (model.head_bias == 0).all()


def as_gpt2(model):
    """transformers' GPT-2 with the weights of a Pre-LN model."""
    c = model.config
    config = GPT2Config(
        vocab_size=c.vocab, n_positions=c.block, n_embd=c.width, n_layer=c.layers, n_head=c.heads,
        activation_function="gelu_new" if c.activation == "gelu_tanh" else "gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    other = GPT2LMHeadModel(config).to(model.tokens.weight.dtype)
    state = {"wte.weight": model.tokens.weight, "wpe.weight": model.positions.weight}
    state |= {f"ln_f.{k}": v for k, v in model.final_norm.state_dict().items()}
    for i, block in enumerate(model.blocks):
        parts = {
            "attn.c_attn": block.attention.qkv,
            "attn.c_proj": block.attention.output,
            "mlp.c_fc": block.mlp.hidden,
            "mlp.c_proj": block.mlp.output,
        }
        for name, linear in parts.items():
            state[f"h.{i}.{name}.weight"], state[f"h.{i}.{name}.bias"] = linear.weight.T, linear.bias
        for name, connection in (("ln_1", block.attention_connection), ("ln_2", block.mlp_connection)):
            state |= {f"h.{i}.{name}.{k}": v for k, v in connection.inner_norm.state_dict().items()}
    other.transformer.load_state_dict(state, strict=True)
    other.tie_weights()
    return other.eval()


class TestAgainstOthers:
    @pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=str)
    def test_pre_ln_is_transformers_gpt2(self, activation, dtype, tolerance):
        model = randomize(GPT(GPTConfig(**TINY, scheme="pre-ln", activation=activation)).to(dtype))
        other = as_gpt2(model)
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

    def test_the_other_gelu_shows(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="pre-ln")).double())
        wrong = GPT(GPTConfig(**TINY, scheme="pre-ln", activation="gelu_tanh")).double()
        wrong.load_state_dict(model.state_dict())
        assert (model(tokens()) - wrong(tokens())).abs().max() > 1e-4

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


def test_a_scheme_is_added_without_touching_the_model(monkeypatch):
    @dataclass(frozen=True)
    class Half(Residual):
        def connect(self, dim, sublayer, num_sublayers):
            return NormedConnection(dim, sublayer, num_sublayers, scale=0.5)

    monkeypatch.setitem(connections.SCHEMES, "half", Half)
    model = GPT(GPTConfig(**TINY, scheme="half"))
    seen = []
    with probe(model, seen.append):
        model(tokens())
    for sublayer in seen:
        torch.testing.assert_close(sublayer.out, 0.5 * sublayer.h + sublayer.f)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The train and validation bytes of `sotu`."""
    data = prepare("sotu", "bytes", tmp_path_factory.mktemp("sotu") / "data")
    streams = (data.stream(split).window(0, data.tokens(split)) for split in ("train", "val"))
    return [torch.from_numpy(ids.astype("int64")) for ids in streams]


def batch(data, size, block, generator):
    starts = torch.randint(len(data) - block - 1, (size,), generator=generator)
    windows = torch.stack([data[s : s + block + 1] for s in starts])
    return windows[:, :-1], windows[:, 1:]


# the test after this one trains every scheme in the quick suite
@pytest.mark.parametrize(
    "name", [name if name in PAPER_SCHEMES else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_every_scheme_learns(name, text):
    train, val = text
    config = GPTConfig(layers=2, heads=4, width=64, block=64, vocab=257, scheme=name, head_bias="unigram")
    model = GPT(config, torch.bincount(train, minlength=257))
    # one learning rate for all methods: high, after a short warm-up
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    held_out = batch(val, 64, 64, torch.Generator().manual_seed(1))
    for step in range(200):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3 * min(1, (step + 1) / 40)
        loss = model(*batch(train, 8, 64, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.constrain()
        if step >= 79 and step % 20 == 19:
            with torch.no_grad():
                validation = model(*held_out)
            if validation < 2.7:
                return
    pytest.fail(f"{name} has validation loss {validation:.3f} after 200 steps")


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_overfits_a_batch(name, text):
    generator = torch.Generator().manual_seed(0)
    x, y = batch(text[0], 2, 24, generator)
    config = GPTConfig(layers=4, heads=4, width=64, block=24, vocab=257, scheme=name, head_bias="unigram")
    model = GPT(config, torch.bincount(x.flatten(), minlength=257))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=3e-3, betas=(0.9, 0.95))
    for _ in range(300):
        loss = model(x, y)
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"{name} still has loss {loss.item():.3f} on one batch")


class TestGeneration:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_the_cache_changes_nothing(self, name):
        model = randomize(GPT(GPTConfig(**TINY, scheme=name)).double())
        prompt = tokens(3, 5)
        greedy = model.generate(prompt, 15, temperature=0)
        assert greedy.shape == (3, 20)
        assert torch.equal(greedy, model.generate(prompt, 15, temperature=0, cached=False))
        sampled = model.generate(prompt, 15, temperature=0.8, top_k=20, top_p=0.9, seed=3)
        assert torch.equal(
            sampled, model.generate(prompt, 15, temperature=0.8, top_k=20, top_p=0.9, seed=3, cached=False)
        )
        assert torch.equal(sampled[:, :5], prompt)

    def test_beyond_the_block(self):
        model = randomize(GPT(GPTConfig(**TINY)).double())
        long = model.generate(tokens(2, 20), 12, temperature=0)
        assert torch.equal(long, model.generate(tokens(2, 20), 12, temperature=0, cached=False))

    def test_batched_is_one_by_one(self):
        model = randomize(GPT(GPTConfig(**TINY)).double())
        prompts = tokens(3, 5)
        alone = torch.cat([model.generate(p[None], 10, temperature=0) for p in prompts])
        assert torch.equal(model.generate(prompts, 10, temperature=0), alone)

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

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tokens": torch.zeros(1, 0).long()}, "at least one token"),
            ({"temperature": -1.0}, "temperature"),
            ({"temperature": math.nan}, "temperature"),
            ({"temperature": math.inf}, "temperature"),
            ({"temperature": 1e-308}, "temperature"),
            ({"top_k": 0}, "top_k"),
            ({"top_p": 0.0}, "top_p"),
            ({"new": -1}, "new"),
            ({"tokens": torch.full((1, 3), 50)}, "token 50 lies outside the vocabulary of 50"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            GPT(GPTConfig(**TINY)).generate(**{"tokens": tokens(1, 3), "new": 2, **arguments})


class TestCitizenship:
    @pytest.mark.parametrize("name", ["pre-ln", "proj-spheretnorm", "geonorm"])
    def test_compiles_into_one_graph(self, name):
        model = randomize(GPT(GPTConfig(**TINY, scheme=name)))
        x, y = tokens(), tokens(seed=1)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-5, atol=1e-5)
        compiled(x, y).backward()
        got = model.tokens.weight.grad.clone()
        model.zero_grad()
        model(x, y).backward()
        torch.testing.assert_close(got, model.tokens.weight.grad, rtol=1e-3, atol=1e-5)

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

    @pytest.mark.parametrize("name", SCHEMES)
    def test_autocast(self, name):
        model = GPT(GPTConfig(**TINY, scheme=name))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(), tokens(seed=1))
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(model(tokens(), tokens(seed=1)).item(), rel=2e-2)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_save_and_load_without_pickle(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="p-spheretnorm", scheme_options={"learnable_p": True})))
        config = json.loads(json.dumps(model.config.as_dict()))
        twin = GPT(GPTConfig.from_dict(config))
        twin.load_state_dict(load(save(model.state_dict())))
        assert torch.equal(twin(tokens()), model(tokens()))
        assert torch.equal(copy.deepcopy(model)(tokens()), model(tokens()))
        with pytest.raises(ValueError, match="Did you mean 'width'"):
            GPTConfig.from_dict({"widht": 3})

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("name", SPHERICAL)
    def test_the_stream_keeps_its_radius(self, name, autocast):
        model = GPT(GPTConfig(layers=6, heads=2, width=32, block=24, vocab=50, scheme=name))
        seen = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), probe(model, seen.append):
            model(tokens())
        radius = model.entry_norm.radius.item()
        assert len(seen) == 12
        for sublayer in seen:
            assert (sublayer.out.norm(dim=-1) / radius - 1).abs().max() < 1e-5


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

    def test_nothing_stays_hooked_after_an_error(self):
        model = GPT(GPTConfig(**TINY))

        def fail(sublayer):
            raise RuntimeError("seen enough")

        with pytest.raises(RuntimeError, match="seen enough"), probe(model, fail):
            model(tokens())
        assert not any(m._forward_hooks for m in model.modules())


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 15}, "width 15 is not divisible by heads 2: heads may be 1, 3, 5 or 15"),
            ({"layers": 0}, "layers must be a positive integer"),
            ({"dropout": 1.0}, "dropout"),
            ({"activation": "relu"}, "unknown activation"),
            ({"head_bias": "unigrams"}, "Did you mean 'unigram'"),
            ({"scheme": "preln"}, "Did you mean 'pre-ln'"),
            ({"scheme_options": {"schedul": 1}}, "Did you mean 'schedule'"),
        ],
    )
    def test_config(self, changes, message):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**{**TINY, **changes})

    def test_preset(self):
        with pytest.raises(ValueError, match="unknown size"):
            GPTConfig.preset("XL")
        assert GPTConfig.preset("M", block=128).block == 128

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (tokens(1, 25), "between 1 and block = 24 tokens fit, got 25"),
            (torch.zeros(1, 0).long(), "between 1 and block"),
            (torch.full((1, 3), 50), "token 50 lies outside the vocabulary of 50"),
            (torch.full((1, 3), -1), "token -1 lies outside"),
            (torch.zeros(3).long(), r"\(batch, time\) integers"),
            (torch.zeros(1, 3), r"\(batch, time\) integers"),
        ],
    )
    def test_tokens(self, x, message):
        with pytest.raises(ValueError, match=message):
            GPT(GPTConfig(**TINY))(x)

    def test_counts(self):
        counts = torch.tensor([3.0, 0.0, 1.0])
        model = GPT(GPTConfig(**TINY, head_bias="unigram"), counts)
        bias = model.head_bias.detach()
        assert bias.exp().sum().item() == pytest.approx(1)
        assert (bias[0] - bias[2]).item() == pytest.approx(math.log(3))
        with pytest.raises(ValueError, match="counts are for"):
            GPT(GPTConfig(**TINY), counts)
        with pytest.raises(ValueError, match="up to 50 numbers"):
            GPT(GPTConfig(**TINY, head_bias="unigram"), torch.ones(51))


def test_the_model_names_one_scheme_and_that_is_the_default():
    named = [
        (file.name, node.value)
        for file in files("spheret.model").iterdir()
        if file.name.endswith(".py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in SCHEMES
    ]
    assert named == [("config.py", GPTConfig().scheme)]
