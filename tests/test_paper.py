"""The paper, proposition by proposition; each test is named after the statement it checks."""

import math

import pytest
import torch
from oracle import rows

from spheret import SCHEDULES, angular, retract, scheme
from spheret.connections.norms import LayerNorm, PlainScaleNorm, RMSNorm, ScaleNorm
from spheret.schedules import factor

PS = (0.1, 0.5, 1.0, 2.0, 3.7, 50.0, math.inf)


def tangent(d=12, n=8):
    h, f = rows(n, d), rows(n, d, seed=1)
    return h, f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h


def test_definition_2_projection_is_the_nearest_point_of_the_sphere():
    h, v = tangent()
    r = h.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(
        retract(h, v), r * (h + v) / (h + v).norm(dim=-1, keepdim=True), rtol=1e-13, atol=1e-13
    )


def test_proposition_1_cayley_closed_form_is_the_matrix_transform():
    for h, v in zip(*tangent(), strict=True):
        generator = (torch.outer(v, h) - torch.outer(h, v)) / (h @ h)
        torch.testing.assert_close(generator @ h, v, rtol=1e-12, atol=1e-12)
        eye = torch.eye(len(h), dtype=h.dtype)
        transform = torch.linalg.solve(eye - generator / 2, eye + generator / 2)
        torch.testing.assert_close(retract(h, v, 1.0, "cayley"), transform @ h, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(transform.T @ transform, eye, rtol=0, atol=1e-12)


class TestProposition2SpecialCases:
    h, f = rows(8, 12), rows(8, 12, seed=1)

    def update(self, p):
        # a tensor p keeps the general formula for every value
        return retract(self.h, self.f, 0.7, torch.tensor([p], dtype=torch.float64))

    def test_p_1_is_proj(self):
        torch.testing.assert_close(
            self.update(1.0), retract(self.h, self.f, 0.7, "projection"), rtol=1e-13, atol=1e-13
        )

    def test_p_2_is_cay(self):
        torch.testing.assert_close(self.update(2.0), retract(self.h, self.f, 0.7, "cayley"), rtol=1e-13, atol=1e-13)

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
def test_proposition_2_second_order_retraction_with_its_cubic_and_quartic_terms(p):
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
def test_proposition_4_fixed_radius_through_a_whole_stack(name):
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


class TestProposition5Growth:
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


def test_proposition_6_dyadic_budget():
    """Squared angles over l in [m, 2m): constant for sqrt, as 1/m for harmonic."""

    def budget(name, m):
        steps = torch.tensor([0.5 * factor(name, l, 4096) for l in range(m, 2 * m)], dtype=torch.float64)
        return float((angular(1.0).angle(steps) ** 2).sum())

    ms = (16, 64, 256, 1024)
    for m in ms:
        assert 0.25 * 0.5 * 0.9 <= budget("sqrt", m) <= 0.25
        assert 0.25 * 0.25 * 0.9 <= budget("harmonic", m) * m <= 0.25
    assert budget("sqrt", ms[-1]) == pytest.approx(0.25 * math.log(2), rel=1e-2)
    assert budget("harmonic", ms[-1]) * ms[-1] == pytest.approx(0.25 / 2, rel=1e-2)


class TestAppendixANormsAsProjections:
    x = rows(64, 12)

    @staticmethod
    def project(x, r):
        return r * x / x.norm(dim=-1, keepdim=True)

    def test_layernorm(self):
        norm = LayerNorm(12, eps=0.0).double()
        centred = self.x - self.x.mean(-1, keepdim=True)
        torch.testing.assert_close(norm(self.x), self.project(centred, math.sqrt(12)), rtol=1e-12, atol=1e-12)

    def test_rmsnorm(self):
        norm = RMSNorm(12, eps=0.0).double()
        torch.testing.assert_close(norm(self.x), self.project(self.x, math.sqrt(12)), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("norm", [PlainScaleNorm(12), ScaleNorm(12)], ids=repr)
    def test_scalenorm(self, norm):
        # both start at radius sqrt d
        torch.testing.assert_close(norm.double()(self.x), self.project(self.x, math.sqrt(12)), rtol=1e-6, atol=1e-6)

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


class TestLimitations:
    """Equivariance holds for orthogonal maps, and breaks for others."""

    h, f = rows(8, 12), rows(8, 12, seed=1)

    @pytest.mark.parametrize("p", PS)
    def test_orthogonal_equivariance(self, p):
        u = torch.linalg.qr(rows(12, 12, seed=2))[0]
        torch.testing.assert_close(
            retract(self.h @ u.T, self.f @ u.T, 0.7, p), retract(self.h, self.f, 0.7, p) @ u.T, rtol=1e-12, atol=1e-12
        )

    @pytest.mark.parametrize("p", PS)
    def test_a_shear_is_a_counterexample(self, p):
        shear = torch.eye(12, dtype=torch.float64)
        shear[0, 1] = 0.5
        left, right = retract(self.h @ shear.T, self.f @ shear.T, 0.7, p), retract(self.h, self.f, 0.7, p) @ shear.T
        assert (left - right).abs().max() > 1e-2


def test_every_schedule_of_the_table_is_known_to_these_tests():
    assert set(SCHEDULES) == {*ORDERS, "linear", "linear-paper"}
