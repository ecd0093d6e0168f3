"""Schemes with a state of their own: against the code of others, how they start, and what their states keep."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import rows
from small_models import TINY, randomize, tokens
from states import state_before
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual, Inkling2RMSNorm

from spheret import GPT, SCHEMES, GPTConfig, scheme
from spheret.connections.earlier_states import Started, Sums
from spheret.connections.many_streams import Streams, cayley
from spheret.model.probes import probe

D, DEPTH = 8, 6
MANY = [name for name in SCHEMES if not scheme(name).one_stream]
STREAMS = [name for name in MANY if hasattr(scheme(name), "streams")]


def filled(module, dtype):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return module.to(dtype)


def streams_of_transformers(kind, dtype):
    """hc_eps, hc_mult and hc_magnitude have the same names in both models."""
    config = DeepseekV4Config(hidden_size=D, hc_mult=4, rms_norm_eps=1e-6)
    config.hc_magnitude = 2.0
    return filled(kind(config), dtype)


def gradients(outputs, inputs):
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
    return torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, outputs, strict=True)), inputs)


# transformers computes pre, post and comb in float32, whatever the dtype
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
class TestAgainstTransformers:
    x = rows(2 * 3 * 4, D).view(2, 3, 4, D)

    @pytest.mark.parametrize("kind", [DeepseekV4HyperConnection, HYV4HyperConnection])
    def test_a_sublayer(self, kind, dtype, tolerance, monkeypatch):
        # .float() would round float64
        monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        theirs, branch = streams_of_transformers(kind, dtype), nn.Linear(D, D).to(dtype)
        own = scheme("mhc", mix="sinkhorn" if kind is DeepseekV4HyperConnection else "identity")
        own = own.connect(D, 3, DEPTH).to(dtype)
        own.inner_norm = nn.Identity()
        weights = own.weights_norm
        weights.load_state_dict({"projection": theirs.fn.flatten(), "base": theirs.base, "scale": theirs.scale})
        x, y = (self.x.to(dtype).requires_grad_() for _ in range(2))
        # as their decoder layers write it, without the norm
        post, *comb, collapsed = theirs(y)
        residual = comb[0].transpose(-1, -2) @ y if comb else y
        got, expected = own(Streams(x), branch).x, post.unsqueeze(-1) * branch(collapsed).unsqueeze(-2) + residual
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        ours = gradients([got], [x, weights.base, weights.scale, weights.projection, branch.weight])
        them = gradients([expected], [y, theirs.base, theirs.scale, theirs.fn, branch.weight])
        for a, b in zip(ours, them, strict=True):
            torch.testing.assert_close(a.view_as(b), b, rtol=tolerance, atol=10 * tolerance)

    def test_the_exit(self, dtype, tolerance, monkeypatch):
        theirs, own = streams_of_transformers(DeepseekV4HyperHead, dtype), scheme("mhc").exit(D).to(dtype)
        own.norm = nn.Identity()
        shares = own.shares
        shares.load_state_dict(
            {"projection": theirs.hc_fn.flatten(), "base": theirs.hc_base, "scale": theirs.hc_scale}
        )
        monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        x, y = (self.x.to(dtype).requires_grad_() for _ in range(2))
        got, expected = own(Streams(x)), theirs(y)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        ours = gradients([got], [x, shares.base, shares.scale, shares.projection])
        them = gradients([expected], [y, theirs.hc_base, theirs.hc_scale, theirs.hc_fn])
        for a, b in zip(ours, them, strict=True):
            torch.testing.assert_close(a.view_as(b), b, rtol=tolerance, atol=10 * tolerance)


@pytest.fixture(scope="module")
def naive_attnres():
    """flash-linear-attention's reference: the one file, because importing its package looks for a GPU."""
    path = Path(sys.prefix) / "apart/fla/ops/attnres/naive.py"
    if not path.is_file():
        pytest.skip("make env installs fla-core")
    spec = importlib.util.spec_from_file_location("naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


@pytest.mark.parametrize("blocks", [1, 3, DEPTH])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_stack_of_attn_res_against_flash_linear_attention(naive_attnres, dtype, tolerance, blocks, monkeypatch):
    # .float() would round float64
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    torch.manual_seed(0)
    built, group = scheme("attn-res", blocks=blocks), DEPTH // blocks
    branches = nn.ModuleList(nn.Linear(D, D) for _ in range(DEPTH)).to(dtype)
    connections = nn.ModuleList(built.connect(D, sublayer, DEPTH) for sublayer in range(1, DEPTH + 1)).to(dtype)
    leave = randomize(built.exit(D).to(dtype))
    randomize(connections)
    x = rows(6, D).view(2, 3, D).to(dtype).requires_grad_()
    state = built.enter(D)(x)
    for connection, branch in zip(connections, branches, strict=True):
        state = connection(state, branch)
    got = leave(state)

    # their keys have a gain, which is a factor of our query. The first read has one value, and so no query
    gain = torch.linspace(0.5, 1.5, D, dtype=dtype)
    queries = [c.attend_norm.query for c in connections[1:]] + [leave.attend.query]
    theirs = [torch.zeros_like(gain), *((query / gain).detach().requires_grad_() for query in queries)]
    norms = [c.inner_norm for c in connections] + [leave.norm]

    def read(number, values):
        return naive_attnres(theirs[number], values, gain, norms[number].weight, rms_eps=1e-5)

    # as the forward of their TransformerBlock: a sum joins the finished ones where the next group begins
    finished, total = [], x
    for number, branch in enumerate(branches):
        f = branch(read(number, [*finished, total]))
        if number % group == 0:
            finished, total = [*finished, total], f
        else:
            total = total + f
    expected = read(DEPTH, [*finished, total])
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    shared = [x, *(norm.weight for norm in norms), *branches.parameters()]
    ours, them = gradients([got], [*shared, *queries]), gradients([expected], [*shared, *theirs[1:]])
    for number, (a, b) in enumerate(zip(ours, them, strict=True)):
        torch.testing.assert_close(a * gain if number >= len(shared) else a, b, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_separate_reads_against_inkling(dtype, tolerance, monkeypatch):
    """The inputs of attention's queries, keys and values, with their norms, as Inkling 2's full layers read them."""
    own = scheme("attn-res", blocks=3, separate=True, normed=True).connect(D, 5, DEPTH)
    own = filled(own, dtype)
    own.attend_norm.eps = 1e-6
    theirs = Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=D), num_queries=3)
    theirs = theirs.to(dtype)
    theirs.load_state_dict({"query": own.attend_norm.query.view(3, D)})
    norms = [filled(Inkling2RMSNorm(D, eps=1e-5), dtype) for _ in range(3)]
    for number, norm in enumerate(norms):
        norm.load_state_dict(own.inner_norm.norms[number].state_dict())
    state = Sums(tuple(rows(6, D, seed=seed).to(dtype).requires_grad_() for seed in range(3)))
    # .float() and .to(float32) would round float64
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: x if a == (torch.float32,) else to(x, *a, **k))
    got = own.read(state)
    *earlier, last = state.parts
    expected = torch.stack([n(x) for n, x in zip(norms, theirs(torch.stack(earlier, -2), last), strict=True)], -2)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    ours = gradients([got], [*state.parts, own.attend_norm.query, *(n.weight for n in own.inner_norm.norms)])
    them = gradients([expected], [*state.parts, theirs.query, *(n.weight for n in norms)])
    for a, b in zip(ours, them, strict=True):
        torch.testing.assert_close(a.view_as(b), b, rtol=tolerance, atol=10 * tolerance)
    # the first sublayer has one value, which all three take
    first = scheme("attn-res", separate=True).connect(D, 1, DEPTH).to(dtype)
    read = first.read(Sums(state.parts[:1]))
    assert read.shape == (6, 3, D)
    assert torch.equal(read[:, 0], read[:, 2])


def test_equal_inputs_of_queries_keys_and_values_are_one():
    """A model with separate reads starts as the one without."""
    outputs = []
    for separate in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**TINY, scheme="attn-res", scheme_options={"separate": separate})).double()
        outputs.append(model(tokens()))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_modded_nanogpts_factors():
    """x = r x + p F(norm x) + m x_0 at attention, and x = r x + p F(norm x) at the MLP."""
    branch = nn.Linear(D, D).double()
    for sublayer in (3, 4):
        connection = randomize(scheme("x0", post=True).connect(D, sublayer, DEPTH).double())
        h, start = rows(6, D), rows(6, D, seed=1)
        r, p, *m = connection.factor_norm.weights
        f = branch(nn.functional.layer_norm(h, (D,), *connection.inner_norm.parameters(), eps=1e-5))
        expected = r * h + p * f + (m[0] * start if m else 0)
        torch.testing.assert_close(connection(Started(h, start), branch).h, expected, rtol=1e-12, atol=1e-12)
    fresh = scheme("x0", post=True).connect(D, 1, DEPTH).factor_norm.weights
    assert fresh.tolist() == pytest.approx([math.sqrt(1.1), 1.0, 0.0])
    with pytest.raises(ValueError, match="falling"):
        scheme("x0", post=True, falling=True)


class TestStart:
    """With their starting weights, and the same branches, these are schemes of one stream."""

    @pytest.mark.parametrize(
        ("name", "options", "plain"),
        [
            ("denseformer", {}, "pre-ln"),
            ("x0", {"mix": 0.0}, "pre-ln"),
            ("hyper", {}, "pre-ln"),
            ("hyper", {"dynamic": False, "streams": 3}, "pre-ln"),
            ("spherical-hyper", {}, "proj-spheretnorm"),
            ("spherical-hyper", {"steady": False, "pace": 1.0}, "proj-spheretnorm"),
            ("spherical-hyper", {"streams": 2, "retraction": "cayley", "schedule": "constant"}, "cay-spheretnorm"),
        ],
    )
    def test_it_is_one_stream(self, name, options, plain):
        settings = {"schedule": "constant"} if "schedule" in options else {}
        models = []
        for each, chosen in ((name, options), (plain, settings)):
            torch.manual_seed(0)
            models.append(GPT(GPTConfig(**TINY, scheme=each, scheme_options=chosen)).double())
        # the final norm's eps counts for less beside a sum of streams
        torch.testing.assert_close(models[0](tokens()), models[1](tokens()), rtol=0, atol=1e-3)

    def test_the_starts_of_x0_fall(self):
        built = scheme("x0", falling=True)
        mixes = [built.connect_block(D, block, 4)[0].mix_norm for block in range(1, 5)]
        assert [mix.r.item() for mix in mixes] == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.05 + 0.1 / 3, 1.05])
        assert [mix.m.item() for mix in mixes] == pytest.approx([0.2, 0.15, 0.1, 0.05])

    @pytest.mark.parametrize("name", STREAMS)
    def test_the_streams_part(self, name):
        """Equal streams have unequal gradients, or they would stay equal for ever."""
        torch.manual_seed(0)
        model = GPT(GPTConfig(**{**TINY, "layers": 4}, scheme=name))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(tokens(), tokens(seed=1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = []
        with probe(model, seen.append):
            model(tokens())
        x = seen[-1].next_state.x
        assert (x - x.mean(-2, keepdim=True)).norm() > 1e-4 * x.norm()


@pytest.mark.parametrize(
    ("blocks", "counts"), [(1, [1, 2, 2, 2, 2, 2]), (3, [1, 2, 2, 3, 3, 4]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_the_groups_of_attn_res(blocks, counts):
    built = scheme("attn-res", blocks=blocks)
    states = [state_before(built, sublayer, 6, rows(2, D)) for sublayer in range(1, 7)]
    assert [len(state.parts) for state in states] == counts


class TestSphericalHyper:
    @pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0])
    def test_the_mix_is_orthogonal(self, size):
        eye = torch.eye(4, dtype=torch.float64)
        mix = cayley(size * rows(4, 4))
        torch.testing.assert_close(mix @ mix.T, eye, rtol=0, atol=1e-12)
        assert size or torch.equal(mix, eye)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_sum_of_zero_has_a_small_gradient(self, dtype):
        """Two equal streams that pre subtracts from each other: the branch reads 0, and no gradient explodes."""
        connection = scheme("spherical-hyper").connect(D, 1, DEPTH)
        with torch.no_grad():
            # pre is 2 + 0.1 * -10 = 1 at the first stream, and -1 at the second
            connection.weights_norm.pre_offset.copy_(torch.tensor([-10.0, -10.0, 0.0, 0.0]))
        x = rows(3 * 4, D).view(3, 4, D).to(dtype)
        x[0, 1] = x[0, 0]
        x.requires_grad_()
        read = connection.read(Streams(x))
        assert not read[0].any()
        gradients = torch.autograd.grad(
            read.float().sum(), (x, *connection.weights_norm.parameters()), allow_unused=True
        )
        assert all(g.abs().max() < 1e3 for g in gradients if g is not None)

    @pytest.mark.parametrize(
        ("retraction", "streams"), [("projection", 2), ("cayley", 4), ("exponential", 2), (0.3, 4)]
    )
    def test_the_norm_of_all_streams_is_constant_over_many_sublayers(self, retraction, streams):
        options = {"streams": streams, "steady": streams == 2, "retraction": retraction, "schedule": "constant"}
        built, depth = scheme("spherical-hyper", **options), 300
        state = built.enter(D).double()(rows(3, D))
        start = state.x.flatten(1).norm(dim=-1)
        for sublayer in range(1, depth + 1):
            connection = randomize(built.connect(D, sublayer, depth).double())
            state = connection.write(state, 3 * rows(3, D, seed=sublayer))
            assert (state.x.flatten(1).norm(dim=-1) / start - 1).abs().max() < 1e-12
            assert (connection.stream(state).norm(dim=-1) <= start * (1 + 1e-12)).all()


class TestWrongStates:
    @pytest.mark.parametrize("name", STREAMS)
    def test_a_different_number_of_streams(self, name):
        other, built = scheme(name, streams=3).enter(D)(rows(2, D).float()), scheme(name)
        connection = built.connect(D, 1, DEPTH)
        calls = (lambda: connection(other, torch.tanh), lambda: connection.write(other, torch.ones(2, D)))
        for call in (*calls, lambda: connection.read(other), lambda: built.exit(D)(other)):
            with pytest.raises(ValueError, match="4 streams"):
                call()
        with pytest.raises(ValueError, match="streams"):
            scheme(name, streams=1)

    @pytest.mark.parametrize("name", ["attn-res", "denseformer"])
    def test_sublayers_out_of_order(self, name):
        state = state_before(scheme(name), 5, DEPTH, rows(2, D))
        for sublayer in (1, 3):
            connection = scheme(name).connect(D, sublayer, DEPTH)
            for call in (lambda c=connection: c.read(state), lambda c=connection: c.write(state, rows(2, D))):
                with pytest.raises(ValueError, match=f"sublayer {sublayer}"):
                    call()


def test_a_model_compiles_with_recompute():
    """The state is a tuple that grows."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY, scheme="attn-res", recompute=True))
    batch = tokens(), tokens(seed=1)
    losses, grads = [], []
    torch.compiler.reset()
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        losses.append(call(*batch))
        losses[-1].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*losses)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_state_is_tensors_alone():
    """Hooks of FSDP, checkpoints and probes look for tensors in it."""
    for name in MANY:
        state = state_before(scheme(name), 3, DEPTH, rows(2, D))
        assert all(isinstance(x, torch.Tensor) and x.shape[0] == 2 and x.shape[-1] == D for x in tree_leaves(state))
        assert math.isfinite(sum(x.sum().item() for x in tree_leaves(state)))
