"""The paper, proposition by proposition; each test is named after the statement it checks."""

import math

import pytest
import torch
from oracle import rows

from spheret import RETRACTIONS, SCHEDULES, angular, retract, scheme
from spheret.connections.norms import LayerNorm, PlainScaleNorm, RMSNorm, ScaleNorm
from spheret.schedules import factor

PS = (0.1, 0.5, 1.0, 2.0, 3.7, 50.0, math.inf)


def tangent(d=12, n=8):
    h, f = rows(n, d), rows(n, d, seed=1)
    return h, f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h


def test_definition_2_metric_projection_is_the_nearest_point_of_the_sphere():
    h, v = tangent()
    r = h.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(
        retract(h, v), r * (h + v) / (h + v).norm(dim=-1, keepdim=True), rtol=1e-13, atol=1e-13
    )


class TestProposition3Cayley:
    @staticmethod
    def transform(generator):
        eye = torch.eye(len(generator), dtype=generator.dtype)
        return torch.linalg.solve(eye - generator / 2, eye + generator / 2)

    @staticmethod
    def generator(h, v):
        return (torch.outer(v, h) - torch.outer(h, v)) / (h @ h)

    def test_the_closed_form_is_the_matrix_transform(self):
        for h, v in zip(*tangent(), strict=True):
            generator = self.generator(h, v)
            torch.testing.assert_close(generator @ h, v, rtol=1e-12, atol=1e-12)
            transform = self.transform(generator)
            torch.testing.assert_close(retract(h, v, 1.0, "cayley"), transform @ h, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(transform.T @ transform, torch.eye(len(h), dtype=h.dtype), rtol=0, atol=1e-12)

    def test_its_image_is_the_sphere_without_the_antipode(self):
        h, v = tangent()
        r = h.norm(dim=-1, keepdim=True)
        direction = v / v.norm(dim=-1, keepdim=True) * r
        # every angle below pi is that of one step, 2 tan(theta/2)
        for theta in (1e-6, 0.5, math.pi / 2, 3.0, math.pi - 1e-6):
            out = retract(h, direction, 2 * math.tan(theta / 2), "cayley")
            truth = math.cos(theta) * h + math.sin(theta) * direction
            torch.testing.assert_close(out, truth, rtol=0, atol=1e-12 * float(r.max()))
        # the longest steps come near the antipode; they leave a gap of 4/rho
        for rho in (1e2, 1e4, 1e6):
            gap = (retract(h, direction, rho, "cayley") + h).norm(dim=-1) / r.squeeze(-1)
            torch.testing.assert_close(gap, torch.full_like(gap, 4 / rho), rtol=1e-3, atol=0)


class TestProposition5SpecialCases:
    h, f = rows(8, 12), rows(8, 12, seed=1)

    def update(self, p):
        # a tensor p keeps the general formula for every value
        return retract(self.h, self.f, 0.7, torch.tensor([p], dtype=torch.float64))

    def test_p_to_infinity_is_geonorm(self):
        limit = retract(self.h, self.f, 0.7, "exponential")
        errors = [(self.update(p) - limit).abs().max() for p in (1e1, 1e2, 1e3)]
        # theta approaches beta as 1/p^2
        assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)
        assert errors[1] / errors[2] == pytest.approx(100, rel=0.1)
        torch.testing.assert_close(self.update(1e9), limit, rtol=1e-13, atol=1e-13)

    def test_p_to_0_is_the_identity(self):
        errors = [(self.update(p) - self.h).abs().max() for p in (1e-2, 1e-3, 1e-4)]
        assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)
        assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)

    @pytest.mark.parametrize("p", PS)
    def test_second_order_retraction_with_its_cubic_and_quartic_terms(self, p):
        h, v = tangent()
        r, s = h.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)
        e1, e2, eta = h / r, v / s, (s / r).squeeze(-1)
        # 1/p^2 sets the scale on which the expansion holds
        ts = [min(1, p) * t / float(eta.max()) for t in (0.02, 0.04)]
        tangent_rest, normal_rest = [], []
        for t in ts:
            out = retract(h, v, t, p)
            rho = t * eta
            tangent_rest.append(((out * e2).sum(-1) / r.squeeze(-1) - rho) / eta**3)
            normal_rest.append(((out * e1).sum(-1) / r.squeeze(-1) - 1 + rho**2 / 2) / eta**4)
        # R_h(0) = h and c'(0) = v: the rest after the first two orders falls as t^3 along v and as t^4 along h, so
        # c''(0) has no tangent part
        slope = (tangent_rest[1] / tangent_rest[0]).log2()
        torch.testing.assert_close(slope, torch.full_like(slope, 3), rtol=0, atol=0.01)
        slope = (normal_rest[1] / normal_rest[0]).log2()
        torch.testing.assert_close(slope, torch.full_like(slope, 4), rtol=0, atol=0.01)
        inverse = 0.0 if math.isinf(p) else 1 / (3 * p * p)
        cubic, quartic = tangent_rest[0] / ts[0] ** 3, normal_rest[0] / ts[0] ** 4
        torch.testing.assert_close(cubic, torch.full_like(cubic, -(1 / 6 + inverse)), rtol=5e-3, atol=0)
        torch.testing.assert_close(quartic, torch.full_like(quartic, 1 / 24 + inverse), rtol=5e-3, atol=0)


@pytest.mark.parametrize("name", ["geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm"])
def test_proposition_7_fixed_radius_through_a_whole_stack(name):
    spherical, d, depth = scheme(name), 16, 48
    enter = spherical.enter(d).double()
    with torch.no_grad():
        enter.gamma.fill_(2.5)
    h = enter(rows(8, d))
    for sublayer in range(1, depth + 1):
        branch = torch.nn.Sequential(torch.nn.Linear(d, d), torch.nn.GELU(), torch.nn.Linear(d, d)).double()
        h = spherical.connect(d, sublayer, depth).double()(h, branch)
        torch.testing.assert_close(h.norm(dim=-1), enter.radius.double().expand(8), rtol=1e-13, atol=0)


# the orders of the sums of lambda and of lambda^2 over m sublayers
ORDERS = {
    "constant": (lambda m: m, lambda m: m),
    "sqrt": (lambda m: 2 * math.sqrt(m), math.log),
    "harmonic": (math.log, lambda m: math.pi**2 / 6),
}


class TestProposition8Growth:
    """Sums of the schedules against the stated orders: the ratio to the order tends to a constant."""

    @pytest.mark.parametrize("name", ORDERS)
    def test_sums(self, name):
        for power, order in zip((1, 2), ORDERS[name], strict=True):
            ratios = [sum(factor(name, l, m) ** power for l in range(1, m + 1)) / order(m) for m in (2000, 20000)]
            assert ratios[1] == pytest.approx(1, abs=0.1)
            assert abs(ratios[1] - 1) <= abs(ratios[0] - 1) + 1e-12

    @pytest.mark.parametrize("p", [0.5, 1.0, 2.0, math.inf])
    def test_angles_obey_them(self, p):
        # |theta| <= lambda_l H for steps of length at most H, so A_L <= H^2 sum lambda^2
        for name in ORDERS:
            steps = torch.tensor([factor(name, l, 64) for l in range(1, 65)], dtype=torch.float64)
            spent = (angular(p).angle(0.8 * steps) ** 2).sum()
            assert spent <= 0.64 * (steps**2).sum() * (1 + 1e-14)


class TestProposition10DyadicBudget:
    """Squared angles over l in [m, 2m), for every p and steps that vary: C_- and C_+ times the sum of lambda^2."""

    LOW, HIGH = 0.2, 1.1

    @staticmethod
    def factors(name, m):
        return torch.tensor([factor(name, l, 4096) for l in range(m, 2 * m)], dtype=torch.float64)

    def test_the_sums_of_the_schedules(self):
        for m in (1, 2, 16, 64, 256, 1024):
            assert m / (2 * m - 1) - 1e-12 <= (self.factors("sqrt", m) ** 2).sum() <= 1 + 1e-12
            assert 1 / (4 * m) <= (self.factors("harmonic", m) ** 2).sum() <= 1 / m
        assert float((self.factors("sqrt", 1024) ** 2).sum()) == pytest.approx(math.log(2), rel=1e-3)
        assert float((self.factors("harmonic", 1024) ** 2).sum()) * 1024 == pytest.approx(0.5, rel=1e-3)

    @pytest.mark.parametrize("name", ["sqrt", "harmonic"])
    @pytest.mark.parametrize("p", PS)
    def test_the_bounds(self, p, name):
        for m in (1, 16, 256, 1024):
            lambdas = self.factors(name, m)
            # a_l eta_l varies from sublayer to sublayer between H_- and H_+
            along, sizes = torch.rand(2, m, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
            sizes = self.LOW + (self.HIGH - self.LOW) * sizes
            h = torch.tensor([[3.0, 0.0]], dtype=torch.float64).expand(m, 2)
            f = torch.stack([along, 3.0 * sizes], 1)
            # alpha_l = lambda_l a_l with a_l = 1: the update itself turns by the angles whose squares are summed
            out = retract(h, f, lambdas[:, None], p)
            turned = torch.atan2(out[:, 1], out[:, 0])
            epsilon = float((lambdas * self.HIGH).max())
            # the smallest ratio of an angle to its step below epsilon, that of the longest step
            least = 1.0 if math.isinf(p) else p * math.atan(epsilon / p) / epsilon
            budget, total = float((turned**2).sum()), float((lambdas**2).sum())
            assert (least * self.LOW) ** 2 * total <= budget <= self.HIGH**2 * total


class TestAppendixANormsAsProjections:
    x = rows(64, 12)

    @staticmethod
    def project(x, r):
        return r * x / x.norm(dim=-1, keepdim=True)

    @pytest.mark.parametrize(
        "norm", [LayerNorm(12, eps=0.0), RMSNorm(12, eps=0.0), PlainScaleNorm(12), ScaleNorm(12)], ids=repr
    )
    def test_norms_at_their_start(self, norm):
        x = self.x - self.x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else self.x
        # scale norms keep their radius, which starts at sqrt d, in float32
        close = 1e-12 if hasattr(norm, "weight") else 1e-6
        projected = self.project(x, math.sqrt(12))
        torch.testing.assert_close(norm.double()(self.x), projected, rtol=close, atol=close)

    def test_a_negative_gain_is_the_antipode(self):
        norm = PlainScaleNorm(12).double()
        with torch.no_grad():
            norm.g.fill_(-2.0)
        torch.testing.assert_close(norm(self.x), -self.project(self.x, 2.0), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("make", [LayerNorm, RMSNorm])
    def test_the_image_is_a_sphere_only_if_all_gains_have_one_size(self, make):
        norm = make(12, eps=0.0).double()
        signs = torch.ones(12, dtype=torch.float64)
        signs[::2] = -1
        with torch.no_grad():
            norm.weight.copy_(1.7 * signs)
        lengths = norm(self.x).norm(dim=-1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 1.7 * math.sqrt(12)), rtol=1e-12, atol=0)
        with torch.no_grad():
            norm.weight[3] *= 1.1
        lengths = norm(self.x).norm(dim=-1)
        assert (lengths.max() - lengths.min()) / lengths.mean() > 0.01


def boost(rapidity, d=12):
    """The Lorentz map that mixes the first two coordinates: it keeps x0^2 - x1^2 - ... - xd^2."""
    matrix = torch.eye(d, dtype=torch.float64)
    matrix[0, 0] = matrix[1, 1] = math.cosh(rapidity)
    matrix[0, 1] = matrix[1, 0] = math.sinh(rapidity)
    return matrix


class TestSection6Limitations:
    """Equivariance holds for maps that keep the norm, and breaks for others, such as GL(n) and the Lorentz group."""

    h, f = rows(8, 12), rows(8, 12, seed=1)

    def difference(self, matrix, p):
        moved = retract(self.h @ matrix.T, self.f @ matrix.T, 0.7, p)
        return (moved - retract(self.h, self.f, 0.7, p) @ matrix.T).abs()

    @pytest.mark.parametrize("p", PS)
    def test_orthogonal_equivariance(self, p):
        rotation = torch.linalg.qr(rows(12, 12, seed=2))[0]
        reflection = rotation @ torch.diag(torch.tensor([-1.0] + [1.0] * 11, dtype=torch.float64))
        spatial = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), torch.linalg.qr(rows(11, 11, seed=3))[0])
        # a dilation keeps every angle, and a Lorentz map without a boost is a rotation of space
        for matrix in (rotation, reflection, 3.0 * rotation, spatial, boost(0.0)):
            assert self.difference(matrix, p).max() < 1e-11

    @pytest.mark.parametrize("p", PS)
    def test_a_shear_is_a_counterexample(self, p):
        shear = torch.eye(12, dtype=torch.float64)
        shear[0, 1] = 0.5
        assert self.difference(shear, p).max() > 1e-2

    @pytest.mark.parametrize("p", PS)
    def test_a_lorentz_map_is_a_counterexample(self, p):
        matrix = boost(0.5)
        metric = torch.diag(torch.tensor([1.0] + [-1.0] * 11, dtype=torch.float64))
        torch.testing.assert_close(matrix.T @ metric @ matrix, metric, rtol=0, atol=1e-14)
        assert self.difference(matrix, p).max() > 1e-2
        # no weaker for a weak boost: the difference is of its first order
        weak = self.difference(boost(1e-4), p).max() / 1e-4
        assert weak > 1e-2
        assert float(self.difference(boost(2e-4), p).max() / 2e-4) == pytest.approx(float(weak), rel=1e-2)

    @pytest.mark.parametrize("name", RETRACTIONS)
    def test_an_equivariant_retraction_stays_in_the_plane(self, name):
        h, v = tangent()
        plane = torch.linalg.qr(torch.stack([h, v], -1))[0]

        def outside(out):
            return (out - (plane @ (plane.mT @ out.unsqueeze(-1))).squeeze(-1)).norm(dim=-1)

        # a third of a radius, a step that every retraction is defined for
        v = v / v.norm(dim=-1, keepdim=True) * h.norm(dim=-1, keepdim=True) / 3
        assert (outside(retract(h, v, 1.0, name)) < 1e-13).all()

        # a retraction in the sense of Definition 1 (retraction) that prefers one direction of space leaves the plane
        def preferring(v):
            drift = torch.zeros_like(h)
            drift[:, 0] = v.square().sum(-1)
            return retract(h, v + drift, 1.0, name)

        assert torch.equal(preferring(torch.zeros_like(v)), h)
        torch.testing.assert_close(torch.func.jvp(preferring, (torch.zeros_like(v),), (v,))[1], v)
        assert (outside(preferring(v)) > 1e-2).all()


def test_every_schedule_of_the_table_is_known_to_these_tests():
    assert set(SCHEDULES) == {*ORDERS, "linear", "linear-paper"}
