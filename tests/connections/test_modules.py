"""Connections as PyTorch modules: device, dtype, reset_parameters, channel_dim, Bounded, and helpful errors."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import rows
from states import state_before
from torch import nn
from torch.utils._pytree import tree_leaves

import spheret
from spheret import SCHEMES, ScaleNorm, SpheretNorm, connections, scheme
from spheret.connections import (
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
    euclidean.VarianceGate: {"dim": D},
    ngpt.NGPTNorm: {"dim": D},
    ngpt.QueryKeyNorm: {"dim": D, "heads": 2},
    spherical.SpheretNorm: {"dim": D, "sublayer": 2, "retraction": 0.5, "learnable_p": True},
    geonorm_affine.AffineGeoNorm: {"block": 2},
    earlier_states.StartMix: {"mix": 0.1},
    earlier_states.WeightedSum: {"starts": (1.5, 0.0, 1.0)},
    earlier_states.Attend: {"dim": D, "count": 3},
    many_streams.HyperWeights: {"streams": 3, "sublayer": 2},
    many_streams.TokenWeights: {"dim": D, "streams": 3},
    many_streams.ManifoldWeights: {"dim": D, "streams": 3, "sublayer": 2},
    many_streams.Gates: {"dim": D, "streams": 3},
    many_streams.StreamShares: {"streams": 3, "start": 0.5},
    many_streams.SphericalHyperWeights: {"streams": 3, "sublayer": 2},
}


def classes(parent):
    """The classes of connections/ that derive from `parent`."""
    homes = (base, norms, euclidean, ngpt, spherical, geonorm_affine, earlier_states, many_streams)
    members = [member for home in homes for _, member in inspect.getmembers(home, inspect.isclass)]
    return {m for m in members if issubclass(m, parent) and m.__module__.startswith("spheret.connections")}


def scheme_modules(name, **options):
    """The entry, the exit and every connection of a scheme, as one module."""
    built = scheme(name, **options)
    sublayers = [built.connect(D, sublayer, DEPTH) for sublayer in range(1, DEPTH + 1)]
    return nn.ModuleList([built.enter(D), *sublayers, built.exit(D)])


class TestParameters:
    def test_the_table_holds_every_class_with_parameters(self):
        own = {m for m in classes(nn.Module) if hasattr(m, "reset_parameters")}
        assert own == set(MODULES)
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
        *_, device, dtype = inspect.signature(kind).parameters.values()
        assert (device.name, dtype.name, device.kind) == ("device", "dtype", inspect.Parameter.KEYWORD_ONLY)

    @pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
    def test_reset(self, kind):
        fresh, module = kind(**MODULES[kind]), kind(**MODULES[kind], device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(torch.nan)
        module.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), fresh.parameters(), strict=True))


def test_a_branch_or_its_output():
    """SpheretNorm and every connection take either."""
    branch = nn.Linear(D, D).double()
    norm, h = SpheretNorm(D, 2), rows(3, D)
    assert torch.equal(norm(h, branch), norm(h, branch(h)))
    for name in SCHEMES:
        built = scheme(name)
        connection, state = built.connect(D, 1, DEPTH).double(), built.enter(D).double()(h)
        expected = connection(state, branch)
        given = connection(state, branch(connection.read(state)))
        assert all(map(torch.equal, tree_leaves(given), tree_leaves(expected)))


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
        h, f = rows(5, D).float(), rows(5, D, seed=1).float()
        out = spheret.retract(h, connection.branch_output(f), step.alpha, step.retraction, step.max_angle)
        torch.testing.assert_close(out, connection.write(h, f))


def test_integers_of_numpy():
    x = torch.randn(2, 6, 4, 5)
    assert SpheretNorm(np.int64(6), 1, channel_dim=1)(x, x).shape == x.shape
    assert type(scheme("pre-ln").connect(np.int64(6), 1, 2).dim) is int


def test_no_room_but_connections_names_a_method():
    """What others need to know of a scheme is a method of `Connection`. A conversion leads to a sphere, and watching
    looks for the modules of a model of one's own."""
    package = Path(spheret.__file__).parent
    methods = {c.__name__ for c in classes(nn.Module) | classes(connections.Scheme)}
    methods -= {
        "Connection",
        "Scheme",
        "Bounded",
        "Constrained",
        "Norm",
        "LayerNorm",
        "RMSNorm",
        "HeadNorm",
        "Gain",
    }
    assert {"SpheretNorm", "Spherical", "PreLN", "NormedConnection"} <= methods
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        nodes = ast.walk(ast.parse(path.read_text())) if room not in ("connections", "__init__.py") else ()
        names = {getattr(node, "id", getattr(node, "attr", None)) for node in nodes}
        allowed = {"SpheretNorm", "ScaleNorm", "Spherical"} if room in ("conversion", "observe") else set()
        assert not names & methods - allowed, path
