"""Connections as PyTorch modules: device, dtype, reset_parameters, channel_dim, Bounded, and helpful errors."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from oracle import rows
from states import assert_same, state_before
from torch import nn

import spheret
from spheret import SCHEMES, Bounded, Connection, ScaleNorm, SpheretNorm, connections, scheme
from spheret.bounds import inverse_softplus
from spheret.connections import (
    BoundedScalar,
    BranchShape,
    angle_between,
    base,
    earlier_states,
    euclidean,
    geonorm_affine,
    many_streams,
    ngpt,
    norms,
    spherical,
)
from spheret.model.monitor import on_bound

D, DEPTH = 8, 4
# arguments of every class with parameters of its own
MODULES = {
    norms.LayerNorm: {"dim": D},
    norms.RMSNorm: {"dim": D},
    norms.DynamicTanh: {"dim": D, "slope": 0.7},
    norms.DynamicErf: {"dim": D, "slope": 0.7},
    norms.DynamicISRU: {"dim": D},
    norms.PlainScaleNorm: {"dim": D},
    norms.ScaleNorm: {"dim": D},
    norms.Gain: {"size": D, "start": 0.1, "fixed": 3.0},
    ngpt.NGPTNorm: {"dim": D},
    ngpt.QueryKeyNorm: {"dim": D, "heads": 2},
    spherical.SpheretNorm: {"dim": D, "sublayer": 2, "retraction": 0.5, "learnable_p": True},
    geonorm_affine.AffineGeoNorm: {"block": 2},
    earlier_states.StartMix: {"mix": 0.1},
    earlier_states.DepthWeights: {"count": 3},
    earlier_states.Attend: {"dim": D, "count": 3},
    many_streams.HyperWeights: {"streams": 3, "sublayer": 2},
    many_streams.TokenWeights: {"dim": D, "streams": 3},
    many_streams.ManifoldWeights: {"dim": D, "streams": 3, "sublayer": 2},
    many_streams.Gates: {"dim": D, "streams": 3},
    many_streams.StreamShares: {"streams": 3, "start": 0.5},
    many_streams.SphericalHyperWeights: {"streams": 3, "sublayer": 2},
}
# a buffer is all that it has
WITHOUT_PARAMETERS = {base.BranchWarmup}


def classes(base):
    """The classes of connections/ that derive from `base`."""
    homes = (base, norms, euclidean, ngpt, spherical, geonorm_affine, earlier_states, many_streams)
    members = [member for home in homes for _, member in inspect.getmembers(home, inspect.isclass)]
    return {m for m in members if issubclass(m, base) and m.__module__.startswith("spheret.connections")}


def scheme_modules(name, **options):
    """The entry, the exit and every connection of a scheme, as one module."""
    built = scheme(name, **options)
    sublayers = [built.connect(D, sublayer, DEPTH) for sublayer in range(1, DEPTH + 1)]
    return nn.ModuleList([built.enter(D), *sublayers, built.exit(D)])


class TestParameters:
    def test_the_table_holds_every_class_with_parameters(self):
        own = {m for m in classes(nn.Module) if "reset_parameters" in vars(m)}
        assert own - WITHOUT_PARAMETERS == set(MODULES)
        for name in SCHEMES:
            built = scheme(name)
            shapes = [BranchShape(D, 2, 2, 4 * D, gated) for gated in (False, True)]
            inside = [built.inside_attention(shapes[0], 1, DEPTH), *(built.inside_mlp(s, 2, DEPTH) for s in shapes)]
            parts = [*inside, built.logit_gain(D, 5), *built.connect_block(D, 1, DEPTH // 2)]
            for module in [scheme_modules(name), *filter(None, parts)]:
                for part in module.modules():
                    assert not list(part.parameters(recurse=False)) or type(part) in MODULES

    @pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
    def test_device_and_dtype(self, kind):
        fresh = kind(**MODULES[kind])
        assert {p.dtype for p in fresh.parameters()} == {torch.float32}
        for dtype in (torch.float64, torch.bfloat16):
            module = kind(**MODULES[kind], dtype=dtype)
            for p, start in zip(module.parameters(), fresh.parameters(), strict=True):
                assert p.dtype == dtype
                torch.testing.assert_close(p.float(), start.to(dtype).float(), rtol=1e-6, atol=1e-7)
        assert all(p.is_meta for p in kind(**MODULES[kind], device="meta").parameters())

    @pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
    def test_reset(self, kind):
        fresh, module = kind(**MODULES[kind]), kind(**MODULES[kind])
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(torch.nan)
        module.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), fresh.parameters(), strict=True))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            *((name, {}) for name in SCHEMES),
            ("p-spheretnorm", {"learnable_p": True, "inner_norm": True}),
            ("proj-spheretnorm", {"alpha": 0.25, "radius": 2.0}),
            ("proj-spheretnorm", {"learnable_alpha": False}),
            ("pre-ln", {"norm": "rmsnorm"}),
            ("pre-dyt", {"slope": 0.3}),
        ],
    )
    def test_meta_to_empty_and_reset_give_a_fresh_module(self, name, options):
        fresh = scheme_modules(name, **options)
        with torch.device("meta"):
            module = scheme_modules(name, **options)
        module.to_empty(device="cpu")
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(torch.nan)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        assert list(module.state_dict()) == list(fresh.state_dict())
        for key, value in fresh.state_dict().items():
            assert torch.equal(module.state_dict()[key], value), key
        state, f = rows(5, D).float(), rows(5, D, seed=1).float()
        for part, truth in zip(module, fresh, strict=True):
            inputs = (state, lambda _: f) if isinstance(part, Connection) else (state,)
            state = part(*inputs)
            assert_same(state, truth(*inputs))


class TestChannelDim:
    h, f = (rows(2 * D * 3 * 5, 2, seed=seed)[:, 0].view(2, D, 3, 5) for seed in (0, 1))

    @pytest.mark.parametrize("channel_dim", [1, -3])
    @pytest.mark.parametrize("retraction", ["projection", "cayley", "exponential", 0.5])
    def test_spheretnorm_is_that_of_the_moved_axis(self, retraction, channel_dim):
        first = SpheretNorm(D, 2, retraction=retraction, channel_dim=channel_dim).double()
        last = SpheretNorm(D, 2, retraction=retraction).double()
        (h, f), (h_last, f_last) = ([x.clone().requires_grad_() for x in (self.h, self.f)] for _ in range(2))
        out = first(h, f)
        truth = last(h_last.movedim(1, -1), f_last.movedim(1, -1)).movedim(-1, 1)
        assert out.shape == h.shape
        torch.testing.assert_close(out, truth, rtol=1e-13, atol=1e-13)
        weights = rows(h.numel(), 2, seed=2)[:, 0].view_as(h)
        (out * weights).sum().backward()
        (truth * weights).sum().backward()
        for a, b in ((h.grad, h_last.grad), (f.grad, f_last.grad), (first.a.grad, last.a.grad)):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        angle = first.angle(h, f)
        assert angle.shape == (2, 3, 5)
        torch.testing.assert_close(angle, last.angle(h.movedim(1, -1), f.movedim(1, -1)))
        torch.testing.assert_close(out.norm(dim=1), h.norm(dim=1), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("channel_dim", [1, -3])
    def test_scalenorm_is_that_of_the_moved_axis(self, channel_dim):
        first, last = ScaleNorm(D, channel_dim=channel_dim).double(), ScaleNorm(D).double()
        h, h_last = (self.h.clone().requires_grad_() for _ in range(2))
        out, truth = first(h), last(h_last.movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close(out, truth, rtol=1e-13, atol=1e-13)
        (out * self.f).sum().backward()
        (truth * self.f).sum().backward()
        torch.testing.assert_close(h.grad, h_last.grad, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(first.gamma.grad, last.gamma.grad, rtol=1e-12, atol=1e-13)

    def test_gradients_transforms_and_one_graph(self):
        update = SpheretNorm(D, 1, channel_dim=1).double()
        h, f = (x[:1, :, :1, :2].clone().requires_grad_() for x in (self.h, self.f))
        assert torch.autograd.gradcheck(update, (h, f), check_forward_ad=True)
        torch.compiler.reset()
        compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(h, f), update(h, f))

    def test_wrong_shapes(self):
        for module in (lambda x: SpheretNorm(D, 1, channel_dim=1)(x, x), ScaleNorm(D, channel_dim=1)):
            with pytest.raises(ValueError, match=r"8 .*dimension 1.*\(2, 3, 8\)"):
                module(torch.ones(2, 3, 8))
            with pytest.raises(ValueError, match=r"8 .*dimension 1.*\(8,\)"):
                module(torch.ones(8))

    def test_repr(self):
        assert "channel_dim=1" in repr(SpheretNorm(D, 1, channel_dim=1))
        assert "channel_dim=1" in repr(ScaleNorm(D, channel_dim=1))
        assert "channel_dim" not in repr(SpheretNorm(D, 1)) + repr(ScaleNorm(D))


class Gate(Bounded):
    """A user's own module: two bounded scalars, one of them a vector."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), inverse_softplus(2.0), dtype=torch.float64))
        self.y = nn.Parameter(torch.full((D,), inverse_softplus(0.5), dtype=torch.float64))

    def bounded_scalars(self):
        return [BoundedScalar("x", self.x, 0.1, 2.0), BoundedScalar("y", self.y, 0.5, 3.0)]

    def forward(self, h):
        return h * self.bounded_softplus(self.x, 0.1, 2.0) * self.bounded_softplus(self.y, 0.5, 3.0)


class TestBounded:
    h, target = rows(64, D), rows(64, D, seed=1)

    def gradients(self, parts):
        model = nn.Sequential(Gate(), Gate())
        for h, target in zip(self.h.chunk(parts), self.target.chunk(parts), strict=True):
            (model(h) * target).sum().backward()
        return [p.grad for p in model.parameters()]

    def test_accumulated_gradients_of_a_users_module_are_those_of_the_batch(self):
        for got, truth in zip(self.gradients(16), self.gradients(1), strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
            assert (truth != 0).all()

    def test_on_bound_names_it(self):
        model = nn.ModuleDict({"gate": Gate(), "norm": SpheretNorm(D, 1), "enter": ScaleNorm(D)})
        assert on_bound(model) == ["gate.x", "gate.y", "norm.a", "enter.gamma"]
        with torch.no_grad():
            model["gate"].x -= 0.5
            model["gate"].y[1:] += 0.5
            model["norm"].a -= 0.5
        assert on_bound(model) == ["gate.y", "enter.gamma"]
        assert on_bound(model["enter"]) == ["gamma"]

    def test_values(self):
        x, _ = Gate().bounded_scalars()
        assert x.value() == pytest.approx(2.0)
        norm = ScaleNorm(D)
        assert norm.radius_value() == pytest.approx(norm.radius.item(), rel=1e-6)


class TestWhatConnectionsAnswer:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_angle(self, name):
        f = 2 * rows(20, D, seed=1)
        for sublayer in range(1, DEPTH + 1):
            connection = scheme(name).connect(D, sublayer, DEPTH).double()
            state = state_before(scheme(name), sublayer, DEPTH, rows(20, D))
            out = connection.write(state, f)
            angle = connection.angle(state, f)
            assert angle.shape == (20,)
            streams = connection.stream(state), connection.stream(out)
            torch.testing.assert_close(angle, angle_between(*streams), rtol=0, atol=1e-7)
            torch.testing.assert_close(connection.angle(state, f, out), angle)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_step(self, name):
        connection = scheme(name).connect(D, 2, DEPTH)
        step = connection.retraction_step()
        if not isinstance(connection, spherical.SphericalConnection):
            assert step is None
            assert connection.alpha is None or connection.alpha.shape == (1,)
            return
        assert torch.equal(step.alpha, connection.alpha)
        norm = connection.norm
        assert (step.retraction, step.p, step.max_angle) == (norm.retraction, norm.p, norm.max_angle)
        assert (step.factor, step.schedule) == (norm.factor, norm.schedule)
        h, f = rows(5, D).float(), rows(5, D, seed=1).float()
        out = spheret.retract(h, f, step.alpha, step.retraction, step.max_angle)
        torch.testing.assert_close(out, connection.write(h, f))


class TestTheOtherKindOfCall:
    def test_spheretnorm_with_a_branch(self):
        for update in (SpheretNorm(D, 1), SpheretNorm(D, 1, channel_dim=1)):
            with pytest.raises(TypeError, match=r"Linear.*branch\(h\)"):
                update(torch.ones(2, D), nn.Linear(D, D))
        with pytest.raises(TypeError, match=r"f .*NoneType"):
            SpheretNorm(D, 1)(torch.ones(2, D), None)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_connection_with_a_tensor(self, name):
        with pytest.raises(TypeError, match=r"connection.write\(h, f\) .* or SpheretNorm"):
            scheme(name).connect(D, 1, DEPTH)(scheme(name).enter(D)(torch.ones(2, D)), torch.ones(2, D))


def test_no_room_but_connections_names_a_method():
    package = Path(spheret.__file__).parent
    methods = {c.__name__ for c in classes(nn.Module) | classes(connections.Scheme)}
    methods -= {"Connection", "Scheme", "Bounded", "Norm", "LayerNorm", "RMSNorm", "HeadNorm"}
    assert {"SpheretNorm", "ScaleNorm", "Spherical", "SphericalConnection", "PreLN", "NormedConnection"} <= methods
    homes = ("spheret.connections.euclidean", "spheret.connections.norms", "spheret.connections.spherical")
    named = []
    for path in sorted(package.rglob("*.py")):
        # the package exports SpheretNorm and ScaleNorm
        if path.is_relative_to(package / "connections") or path == package / "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spheret"):
                names = [alias.name for alias in node.names if alias.name in methods or node.module in homes]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name in homes]
            elif isinstance(node, ast.Attribute):
                names = [node.attr] if node.attr in methods else []
            # a conversion always leads to a sphere, and its Residual is another
            if path.is_relative_to(package / "conversion"):
                names = [name for name in names if name not in ("SpheretNorm", "ScaleNorm", "Spherical", "Residual")]
            # a model of one's own calls SpheretNorm itself, and is watched
            elif path == package / "watching" / "joins.py":
                names = [name for name in names if name != "SpheretNorm"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spheret.conversion"):
                names = []
            named += [f"{path.relative_to(package)}:{node.lineno} {name}" for name in names]
    assert named == []
