"""Every scheme of the table works with the features of torch: dtypes, autocast, transforms, compile, pickle."""

import copy
import math
import pickle
from dataclasses import fields

import pytest
import torch
from oracle import rows
from safetensors.torch import load, save
from small_models import randomize
from states import assert_same
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

import spheret
from spheret import RETRACTIONS, SCHEMES, Connection, parameter_groups, scheme
from spheret.kernels import use

D, DEPTH = 8, 4
# options that change what is built, on top of the table's defaults
VARIANTS = [
    *((name, {}) for name in SCHEMES),
    ("p-spheretnorm", {"learnable_p": True}),
    ("proj-spheretnorm", {"inner_norm": True, "final_norm": False, "entry_norm": False, "index": "block"}),
    ("cay-spheretnorm", {"exact_clamp": True, "schedule": "linear", "max_angle": None}),
    ("proj-spheretnorm", {"learnable_alpha": False, "alpha": 0.5, "radius": 2.0}),
    ("pre-ln", {"norm": "rmsnorm", "bias": False}),
    ("ngpt", {"inner_scales": False}),
    ("hyper", {"dynamic": False, "streams": 2}),
    ("attn-res", {"blocks": 2, "normed": True}),
    ("x0", {"post": True}),
    ("mhc", {"mix": "identity"}),
    ("spherical-hyper", {"steady": False, "pace": 1.0}),
]


class Stack(nn.Module):
    """A stream of DEPTH sublayers with small nonlinear branches, as a user would write it."""

    def __init__(self, name, depth=DEPTH, **options):
        super().__init__()
        built = scheme(name, **options)
        self.enter, self.exit = built.enter(D), built.exit(D)
        self.connections = nn.ModuleList(built.connect(D, sublayer, depth) for sublayer in range(1, depth + 1))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(depth))

    def states(self, x):
        """The state before every connection, and the last one."""
        states = [self.enter(x)]
        for connection, branch in zip(self.connections, self.branches, strict=True):
            states.append(connection(states[-1], branch))
        return states

    def forward(self, x):
        return self.exit(self.states(x)[-1])


def variant_name(variant):
    name, options = variant
    return "-".join([name, *options])


@pytest.fixture(params=VARIANTS, ids=variant_name)
def stack(request):
    name, options = request.param
    return Stack(name, **options)


def check_one_graph(variant):
    """Values and gradients of a compiled stack. Two sublayers are enough: a graph of more repeats them."""
    name, options = variant
    stack = Stack(name, depth=2, **options)
    x = rows(6, D).float().requires_grad_()
    plain = stack(x)
    (truth,) = torch.autograd.grad(plain.square().sum(), x)
    torch.compiler.reset()
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    out = compiled(x)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_compiles_into_one_graph(variant):
    check_one_graph(variant)


@pytest.mark.parametrize("variant", [("geonorm", {}), ("p-spheretnorm", {"learnable_p": True})], ids=variant_name)
def test_the_closed_form_compiles_into_one_graph(variant):
    # on a CPU the native kernel is used unless the closed form is chosen
    with use("closed"):
        check_one_graph(variant)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TestCitizenship:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtype_in_is_dtype_out_and_the_arithmetic_is_float32(self, stack, dtype):
        x = rows(6, D).to(dtype)
        got = stack.to(dtype)(x)
        assert got.dtype == dtype
        truth = stack.double()(x.double())
        # the tolerance allows a few roundings of the stream to its own dtype
        torch.testing.assert_close(got.double(), truth, rtol=0, atol=60 * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_part_keeps_the_streams_dtype_for_any_branch_and_parameter_dtype(self, stack, dtype):
        stack.branches.to(dtype)
        states = stack.states(rows(6, D).to(dtype))
        assert stack.exit(states[-1]).dtype == dtype
        for connection, state in zip(stack.connections, states, strict=False):
            assert connection.read(state).dtype == connection.stream(state).dtype == dtype
            for branch in DTYPES:
                written = connection.write(state, rows(6, D, seed=1).to(branch))
                assert {x.dtype for x in tree_leaves(written)} == {dtype}

    def test_autocast(self, stack):
        x = rows(6, D).float()
        with torch.autocast("cpu", torch.bfloat16):
            out = stack(x)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, stack(x), rtol=0, atol=0.2)
        out.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in stack.parameters())

    def test_any_leading_shape_and_memory_layout(self, stack):
        x = rows(24, D).float()
        flat = stack(x)
        for shape in ((24,), (4, 6), (2, 3, 4)):
            torch.testing.assert_close(stack(x.view(*shape, D)).view(24, D), flat)
        assert stack(x[:0]).shape == (0, D)
        torch.testing.assert_close(stack(x[3]), flat[3])
        transposed = x.t().contiguous().t()
        assert not transposed.is_contiguous()
        torch.testing.assert_close(stack(transposed), flat)
        torch.testing.assert_close(stack(x[:1].expand(5, D)), flat[:1].expand(5, D))
        strided = torch.stack([x, -x], -1)[..., 0]
        torch.testing.assert_close(stack(strided), flat)

    def test_meta_device(self, stack):
        assert stack.to("meta")(torch.empty(3, D, device="meta")).shape == (3, D)

    def test_gradients(self, stack):
        x = rows(2, D).requires_grad_()
        stack.double()
        assert torch.autograd.gradcheck(stack, (x,), check_forward_ad=True, check_batched_grad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(stack, (x,), fast_mode=True, atol=1e-4)

    def test_func_transforms(self, stack):
        x, v = rows(3, D), rows(3, D, seed=1)
        stack.double()
        jacobian = torch.func.vmap(torch.func.jacrev(stack))(x)
        pushed = torch.func.jvp(stack, (x,), (v,))[1]
        torch.testing.assert_close(pushed, (jacobian @ v.unsqueeze(-1)).squeeze(-1), rtol=1e-9, atol=1e-11)
        (pulled,) = torch.func.vjp(stack, x)[1](v)
        torch.testing.assert_close(pulled, (v.unsqueeze(-2) @ jacobian).squeeze(-2), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.func.vmap(stack)(x), stack(x), rtol=1e-12, atol=1e-12)

    def test_state_round_trip_and_deepcopy(self, stack):
        x = rows(6, D).float()
        with torch.no_grad():
            for p in stack.parameters():
                p.add_(0.1 * torch.randn_like(p))
        twin = copy.deepcopy(stack)
        assert torch.equal(twin(x), stack(x))
        # spawned processes receive their models this way
        assert torch.equal(pickle.loads(pickle.dumps(stack))(x), stack(x))
        for p in twin.parameters():
            torch.nn.init.zeros_(p)
        twin.load_state_dict(load(save(stack.state_dict())))
        assert torch.equal(twin(x), stack(x))

    def test_every_parameter_learns_and_none_is_a_scalar_that_fsdp_refuses(self, stack):
        stack.double()
        # rezero's branches get no gradient while every step is 0, and streams that are equal have none that tells
        # them apart, so move the parameters a little, each by another amount
        with torch.no_grad():
            for p in stack.parameters():
                p.mul_(0.9).sub_(torch.linspace(0.01, 0.02, p.numel()).view_as(p))
        stack(rows(6, D)).pow(3).sum().backward()
        for name, p in stack.named_parameters():
            assert p.dim() >= 1, name
            assert p.grad is not None, name
            assert p.grad.abs().max() > 0, name

    def test_nan_is_never_masked(self, stack):
        x = rows(6, D).float()
        x[2, 3] = math.nan
        out = stack(x)
        assert out[2].isnan().any()
        assert out[:2].isfinite().all()
        assert out[3:].isfinite().all()


@pytest.mark.parametrize(
    "name", [name if name == "proj-spheretnorm" else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_inductor(name):
    # weights that start at 0 would hide a wrong gradient
    stack = randomize(Stack(name, depth=2))
    x = rows(6, D).float().requires_grad_()
    torch.compiler.reset()
    out, plain = torch.compile(stack, fullgraph=True)(x), stack(x)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    inputs = [x, *stack.parameters()]
    got, truth = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, plain))
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, b.abs().max().item()))


def test_every_scheme_has_a_formula_of_its_own():
    assert len({scheme(name).formula for name in spheret.list_schemes()}) == len(SCHEMES)
    assert scheme("geonorm").source.startswith("Zheng")
    assert scheme("p-spheretnorm", retraction=RETRACTIONS["angular"]).formula == scheme("p-spheretnorm").formula
    assert "learned p" in scheme("proj-spheretnorm", learnable_p=True).formula
    assert dir(spheret) == sorted(spheret.__all__)


@pytest.mark.parametrize("name", SCHEMES)
class TestTable:
    def test_parts(self, name):
        built = scheme(name)
        assert built.name == name
        assert built.source
        assert type(built).__doc__
        assert isinstance(built.connect(D, 1, 2), Connection)
        init = built.initialisation(24)
        assert 0 < init.output <= 1
        assert 0 < init.value <= 1

    def test_forward_is_write_of_branch_of_read(self, name):
        stack = Stack(name).double()
        for connection, branch, state in zip(
            stack.connections, stack.branches, stack.states(rows(5, D)), strict=False
        ):
            out = connection(state, branch)
            assert_same(out, connection.write(state, branch(connection.read(state))))
            assert connection.stream(out).shape == (5, D)
            # without its sublayer the state is one that the next connection takes
            assert tree_structure(connection.skip(state)) == tree_structure(out)

    def test_bad_rows(self, name):
        built = scheme(name)
        connection, state = built.connect(D, 1, 4), built.enter(D)(torch.ones(3, D))
        with pytest.raises(ValueError, match="same shape"):
            connection.write(state, torch.ones(2, D))
        with pytest.raises(ValueError, match="width 8"):
            connection.write(built.enter(9)(torch.ones(3, 9)), torch.ones(3, 9))
        with pytest.raises(TypeError, match="floating-point"):
            connection.write(state, torch.ones(3, D).long())

    def test_a_state_of_another_scheme_is_refused(self, name):
        stack, x = Stack(name), rows(3, D).float()
        own = type(stack.enter(x))
        for other in SCHEMES:
            state = scheme(other).enter(D)(x)
            if type(state) is own:
                continue
            for call in (lambda state: stack.connections[0](state, torch.tanh), stack.exit):
                # an exit that does nothing passes on what it gets
                if not isinstance(call, nn.Identity):
                    with pytest.raises(TypeError, match=own.__name__):
                        call(state)

    def test_zero_rows_stay_finite(self, name):
        stack = Stack(name)
        x = rows(4, D).float()
        x[1] = 0
        x.requires_grad_()
        out = stack(x)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad.isfinite().all()


def test_parameter_groups_keep_every_scalar_gain_and_bias_from_decaying():
    for name, options in VARIANTS:
        model = Stack(name, **options)
        model.tied = model.branches[0]
        decay, keep = parameter_groups(model, 0.1)
        assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
        assert {id(p) for p in decay["params"]} == {id(b[0].weight) for b in model.branches}
        assert len(decay["params"]) + len(keep["params"]) == len(list(model.parameters()))
        torch.optim.AdamW([decay, keep], lr=1e-3)
    frozen = Stack("pre-ln").requires_grad_(False)
    assert all(not group["params"] for group in parameter_groups(frozen, 0.1))
    with pytest.raises(ValueError, match="weight_decay"):
        parameter_groups(frozen, -1)


@pytest.mark.parametrize("name", SCHEMES)
def test_an_option_must_have_the_type_that_its_scheme_declares(name):
    built = scheme(name)
    for field in fields(built):
        if field.name == "name":
            continue
        with pytest.raises(ValueError, match=field.name):
            scheme(name, **{field.name: [1]})
        # what a scheme has, it also takes; p and retraction exclude each other
        value = getattr(built, field.name)
        if (field.name, value) != ("retraction", None):
            assert scheme(name, **{field.name: value}) == built
    with pytest.raises(ValueError, match="name"):
        scheme(name, name="x")
