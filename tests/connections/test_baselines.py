"""Each baseline against someone else's code, or against a second, literal statement of its formula."""

import math
from dataclasses import FrozenInstanceError

import geoopt
import pytest
import torch
import torch.nn.functional as F
import x_transformers.x_transformers as xt
from oracle import definition, rows
from states import assert_same, state_before, to
from torch import nn
from torch.utils._pytree import tree_leaves

from spheret import SCHEMES, retract, scheme
from spheret.connections import BranchShape, norms

D, N = 12, 6
DEPTH = 2 * N


def randomize(module):
    """Random weights, which reveal a swapped or forgotten tensor."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape, generator=generator))
    return module.double()


def assert_equal(got, truth):
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-ln", "post-ln"])
def test_blocks_equal_torch_transformer_encoder_layer(norm_first):
    layer = nn.TransformerEncoderLayer(
        D, 3, 4 * D, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    layer = layer.double().train()
    built = scheme("pre-ln" if norm_first else "post-ln")
    attention, mlp = (randomize(built.connect(D, l, DEPTH)) for l in (1, 2))
    for connection, norm in ((attention, layer.norm1), (mlp, layer.norm2)):
        own = connection.inner_norm if norm_first else connection.outer_norm
        norm.load_state_dict(own.state_dict())
    x = rows(2 * 5, D).view(2, 5, D)
    h = attention(x, lambda y: layer.self_attn(y, y, y, need_weights=False)[0])
    h = mlp(h, lambda y: layer.linear2(F.gelu(layer.linear1(y))))
    assert_equal(h, layer(x))


class TestAgainstXTransformers:
    x = rows(6, D)

    def test_dynamic_tanh(self):
        own, other = randomize(norms.DynamicTanh(D)), xt.DynamicTanh(D).double()
        other.load_state_dict({"pre_tanh_scale": own.a[0], "gamma": own.weight, "beta": own.bias})
        assert_equal(own(self.x), other(self.x))

    def test_dynamic_erf(self):
        own, other = randomize(norms.DynamicErf(D)), xt.Derf(D).double()
        other.load_state_dict({"alpha": own.a[0], "s": own.shift[0], "gamma": own.weight, "beta": own.bias})
        assert_equal(own(self.x), other(self.x))

    def test_scalenorm(self):
        own, other = randomize(norms.PlainScaleNorm(D)), xt.ScaleNorm(D).double()
        other.load_state_dict({"g": own.g / math.sqrt(D)})
        assert_equal(own(self.x), other(self.x))

    def test_rmsnorm(self):
        own, other = randomize(norms.RMSNorm(D, eps=0.0)), xt.RMSNorm(D).double()
        other.load_state_dict({"g": own.weight})
        assert_equal(own(self.x), other(self.x))

    def test_orthogonal_residual(self):
        own, f = randomize(scheme("orthogonal").connect(D, 1, DEPTH)), rows(6, D, seed=1)
        assert_equal(own.write(self.x, f), xt.OrthogonalResidualUpdate(D)(f, self.x))

    def test_layerscale(self):
        own = randomize(scheme("layerscale").connect(D, 1, DEPTH))
        branch = nn.Linear(D, D).double()
        other = xt.LayerScale(branch, D).double()
        other.load_state_dict({"gamma": own.output_norm.weight}, strict=False)
        assert_equal(own(self.x, branch), self.x + other(own.inner_norm(self.x)))


@pytest.mark.parametrize(("retraction", "method"), [("exponential", "expmap"), ("projection", "retr")])
def test_retractions_equal_geoopt_on_the_unit_sphere(retraction, method):
    sphere = geoopt.Sphere()
    h, f = F.normalize(rows(8, D), dim=-1), rows(8, D, seed=1)
    v = 0.7 * sphere.proju(h, f)
    assert_equal(retract(h, f, 0.7, retraction), getattr(sphere, method)(h, v))


# the published formulas, written with torch's own norms and without a module of this library


def ln(x, m):
    return F.layer_norm(x, (D,), m.weight, m.bias, 1e-5)


def rms(x, m):
    return F.rms_norm(x, (D,), m.weight, 1e-5)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def first_attention_or_mlp(c, h, branch):
    y = h + branch(rms(h, c.inner_norm))
    return y if c.sublayer == 1 else rms(y, c.outer_norm)


def ngpt(c, h, branch):
    rate = (0.05 * math.sqrt(D) * c.norm.a).abs()
    return unit(h + rate * (unit(branch(h)) - h))


def geonorm_affine(c, h, branch):
    f, cap = branch(h), math.pi / 4
    e1 = unit(h)
    z = f - (e1 * f).sum(-1, keepdim=True) * e1
    theta = (z.norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True)).clamp(max=cap)
    t = ((theta * c.norm.s + c.norm.b) / math.ceil(c.sublayer / 2)).clamp(max=cap)
    return t.cos() * h + h.norm(dim=-1, keepdim=True) * t.sin() * unit(z)


def x0(c, state, branch):
    h, start = state
    x = c.mix_norm.r * h + c.mix_norm.m * start if c.sublayer % 2 else h
    return x + branch(ln(x, c.inner_norm)), start


def denseformer(c, state, branch):
    h, blocks = state
    x = h + branch(ln(h, c.inner_norm))
    if c.sublayer % 2:
        return x, blocks
    outputs = torch.stack([*blocks, x])
    return torch.einsum("i,ibd->bd", c.average_norm.weights, outputs), (*blocks, x)


def attn_res(c, state, branch):
    values = torch.stack(state.parts)
    h = state.parts[0]
    if c.sublayer > 1:
        keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + 1e-5)
        weights = torch.einsum("d,ibd->ib", c.attend_norm.query, keys).softmax(0)
        h = torch.einsum("ib,ibd->bd", weights, values)
    f = branch(rms(h, c.inner_norm))
    # 12 sublayers in 8 groups: two each
    if c.sublayer % 2:
        return (*state.parts, f)
    return (*state.parts[:-1], state.parts[-1] + f)


def hyper(c, state, branch):
    """Algorithm 2 of arXiv 2409.19606: alpha is (pre, mix^T)."""
    (x,), static, dynamic = state, c.weights_norm.static, c.weights_norm.dynamic
    w = dynamic.projection.view(D, 6)
    moved = torch.tanh(ln(x, c.weights_norm.norm) @ w)
    pre, mix, post = static.weights.split([4, 16, 4])
    alpha = torch.cat([pre[:, None], mix.view(4, 4).T], 1) + dynamic.scale[0] * moved[..., :5]
    beta = post + dynamic.scale[1] * moved[..., 5]
    mixed = alpha.transpose(-1, -2) @ x
    f = branch(ln(mixed[..., 0, :], c.inner_norm))
    return torch.einsum("bi,bd->bid", beta, f) + mixed[..., 1:, :]


def mhc(c, state, branch):
    (x,), own = state, c.weights_norm
    r = x.flatten(1) / torch.sqrt(x.flatten(1).square().mean(-1, keepdim=True) + 1e-6)
    pre, post, comb = (r @ own.projection.view(24, 4 * D).T).split([4, 4, 16], -1)
    of_pre, of_post, of_comb = own.base.split([4, 4, 16])
    pre = torch.sigmoid(own.scale[0] * pre + of_pre) + 1e-6
    post = 2 * torch.sigmoid(own.scale[1] * post + of_post)
    comb = torch.softmax((own.scale[2] * comb + of_comb).view(-1, 4, 4), -1) + 1e-6
    for step in range(20):
        comb = comb if step == 0 else comb / (comb.sum(2, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    f = branch(rms(torch.einsum("bi,bid->bd", pre, x), c.inner_norm))
    return torch.einsum("bji,bjd->bid", comb, x) + torch.einsum("bi,bd->bid", post, f)


def spherical_hyper(c, state, branch):
    (x,), own = state, c.weights_norm
    pre = 2 * torch.eye(4, dtype=x.dtype)[(c.sublayer - 1) % 4] + 0.1 * own.pre_offset.to(x.dtype)
    read = torch.einsum("i,bid->bd", pre, x)
    f = branch(read * (x.flatten(1).norm(dim=-1) / read.norm(dim=-1))[:, None])
    # a tenth of A, in the space that is orthogonal to equal streams
    P = torch.eye(4, dtype=x.dtype) - 0.25
    A = P @ (0.1 * own.skew.view(4, 4).to(x.dtype)) @ P
    S = A - A.T
    O = torch.linalg.inv(torch.eye(4) + S) @ (torch.eye(4) - S)
    post = 1 + 0.1 * own.post_offset.to(x.dtype)
    along = torch.einsum("i,bd->bid", post / post.norm(), f)
    alpha = torch.clamp(F.softplus(c.norm.a), max=1.0) / math.sqrt(c.sublayer)
    return definition((O @ x).flatten(1), along.flatten(1), alpha, 1.0, None)[0].view(x.shape)


def spherical(c, h, branch, p, cap, factor, norm=lambda f: f):
    alpha = factor * torch.clamp(F.softplus(c.norm.a), max=1.0)
    return definition(h, norm(branch(h)), alpha, p, cap)[0]


def normed(c, h, branch):
    # torch's own RMSNorm
    weight = c.norm.branch_norm.weight
    return spherical(
        c, h, branch, 1.0, None, 1 / math.sqrt(c.sublayer), lambda f: F.rms_norm(f, (D,), weight, eps=2.0**-23)
    )


FORMULAS = {
    "residual": lambda c, h, F_: h + F_(h),
    "pre-ln": lambda c, h, F_: h + F_(ln(h, c.inner_norm)),
    "post-ln": lambda c, h, F_: ln(h + F_(h), c.outer_norm),
    "pre-dyt": lambda c, h, F_: h + F_(c.inner_norm.weight * torch.tanh(c.inner_norm.a * h) + c.inner_norm.bias),
    "derf": lambda c, h, F_: (
        h + F_(c.inner_norm.weight * torch.erf(c.inner_norm.a * h + c.inner_norm.shift) + c.inner_norm.bias)
    ),
    "dyisru": lambda c, h, F_: h + F_(c.inner_norm.weight * math.sqrt(D) * h / torch.sqrt(c.inner_norm.b + h**2)),
    "peri-ln": lambda c, h, F_: h + ln(F_(ln(h, c.inner_norm)), c.output_norm),
    "keel": lambda c, h, F_: (
        first_attention_or_mlp(c, h, F_)
        if c.sublayer < 3
        else rms(2 * N * h + F_(rms(h, c.inner_norm)), c.outer_norm)
    ),
    "lns": lambda c, h, F_: h + F_(ln(h, c.inner_norm.norm) / math.sqrt(math.ceil(c.sublayer / 2))),
    # N // 4 = 1 block of Post-LN
    "mix-ln": lambda c, h, F_: ln(h + F_(h), c.outer_norm) if c.sublayer <= 2 else h + F_(ln(h, c.inner_norm)),
    "deepnorm": lambda c, h, F_: ln((2 * N) ** 0.25 * h + F_(h), c.outer_norm),
    "rezero": lambda c, h, F_: h + c.output_norm.weight * F_(h),
    "layerscale": lambda c, h, F_: h + c.output_norm.weight * F_(ln(h, c.inner_norm)),
    "ngpt": ngpt,
    "orthogonal": lambda c, h, F_: (
        lambda f: h + f - (f * h).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    )(F_(ln(h, c.inner_norm))),
    "scalenorm": lambda c, h, F_: h + F_(c.inner_norm.g * h / h.norm(dim=-1, keepdim=True)),
    "beam": lambda c, h, F_: (
        math.sqrt(c.sublayer / (c.sublayer + 1)) * h
        + rms(F_(rms(h, c.inner_norm)), c.output_norm) / math.sqrt(c.sublayer + 1)
    ),
    "vp-gate": lambda c, h, F_: (
        lambda b: (1 - b**2).sqrt() * h + b * torch.nn.functional.rms_norm(F_(rms(h, c.inner_norm)), (D,), eps=1e-5)
    )(c.gate_norm.weight.sigmoid()),
    "res-post": lambda c, h, F_: h + rms(F_(h), c.output_norm),
    # Y = X + MHA(X), then FFN(RMS Y) + RMS Y
    "hybridnorm": lambda c, h, F_: rms(h + F_(h), c.outer_norm) if c.sublayer % 2 else h + F_(h),
    "residual-multiplier": lambda c, h, F_: h + 0.22 * F_(rms(h, c.inner_norm)),
    "geonorm": lambda c, h, F_: spherical(c, h, F_, math.inf, math.pi / 4, 1 / c.sublayer),
    "proj-spheretnorm": lambda c, h, F_: spherical(c, h, F_, 1.0, None, 1 / math.sqrt(c.sublayer)),
    "cay-spheretnorm": lambda c, h, F_: spherical(c, h, F_, 2.0, math.pi / 4, 1 / math.sqrt(c.sublayer)),
    "p-spheretnorm": lambda c, h, F_: spherical(c, h, F_, 0.5, None, 1 / math.sqrt(c.sublayer)),
    "normed-spheretnorm": normed,
    "geonorm-affine": geonorm_affine,
    "x0": x0,
    "denseformer": denseformer,
    "attn-res": attn_res,
    "hyper": hyper,
    "mhc": mhc,
    "spherical-hyper": spherical_hyper,
}


def test_no_scheme_is_without_a_formula():
    assert set(FORMULAS) == set(SCHEMES)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_sublayer_computes_its_published_formula(name):
    branch = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    for layer in range(1, DEPTH + 1):
        connection = randomize(scheme(name).connect(D, layer, DEPTH))
        state = state_before(scheme(name), layer, DEPTH, rows(6, D))
        got, truth = connection(state, branch), FORMULAS[name](connection, state, branch)
        for x, y in zip(tree_leaves(got), tree_leaves(truth), strict=True):
            assert_equal(x, y)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_sublayers_of_a_block_are_counted_from_1(name):
    attention, mlp = scheme(name).connect_block(D, 2, N)
    assert (attention.sublayer, attention.num_sublayers) == (3, 2 * N)
    assert (mlp.sublayer, mlp.num_sublayers) == (4, 2 * N)
    assert (attention.dim, mlp.dim) == (D, D)


def test_a_scale_of_2_is_a_scale():
    """deepnorm's (2N)^(1/4) at 8 blocks."""
    h, f = rows(6, D), rows(6, D, seed=1)
    connection = randomize(scheme("deepnorm").connect(D, 1, 16))
    assert_equal(connection.write(h, f), ln(2 * h + f, connection.outer_norm))


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", SCHEMES)
def test_updates_of_half_rows_are_those_of_float32_rounded_once(name, dtypes):
    stream, branch = (getattr(torch, dtype) for dtype in dtypes)
    for sublayer in (3, 4):
        h = to(state_before(scheme(name), sublayer, DEPTH, rows(40, D).float()), stream)
        f = rows(40, D, seed=1).to(branch)
        connection = randomize(scheme(name).connect(D, sublayer, DEPTH)).float()
        assert_same(connection.write(h, f), to(connection.write(to(h, torch.float32), f.float()), stream))


@pytest.mark.parametrize("name", SCHEMES)
def test_half_parameters_are_widened_before_they_are_used(name):
    for sublayer in (3, 4):
        h, f = state_before(scheme(name), sublayer, DEPTH, rows(40, D).float()), rows(40, D, seed=1).float()
        connection = randomize(scheme(name).connect(D, sublayer, DEPTH)).bfloat16()
        halves = connection.read(h), connection.write(h, f)
        connection.float()
        assert torch.equal(halves[0], connection.read(h))
        assert_same(halves[1], connection.write(h, f))


def test_norms_have_a_bias_unless_it_is_left_out():
    for name in ("pre-ln", "pre-dyt", "derf"):
        for options in ({}, {"bias": True}, {"bias": False}):
            built = scheme(name, **options)
            for norm in (built.connect(D, 1, DEPTH).inner_norm, built.exit(D)):
                assert (norm.bias is not None) == options.get("bias", True)


def test_the_first_option_may_be_given_by_position():
    assert type(scheme("pre-ln"))("rmsnorm").norm == "rmsnorm"


def test_keel_with_layernorms():
    """The other reading of Keel: the same places and scales, with LayerNorm for every RMSNorm."""
    h, branch = rows(6, D), nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    for layer in range(1, DEPTH + 1):
        connection = randomize(scheme("keel", norm="layernorm").connect(D, layer, DEPTH))
        scale = 1 if layer < 3 else 2 * N
        expected = scale * h + branch(ln(h, connection.inner_norm))
        assert_equal(connection(h, branch), expected if layer == 1 else ln(expected, connection.outer_norm))
    assert scheme("keel").norm == "rmsnorm"
    assert scheme("keel", norm="layernorm", bias=False).connect(D, 2, DEPTH).outer_norm.bias is None


class TestEntryAndExit:
    x = rows(6, D)

    def parts(self, name, d=D, **options):
        built = scheme(name, **options)
        return built.enter(d).double(), built.exit(d).double()

    def test_nothing_happens_at_most_entries_and_a_layernorm_at_most_exits(self):
        for name in ("residual", "pre-ln", "peri-ln", "lns", "mix-ln", "layerscale", "orthogonal"):
            enter, leave = self.parts(name)
            assert torch.equal(enter(self.x), self.x)
            assert_equal(leave(self.x), F.layer_norm(self.x, (D,), eps=1e-5))

    def test_no_final_norm(self):
        for name in ("post-ln", "keel", "deepnorm", "rezero"):
            enter, leave = self.parts(name)
            assert torch.equal(leave(enter(self.x)), self.x)

    @pytest.mark.parametrize(
        ("name", "final"),
        [
            ("pre-dyt", torch.tanh),
            ("derf", torch.erf),
            ("dyisru", lambda x: math.sqrt(D) * x / torch.sqrt(D + x**2)),
        ],
    )
    def test_pointwise_norms_scale_the_embeddings_and_replace_the_final_norm(self, name, final):
        enter, leave = self.parts(name)
        torch.testing.assert_close(enter(self.x), math.sqrt(D) * self.x, rtol=1e-6, atol=0)
        assert [p.numel() for p in enter.parameters()] == [1]
        assert_equal(leave(self.x), final(self.x))

    def test_scalenorm_replaces_the_final_norm(self):
        enter, leave = self.parts("scalenorm")
        assert torch.equal(enter(self.x), self.x)
        torch.testing.assert_close(leave(self.x), math.sqrt(D) * unit(self.x), rtol=1e-6, atol=0)

    def test_derf_slope(self):
        for slope, options in ((1.0, {}), (0.5, {"slope": 0.5})):
            built = scheme("derf", **options)
            starts = [built.connect(D, l, 2).inner_norm.a.item() for l in (1, 2)] + [built.exit(D).a.item()]
            assert starts == [slope] * 3

    @pytest.mark.parametrize(
        ("width", "attention", "other"),
        [
            (768, 1.0, 1.0),
            (1024, 1.0, 1.0),
            (1025, 1.0, 0.5),
            (2048, 1.0, 0.5),
            (2049, 0.8, 0.2),
            (4096, 0.8, 0.2),
            (4097, 0.6, 0.15),
            (5120, 0.6, 0.15),
            (5121, 0.2, 0.05),
        ],
    )
    def test_dyt_slopes_by_width(self, width, attention, other):
        built = scheme("pre-dyt")
        slopes = [built.connect(width, l, 4).inner_norm.a.item() for l in (1, 2, 3, 4)]
        assert slopes == pytest.approx([attention, other] * 2)
        assert built.exit(width).a.item() == pytest.approx(other)
        assert scheme("pre-dyt", slope=0.3).exit(width).a.item() == pytest.approx(0.3)

    def test_dyisru_has_rmsnorms_slope_at_0(self):
        small = 1e-6 * self.x
        torch.testing.assert_close(norms.DynamicISRU(D).double()(small), small, rtol=1e-9, atol=0)

    def test_ngpt(self):
        enter, leave = self.parts("ngpt")
        assert_equal(enter(self.x), unit(self.x))
        assert torch.equal(leave(self.x), self.x)
        # one scale of all logits in place of one per logit
        leave = self.parts("ngpt", inner_scales=False)[1]
        torch.testing.assert_close(leave(self.x), self.x, rtol=1e-7, atol=0)
        assert [p.item() for p in leave.parameters()] == pytest.approx([1 / math.sqrt(D)])

    def test_spherical(self):
        enter, leave = self.parts("proj-spheretnorm")
        torch.testing.assert_close(enter(self.x), math.sqrt(D) * unit(self.x), rtol=1e-6, atol=1e-6)
        assert_equal(leave(self.x), F.layer_norm(self.x, (D,), eps=1e-5))
        enter, leave = self.parts("proj-spheretnorm", entry_norm=False, final_norm=False)
        assert torch.equal(leave(enter(self.x)), self.x)


class TestInitialisation:
    def test_most_take_nanogpts(self):
        for name in set(SCHEMES) - {"lns", "deepnorm"}:
            init = scheme(name).initialisation(DEPTH)
            assert (init.output, init.value, init.hidden) == (1 / math.sqrt(2 * N), 1, 1)

    def test_a_record_is_constant(self):
        with pytest.raises(FrozenInstanceError):
            scheme("pre-ln").initialisation(DEPTH).output = 2.0

    def test_the_others(self):
        assert scheme("lns").initialisation(DEPTH).output == 1
        init = scheme("deepnorm").initialisation(DEPTH)
        assert init.output == init.value == init.hidden == pytest.approx((8 * N) ** -0.25)

    @pytest.mark.parametrize(("blocks", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
    def test_layerscale_by_depth(self, blocks, start):
        assert scheme("layerscale").connect(D, 1, 2 * blocks).output_norm.weight.tolist() == pytest.approx(
            [start] * D
        )

    def test_rezero_starts_as_the_identity(self):
        x = rows(6, D).float()
        assert torch.equal(scheme("rezero").connect(D, 1, DEPTH)(x, nn.Linear(D, D)), x)

    def test_a_block_of_rezero_shares_one_step(self):
        attention, mlp = scheme("rezero").connect_block(D, 2, N)
        assert [p.tolist() for p in attention.parameters()] == [[0.0]]
        assert not list(mlp.parameters())
        assert not mlp.state_dict()
        attention.output_norm.weight.data.fill_(0.3)
        h, f = rows(6, D).float(), rows(6, D, seed=1).float()
        for connection in (attention, mlp):
            torch.testing.assert_close(connection.write(h, f), h + 0.3 * f)
        mlp.write(h, attention.write(h, f)).sum().backward()
        # h + a (h + a f)
        assert attention.output_norm.weight.grad.item() == pytest.approx((h + 0.6 * f).sum().item(), rel=1e-5)

    def test_ngpt_step(self):
        connection = scheme("ngpt").connect(D, 1, DEPTH).double()
        h, f = unit(rows(6, D)), rows(6, D, seed=1)
        torch.testing.assert_close(connection.write(h, f), unit(0.95 * h + 0.05 * unit(f)), rtol=1e-6, atol=1e-7)


def test_most_schemes_add_nothing_inside_the_branches():
    shape = BranchShape(D, 2, 2, 4 * D)
    for name in set(SCHEMES) - {"ngpt"}:
        built = scheme(name)
        assert built.inside_attention(shape, 1, DEPTH) is None or name == "hybridnorm"
        assert built.inside_mlp(shape, 2, DEPTH) is None
        assert built.logit_gain(D, 50) is None


def test_ngpt_weight_normalisation_is_an_option():
    reading, writing = rows(5, D).float(), rows(D, 5).float()
    before = reading.clone()
    scheme("ngpt", normalize_weights=False).constrain([reading], [writing])
    assert torch.equal(reading, before)
    scheme("ngpt").constrain([reading], [writing])
    torch.testing.assert_close(reading.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(writing.norm(dim=0), torch.ones(5))
