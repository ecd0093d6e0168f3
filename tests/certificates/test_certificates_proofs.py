"""What a certificate proves, against the truth in 60 digits; and what must not pass as proven."""

import copy

import exact_model as exact
import mpmath as mp
import pytest
import torch
from trained_models import config, windows

from spheret import GPT, SCHEMES
from spheret.analysis.sublayers import float64_twin, states
from spheret.certificates import enclosed_jacobians, measure
from spheret.certificates.balls import NotEnclosed
from spheret.certificates.certificate import certify, is_success, summary, verify
from spheret.certificates.enclosed_jacobians import Balls, sequence_balls, token_balls
from spheret.certificates.enclosures import Chain, Matrices, singular_values
from spheret.connections import Spherical, scheme

SPHERICAL = tuple(name for name in SCHEMES if isinstance(scheme(name), Spherical))
CASES = (
    *((name, {}) for name in SPHERICAL),
    ("p-spheretnorm", {"learnable_p": True}),
    ("proj-spheretnorm", {"inner_norm": True}),
    ("geonorm", {"max_angle": 0.01}),
    ("pre-ln", {}),
    ("post-ln", {}),
    ("peri-ln", {}),
)
POSITION = 2


@pytest.fixture(autouse=True)
def precise():
    with mp.workdps(exact.DIGITS):
        yield


def small(name, **options):
    """One block of width 4 with large weights, so that its Jacobians are far from the identity."""
    torch.manual_seed(3)
    model = GPT(config(name, layers=1, width=4, block=8, **options))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return float64_twin(model)


def distance(truth, computed):
    return mp.mnorm(truth - mp.matrix(computed.tolist()), "f")


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_truth_lies_inside(name, options):
    """The Jacobian, its singular values, and those of the stack: at a token after two others."""
    sublayers = states(small(name, **options), torch.tensor([[5, 250, 31]]))
    chain, product = Chain(sublayers[0].h[0, :1]), mp.eye(4)
    for s in sublayers:
        J = token_balls(s, torch.tensor([POSITION])).J
        truth = exact.jacobian(s, POSITION)
        # the radius bounds the spectral norm, which is at most the Frobenius norm
        assert distance(truth, J.mid[0]) <= float(J.radius)
        assert float(J.radius) < 1e-11 * float(J.mid.norm())
        # a radius that is a millionth of it is wrong, and this test would say so
        assert distance(truth, J.mid[0]) > 1e-6 * float(J.radius)
        product = truth * product
        enclosed = singular_values(J)
        for e, matrix in ((enclosed, truth), (chain.times(J, enclosed.max_high), product)):
            largest, smallest = exact.extremes(matrix)
            assert float(e.max_low) <= largest <= float(e.max_high)
            assert float(e.min_low) <= smallest <= float(e.min_high)
            assert float(e.max_high) < float(e.max_low) * (1 + 1e-9)
            if name != "post-ln":
                assert float(e.min_high) < float(e.min_low) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["proj-spheretnorm", "geonorm", "pre-ln", "ngpt", "scalenorm"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_tokens_and_sequence_agree_with_each_other_and_with_autograd(name, activation):
    from dataclasses import replace

    torch.manual_seed(0)
    twin = float64_twin(GPT(replace(config(name, layers=1, width=16), activation=activation)))
    for s in states(twin, windows()[0][:1, :5]):
        J = torch.autograd.functional.jacobian(lambda h, s=s: s.connection(h, s.branch), s.h)[0, :, :, 0]
        own, joint = token_balls(s, torch.arange(5)), sequence_balls(s)
        assert float((joint.J.mid[0] - J.reshape(80, 80)).norm()) < 1e-12
        for t in range(5):
            assert float((own.J.mid[t] - J[t, :, t]).norm()) < 1e-13


def test_a_part_of_the_directions_at_a_time_gives_the_same(monkeypatch):
    s = states(small("geonorm"), torch.tensor([[5, 250, 31]]))[0]
    whole = token_balls(s, torch.arange(3)), sequence_balls(s)
    monkeypatch.setattr(enclosed_jacobians, "chunk_size", lambda s, rows: 3)
    for one, other in zip(whole, (token_balls(s, torch.arange(3)), sequence_balls(s)), strict=True):
        torch.testing.assert_close(one.J.mid, other.J.mid, rtol=1e-14, atol=1e-15)


class TestForgery:
    def test_a_wrong_jacobian_is_caught(self, monkeypatch):
        """An error of 1e-6 in one entry of J, far outside its radius."""

        def wrong(s, positions):
            A, J = token_balls(s, positions)
            mid = J.mid.clone()
            mid[:, 1, 2] += 1e-6
            return Balls(A, Matrices(mid, J.radius))

        monkeypatch.setattr(enclosed_jacobians, "token_balls", wrong)
        torch.manual_seed(0)
        certificate = certify(GPT(config("pre-ln", width=16)), windows()[0], 4, sequence=0)
        assert certificate.own_path.verdicts == {"violated": 4}
        assert verify(certificate)
        assert not is_success(certificate)

    @pytest.mark.parametrize(
        ("name", "interval", "message"),
        [
            ("sigma_min", (0.9999, 0.99991), "outside its proven interval"),
            ("sigma_max", (1e-3, 1e-2), "outside its proven interval"),
            ("condition", (1e9, 2e9), "does not follow"),
            ("sigma_min", (0.0, 2.0), "should be 'at most'"),
        ],
    )
    def test_a_changed_interval_is_reported(self, name, interval, message):
        torch.manual_seed(0)
        certificate = certify(GPT(config("proj-spheretnorm", width=16)), windows()[0], 4, sequence=0)
        assert verify(certificate) == []
        setattr(certificate.own_path.sublayers[1].proven, name, interval)
        assert any(message in sentence and "sublayer 2" in sentence for sentence in verify(certificate))

    def test_a_verdict_on_an_inactive_sublayer_is_reported(self):
        torch.manual_seed(0)
        certificate = certify(GPT(config("rezero", width=16)), windows()[0], 4, sequence=0)
        assert certificate.own_path.verdicts == {"inactive": 4}
        certificate.own_path.sublayers[0].verdict = "proven"
        assert "should be 'inactive'" in verify(certificate)[0]


def test_an_operation_without_a_rule_is_measured_only_and_named():
    from spheret import Retraction

    odd = Retraction.from_angle(lambda beta: beta.sinh().atan(), "gudermann")
    torch.manual_seed(0)
    model = GPT(config("proj-spheretnorm", width=16, retraction=odd))
    certificate = certify(model, windows()[0], 4, sequence=2)
    for part in (certificate.own_path, certificate.sequence):
        assert part.verdicts == {"measured only": 4}
        assert part.depth[-1].proven is None
    assert "sinh has no rule" in " ".join(summary(certificate))
    assert verify(certificate) == []


def test_a_branch_of_zeros_is_inactive():
    """And its Jacobian, the identity, is enclosed: nothing divides by the length of the branch."""
    for name in ("proj-spheretnorm", "geonorm", "cay-spheretnorm", "pre-ln"):
        torch.manual_seed(0)
        model = copy.deepcopy(GPT(config(name, width=16)))
        with torch.no_grad():
            model.blocks[1].mlp.output.weight.zero_()
            model.blocks[1].mlp.output.bias.zero_()
        certificate = certify(model, windows()[0], 4, sequence=2)
        row = certificate.own_path.sublayers[3]
        assert row.verdict == "inactive"
        assert row.proven.condition[1] < 1 + 1e-9
        assert certificate.achieves.inactive == [4]
        assert "1 of 4 sublayers are inactive" in summary(certificate)[0]
        assert not is_success(certificate)


def test_a_comparison_within_rounding_is_no_proof():
    from spheret.certificates.balls import Ball

    x = Ball.of(torch.ones(1, dtype=torch.float64), torch.full((1,), 1e-15, dtype=torch.float64))
    assert (x < 2.0).all()
    with pytest.raises(NotEnclosed, match="comparison"):
        _ = x < 1.0


def test_a_fallback_covers_a_singular_product():
    """After a singular factor only an upper bound on sigma_min is known, and sigma_max keeps its digits."""
    torch.manual_seed(0)
    J = torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(8, 1, 6, 6, dtype=torch.float64)
    J[3, 0, :, 2] = 0.0
    chain, G = Chain(J[0, :, 0]), mp.eye(6)
    for factor in J:
        m = Matrices(factor, torch.full((1,), 1e-14, dtype=torch.float64))
        e = chain.times(m, singular_values(m).max_high)
        G = mp.matrix(factor[0].tolist()) * G
        largest, smallest = exact.extremes(G)
        assert float(e.max_low) <= largest <= float(e.max_high) <= float(e.max_low) * (1 + 1e-9)
        assert float(e.min_low) <= smallest + mp.mpf(10) ** -50
        assert smallest <= float(e.min_high)
    assert float(e.min_low) == 0
    assert float(e.min_high) < 1e-11


def test_measure_uses_the_enclosures():
    torch.manual_seed(0)
    twin = float64_twin(GPT(config("proj-spheretnorm", width=16)))
    measured = measure.measure_tokens(twin, [(windows()[0][:1], torch.arange(4))])
    assert measured.not_enclosed == [None] * 4
    assert all((n["min_low"] <= n["sigma_min"]).all() for n in measured.updates)
