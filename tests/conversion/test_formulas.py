"""The identity between a residual sum and a retraction, and the way from a row's own step to the learned one."""

import math

import pytest
import torch

from spheret import RETRACTIONS, angular, retract
from spheret.conversion import formulas

ROWS = {**RETRACTIONS, "p=0.5": angular(0.5), "p=3": angular(3.0)}


def rows(seed=0, size=64, dim=6):
    generator = torch.Generator().manual_seed(seed)
    h, f = (torch.randn(size, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    return h * torch.rand(size, 1, generator=generator, dtype=torch.float64), f


RADIUS = torch.tensor([2.0], dtype=torch.float64)


def test_the_sum_is_a_projection_retraction_with_a_step_size_per_row():
    h, f = rows()
    u, ratio = formulas.on_sphere(h, RADIUS)
    c = (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True)
    total = h + f
    ahead = (1 + c > 0).squeeze(-1)
    # both cases occur
    assert 10 < int(ahead.sum()) < 60
    alpha = RADIUS / ((1 + c) * h.norm(dim=-1, keepdim=True))
    turned = retract(u[ahead], f[ahead], alpha[ahead])
    direction = RADIUS * total / total.norm(dim=-1, keepdim=True)
    assert torch.allclose(turned, direction[ahead], atol=1e-12)
    # and the formulas carry the other rows too
    after, next_ratio = formulas.exact(ratio * u, f, RADIUS)
    assert torch.allclose(after, direction, atol=1e-12)
    assert torch.allclose(next_ratio * after, total, atol=1e-12)
    parts = formulas.turn(u, f, ratio, RADIUS)
    assert torch.equal(parts.along.squeeze(-1) > 0, ahead)
    assert torch.allclose(parts.ratio, next_ratio, atol=1e-12)
    z = f - c * h
    length = (
        h.norm(dim=-1, keepdim=True)
        * ((1 + c) ** 2 + (z * z).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True)).sqrt()
    )
    assert torch.allclose(RADIUS * next_ratio, length, atol=1e-12)


def test_compressed_rows_have_other_lengths_and_can_be_expanded():
    h, _ = rows()
    h[0] = 0
    small = formulas.compress(h, RADIUS)
    assert torch.allclose(formulas.expand(small, RADIUS), h, atol=1e-12)
    assert torch.allclose(small.norm(dim=-1), (RADIUS * h.norm(dim=-1)).sqrt() / 2, atol=1e-12)


def test_a_row_that_its_branch_undoes_becomes_zero_and_keeps_finite_gradients():
    h = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    f = torch.tensor([[-1.0, -2.0], [3.0, 4.0]], requires_grad=True)
    after, ratio = formulas.exact(h, f, torch.ones(1))
    assert torch.allclose(after, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    assert ratio.flatten().tolist() == pytest.approx([0, 5])
    (after.sum() + ratio.sum()).backward()
    assert torch.isfinite(h.grad).all()
    assert torch.isfinite(f.grad).all()


@pytest.mark.parametrize("name", ROWS)
def test_each_retraction_reaches_the_rows_own_turn(name):
    row = ROWS[name]
    h, f = rows()
    u, ratio = formulas.on_sphere(h, RADIUS)
    parts = formulas.turn(u, f, ratio, RADIUS)
    own = formulas.own_step(parts, RADIUS, row, row.p, None)
    assert float(own.excess.min()) >= 0
    angle = row.theta(own.log_alpha.exp() * parts.size / RADIUS, row.p)
    assert torch.allclose(angle + own.excess, parts.angle, atol=1e-9)
    within = own.excess == 0
    assert within.any()
    assert (parts.angle[~within] >= formulas.REACH * row.largest_angle - 1e-12).all()
    turned = retract(u, f, own.log_alpha.exp(), row)
    exact = formulas.exact(ratio * u, f, RADIUS)[0]
    assert torch.allclose(turned[within.squeeze(-1)], exact[within.squeeze(-1)], atol=1e-8)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("cap", [None, math.pi / 4])
def test_the_way_leads_from_the_sum_to_the_scheme(name, cap):
    row = ROWS[name]
    h, f = rows()
    # a branch along the stream turns nothing, and one against it turns by pi
    f[0], f[1] = 0.5 * h[0], -3 * h[1]
    u, ratio = formulas.on_sphere(h, RADIUS)
    alpha = torch.tensor([0.7], dtype=torch.float64)
    exact = formulas.exact(ratio * u, f, RADIUS)[0]
    # which way a row turns by exactly pi is open
    some = torch.arange(len(h)) != 1

    def at(t):
        return formulas.blend(u, f, ratio, RADIUS, alpha, torch.tensor(t).double(), row, row.p, cap)[0]

    assert torch.allclose(at(0.0)[some], exact[some], atol=1e-8)
    assert torch.allclose(at(1.0), retract(u, f, alpha, row, cap), atol=1e-9)
    for t in (0.0, 0.3, 0.9, 1.0):
        assert torch.allclose(at(t).norm(dim=-1), RADIUS.expand(len(h)), atol=1e-9)
        assert float((at(min(t + 1e-6, 1.0)) - at(max(t - 1e-6, 0.0)))[some].abs().max()) < 1e-4
    leaves = [x.clone().requires_grad_() for x in (u, f, ratio, alpha)]
    out, after = formulas.blend(*leaves[:3], RADIUS, leaves[3], torch.tensor(0.5).double(), row, row.p, cap)
    (out.square().sum() + out.sum() + after.sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
