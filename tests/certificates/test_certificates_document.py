"""Certificates of real models: against brute-force autograd, and never more than is proven."""

import copy
import json
import math

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trained_models import VOCAB, config, trained, windows

from spheret import GPT, SCHEMES, SpheretNorm, parameter_groups
from spheret.analysis.sublayers import float64_twin, states
from spheret.certificates import measure
from spheret.certificates.certificate import certify, digits, read_certificate, summary, verify
from spheret.certificates.live_certificate import live_certificate
from spheret.connections import Spherical, scheme

SPHERICAL = tuple(name for name in SCHEMES if isinstance(scheme(name), Spherical))
FLAT = tuple(name for name in SCHEMES if name not in SPHERICAL and scheme(name).one_stream)
# the others are proven
VERDICTS = {**dict.fromkeys(("post-ln", "deepnorm", "ngpt"), "at most"), "geonorm-affine": "measured only"}
OPTIONS = (
    ("p-spheretnorm", (("learnable_p", True),)),
    ("cay-spheretnorm", (("max_angle", None),)),
    ("geonorm", (("max_angle", 0.05), ("schedule", "constant"))),
    ("proj-spheretnorm", (("inner_norm", True), ("index", "block"))),
    ("proj-spheretnorm", (("entry_norm", False), ("schedule", "linear-paper"))),
    ("proj-spheretnorm", (("learnable_alpha", False), ("alpha", 0.5))),
    ("cay-spheretnorm", (("output_init", "full"), ("radius", 2.0))),
)


def quiet(scheme_name, **options):
    """An untrained model whose branches are scaled down, so that its bounds are not vacuous."""
    torch.manual_seed(0)
    model = GPT(config(scheme_name, **options))
    with torch.no_grad():
        for block in model.each_block():
            block.attention.output.weight.mul_(0.2)
            block.mlp.output.weight.mul_(0.2)
    return model


def test_the_own_path_is_the_derivative_of_a_token_in_itself():
    """The product of own-path Jacobians, against autograd through the whole model."""
    twin = float64_twin(trained("proj-spheretnorm"))
    ids = windows()[0][:1, :12]
    first = states(twin, ids)[0].h

    def last(h):
        for block in twin.each_block():
            h = block(h)
        return h[0, 7]

    G = torch.autograd.functional.jacobian(last, first)[:, 0, 7]
    truth = torch.linalg.svdvals(G)
    product = measure.measure_tokens(twin, [(ids, torch.tensor([3, 7]))]).products[-1]
    assert float(product["sigma_max"][1]) == pytest.approx(float(truth[0]), rel=1e-9)
    assert float(product["sigma_min"][1]) == pytest.approx(float(truth[-1]), rel=1e-6)


@pytest.mark.parametrize("name", ["proj-spheretnorm", "geonorm", "pre-ln", "post-ln", "ngpt", "orthogonal"])
def test_numbers_are_those_of_brute_force(name):
    twin = float64_twin(trained(name))
    ids = windows()[0][:1, :10]
    own = measure.measure_tokens(twin, [(ids, torch.arange(10))])
    whole = measure.measure_sequence(twin, ids)
    for s, numbers, sequence in zip(states(twin, ids), own.updates, whole.updates, strict=True):
        J = torch.autograd.functional.jacobian(lambda h, s=s: s.connection(h, s.branch), s.h)[0, :, :, 0]
        A = torch.autograd.functional.jacobian(lambda h, s=s: s.branch(s.connection.read(h)), s.h)[0, :, :, 0]
        c = (s.h * s.f).sum(-1)[0] / s.h.square().sum(-1)[0]
        d = s.h.shape[-1]
        for t in (0, 4, 9):
            values = torch.linalg.svdvals(J[t, :, t])
            B = A[t, :, t] - c[t] * torch.eye(d, dtype=torch.float64)
            assert float(numbers["sigma_max"][t]) == pytest.approx(float(values[0]), rel=1e-9)
            assert float(numbers["sigma_min"][t]) == pytest.approx(float(values[-1]), rel=1e-5, abs=1e-12)
            norm = float(torch.linalg.matrix_norm(B, ord=2))
            assert norm <= float(numbers["B"][t]) <= norm * (1 + 1e-8)
        values = torch.linalg.svdvals(J.reshape(10 * d, 10 * d))
        assert float(sequence["sigma_max"][0]) == pytest.approx(float(values[0]), rel=1e-9)
        assert float(sequence["sigma_min"][0]) == pytest.approx(float(values[-1]), rel=1e-5, abs=1e-12)
        B = A.reshape(10 * d, 10 * d) - torch.diag(c.repeat_interleave(d))
        norm = float(torch.linalg.matrix_norm(B, ord=2))
        assert norm <= float(sequence["B"][0]) <= norm * (1 + 1e-8)


@pytest.mark.parametrize(("name", "options"), [*((name, ()) for name in SPHERICAL), *OPTIONS])
def test_no_bound_is_violated_on_a_trained_model(name, options):
    """Every spherical scheme, every sublayer, 64 tokens; J equals the closed form there too."""
    certificate = certify(trained(name, options=options), windows()[0], 64, sequence=8)
    assert verify(certificate) == []
    for part in (certificate.own_path, certificate.sequence):
        for row in part.sublayers:
            # the paper's linear schedule ends with a step of 0
            assert row.verdict == ("proven" if row.lambda_ else "inactive")
            assert row.violations == 0
            assert row.error_max < 1e-10
            assert row.sigma_max >= 1 - 1e-12
            assert (row.paper == "does not apply") == (row.m_min == 0)
            assert digits(row.proven.condition) >= 7
        for row in part.depth:
            assert row.violations == 0
            assert digits(row.proven.condition) >= 5
            assert row.criterion_min <= row.product_m_min * (1 + 1e-12)
        growth = part.growth
        assert growth.S_envelope * (1 + 1e-9) >= growth.S
        assert growth.A_envelope * (1 + 1e-9) >= growth.A
    json.dumps(msgspec.to_builtins(certificate), allow_nan=False)


@pytest.mark.parametrize("name", SPHERICAL)
def test_proven_where_there_is_something_to_prove(name):
    model = quiet(name)
    certificate = certify(model, windows()[0], 64, sequence=8)
    assert certificate.own_path.verdicts == {"proven": 4}
    last = certificate.own_path.depth[-1]
    assert 0 < last.criterion_min <= last.product_m_min <= last.sigma_min <= 1 <= last.sigma_max
    assert math.log(last.sigma_max) <= last.S_max
    assert certificate.own_path.lost.paper is None
    assert certificate.own_path.paper == {"holds": 4}
    assert certificate.own_path.bounds == "proven"
    assert verify(certificate) == []


def test_the_paper_s_verdict_is_that_of_the_worst_token():
    """One token without a lower bound, and the paper's bound does not apply to the whole sublayer."""
    model = copy.deepcopy(trained("proj-spheretnorm"))
    many = certify(model, windows()[0], 64, sequence=0).own_path.sublayers
    for row in many:
        assert row.tokens_with_m < 64
        assert row.paper == "does not apply"
        assert "m = 0" in row.paper_why
        assert row.loose == pytest.approx((1 + row.Delta_max) / row.sigma_max)


def test_own_tokens_do_not_bound_the_sequence():
    """Attention between tokens counts: |B| of the sequence is above |B| of every single token."""
    model = trained("proj-spheretnorm", layers=2, width=32, steps=30)
    ids = windows()[0][:1, :10]
    twin = float64_twin(model)
    own = measure.measure_tokens(twin, [(ids, torch.arange(10))]).updates[0]["B"]
    whole = measure.measure_sequence(twin, ids).updates[0]["B"]
    assert float(whole) > float(own.max()) * 1.05


@pytest.mark.parametrize("name", FLAT)
def test_flat_schemes_are_proven_without_the_paper(name):
    """A norm after the sum makes J singular: then sigma_max is proven, and sigma_min from above."""
    certificate = certify(trained(name, steps=3), windows()[0], 8, sequence=4)
    for part in (certificate.own_path, certificate.sequence):
        assert part.verdicts == {VERDICTS.get(name, "proven"): 4}
        assert part.paper == {"does not apply": 4}
        assert part.bounds == "none"
        assert all("no retraction" in row.paper_why and row.m_min is None for row in part.sublayers)
        # ball arithmetic has no rule for the smaller of two
        measured = VERDICTS.get(name) == "measured only"
        assert all(row.proven is None if measured else digits(row.proven.sigma_max) >= 9 for row in part.sublayers)
    assert "no retraction of the sphere" in " ".join(summary(certificate))
    assert verify(certificate) == []
    json.dumps(msgspec.to_builtins(certificate), allow_nan=False)


class TestWithoutMatrices:
    """The methods for wide models, on narrow models where dense SVD gives the truth."""

    @pytest.fixture
    def narrow(self, monkeypatch):
        monkeypatch.setattr(measure, "DENSE", 8)

    @pytest.mark.parametrize("name", ["proj-spheretnorm", "pre-ln"])
    def test_singular_values_agree_with_dense_svd(self, name, monkeypatch):
        """d = 64, attention and MLP of a trained model, to 1e-4."""
        twin = float64_twin(trained(name, layers=1, width=64))
        ids = [(windows()[0][:1], torch.arange(0, 64, 8))]
        dense = measure.measure_tokens(twin, ids)
        monkeypatch.setattr(measure, "DENSE", 8)
        free = measure.measure_tokens(twin, ids)
        assert (dense.norm_method, free.norm_method) == ("svd", "frobenius")
        assert (dense.sigma_method, free.sigma_method) == ("svd", "lanczos")
        pairs = [*zip(dense.updates, free.updates, strict=True), (dense.products[-1], free.products[-1])]
        for truth, estimate in pairs:
            torch.testing.assert_close(estimate["sigma_max"], truth["sigma_max"], rtol=1e-4, atol=0.0)
            large = truth["sigma_min"] > 1e-6
            torch.testing.assert_close(estimate["sigma_min"][large], truth["sigma_min"][large], rtol=1e-4, atol=0.0)
            assert (estimate["sigma_min"] >= truth["sigma_min"] * (1 - 1e-6) - 1e-12).all()

    def test_the_norm_is_still_an_upper_bound(self, narrow, monkeypatch):
        twin = float64_twin(trained("geonorm", layers=1, width=16))
        ids = windows()[0][:1, :6]
        free = measure.measure_tokens(twin, [(ids, torch.arange(6))]), measure.measure_sequence(twin, ids)
        monkeypatch.setattr(measure, "DENSE", 512)
        dense = measure.measure_tokens(twin, [(ids, torch.arange(6))]), measure.measure_sequence(twin, ids)
        for part, truth in zip(free, dense, strict=True):
            for estimate, exact in zip(part.updates, truth.updates, strict=True):
                assert (estimate["B"] >= exact["B"] * (1 - 1e-9)).all()
                assert (estimate["B"] <= exact["B"] * math.sqrt(6 * 16)).all()
                assert (estimate["m"] <= exact["m"] + 1e-12).all()

    def test_products_are_taken_at_dyadic_depths(self, narrow):
        twin = float64_twin(GPT(config("proj-spheretnorm", layers=3, width=16)))
        products = measure.measure_tokens(twin, [(windows()[0][:1], torch.arange(2))]).products
        assert [p is not None for p in products] == [True, True, False, True, False, True]

    def test_certificate(self, narrow):
        certificate = certify(quiet("proj-spheretnorm", width=16), windows()[0], 6, sequence=3)
        assert verify(certificate) == []
        assert certificate.own_path.norm_of_B == "frobenius"
        assert certificate.own_path.verdicts == {"measured only": 4}
        assert certificate.own_path.paper == {"holds": 4}
        assert "more than 8 rows" in " ".join(summary(certificate))

    def test_an_estimate_from_below_proves_nothing(self, narrow):
        certificate = certify(quiet("proj-spheretnorm", width=16), windows()[0], 6, sequence=3, exact=False)
        for part in (certificate.own_path, certificate.sequence):
            assert part.norm_of_B == "lanczos"
            assert part.verdicts == {"measured only": 4}
            assert part.paper == {"does not apply": 4}
            assert "below" in part.sublayers[0].paper_why
            assert part.bounds == "estimated"
            assert part.lost.paper is None
        assert "proven" not in " ".join(summary(certificate))
        assert verify(certificate) == []

    @pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_no_matrix_per_token_is_formed_above_512(self, exact):
        """No tensor on the way is as large as one Jacobian per token."""
        width, tokens = 640, 8
        twin = float64_twin(GPT(config("proj-spheretnorm", layers=1, width=width, block=8)))
        with Watch() as watch:
            measured = measure.measure_tokens(twin, [(torch.randint(VOCAB, (1, 8)), torch.arange(tokens))], exact)
        assert measured.norm_method == ("frobenius" if exact else "lanczos")
        assert watch.largest < tokens * width * width


class Watch(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            # a view has no memory of its own
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.largest = max(self.largest, x.numel())
        return out


class TestForgery:
    def test_a_wrong_update_is_caught(self, monkeypatch):
        """A model that turns three times as far as its alpha allows is violated: it breaks the closed form."""
        honest = SpheretNorm.forward
        monkeypatch.setattr(SpheretNorm, "forward", lambda self, h, f: honest(self, h, 3 * f))
        certificate = certify(trained("proj-spheretnorm"), windows()[0], 8, sequence=4)
        assert set(certificate.own_path.verdicts) == {"violated"}
        assert set(certificate.sequence.verdicts) == {"violated"}
        assert "proven" not in " ".join(summary(certificate))
        assert verify(certificate)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("sigma_max", 50.0, "sigma_max"),
            ("sigma_min", 1e-3, "sigma_min"),
            ("delta_max", 50.0, "delta"),
            ("m_min", 0.0, "should be 'does not apply'"),
            ("verdict", "at most", "should be 'proven'"),
            ("inactive", True, "should be 'inactive'"),
            ("violations", 3, "3 tokens contradict"),
        ],
    )
    def test_a_changed_number_is_reported(self, key, value, message):
        certificate = certify(quiet("proj-spheretnorm", width=16), windows()[0], 4, sequence=0)
        assert verify(certificate) == []
        setattr(certificate.own_path.sublayers[1], key, value)
        assert any(message in sentence and "sublayer 2" in sentence for sentence in verify(certificate))

    def test_an_estimate_does_not_allow_proven(self):
        certificate = certify(quiet("proj-spheretnorm", width=16), windows()[0], 4, sequence=0)
        certificate.own_path.norm_of_B = "lanczos"
        assert len(verify(certificate)) == 4


class TestBadInput:
    def test_not_finite(self):
        model = copy.deepcopy(trained("proj-spheretnorm"))
        with torch.no_grad():
            model.blocks[1].mlp.hidden.weight[0, 0] = math.nan
        with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.hidden\.weight"):
            certify(model, windows()[0], 4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"tokens": 257}, "ids holds 256"), ({"tokens": 0}, "at least 1"), ({"sequence": -1}, "at least 0")],
    )
    def test_sizes(self, options, message):
        with pytest.raises(ValueError, match=message):
            certify(trained("proj-spheretnorm"), windows()[0], **options)

    def test_a_stream_of_zeros(self):
        model = copy.deepcopy(trained("proj-spheretnorm"))
        with torch.no_grad():
            model.tokens.weight.zero_()
            model.positions.weight.zero_()
        with pytest.raises(ValueError, match="sphere"):
            certify(model, windows()[0], 4, sequence=0)

    def test_no_certificate_and_a_damaged_one(self, tmp_path):
        assert read_certificate(tmp_path) is None
        (tmp_path / "certificate.json").write_text("{")
        with pytest.raises(ValueError, match=r"certificate\.json"):
            read_certificate(tmp_path)
        (tmp_path / "certificate.json").write_text("{}")
        with pytest.raises(ValueError, match=r"certificate\.json .*spheret certify"):
            read_certificate(tmp_path)
        whole = msgspec.to_builtins(certify(quiet("proj-spheretnorm", width=16), windows()[0], 2, sequence=0))
        for broken in (
            {"own_path": None},
            {"own_path": {"sublayers": []}},
            {"own_path": whole["own_path"] | {"depth": []}},
        ):
            (tmp_path / "certificate.json").write_text(json.dumps(whole | broken))
            with pytest.raises(ValueError, match=r"certificate\.json .*(own_path|sublayers|depth)"):
                read_certificate(tmp_path)


class TestLive:
    @pytest.mark.parametrize("name", ["proj-spheretnorm", "pre-ln"])
    def test_it_leaves_no_trace(self, name):
        torch.manual_seed(1)
        model = GPT(config(name)).train()
        model(*windows()).backward()
        weights = {key: x.clone() for key, x in model.state_dict().items()}
        gradients = [p.grad.clone() for p in model.parameters()]
        random, threads = torch.get_rng_state(), torch.get_num_threads()
        record = live_certificate(model, windows()[0], 8)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.get_num_threads() == threads
        assert all(module.training for module in model.modules())
        assert all(p.requires_grad for p in model.parameters())
        assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert record.tokens == 8
        assert len(record.sublayers) == 4
        assert record.seconds > 0
        json.dumps(msgspec.to_builtins(record), allow_nan=False)

    def test_a_step_after_it_is_the_same_step(self):
        def stepped(look):
            torch.manual_seed(2)
            model = GPT(config("p-spheretnorm"))
            optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
            for _ in range(3):
                model(*windows()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if look:
                    live_certificate(model, windows()[0], 4)
            return model.state_dict()

        with_it, without = stepped(True), stepped(False)
        assert all(torch.equal(with_it[key], without[key]) for key in without)

    def test_a_failure_does_not_end_the_run(self):
        model = GPT(config("proj-spheretnorm"))
        with torch.no_grad():
            model.blocks[0].mlp.hidden.weight[0, 0] = math.inf
        assert "hidden.weight" in live_certificate(model, windows()[0], 4).failed
