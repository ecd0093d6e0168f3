"""The chunked loss where chunks end: wide models, rows that do not count, and no rows at all."""

import pytest
import torch
import torch.nn.functional as F

from spheret.model.loss import WIDE, WIDE_ROWS, cross_entropy, training_rows


def both(h, weight, bias, targets):
    """The loss and its gradients, ours and torch's."""
    results = []
    for function in (
        cross_entropy,
        lambda h, weight, bias, targets: F.cross_entropy(F.linear(h, weight, bias), targets),
    ):
        leaves = [x.clone().requires_grad_() for x in (h, weight, bias)]
        loss = function(*leaves, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    return results


@pytest.mark.parametrize("width", [8, WIDE])
@pytest.mark.parametrize("rows", [WIDE_ROWS - 1, WIDE_ROWS, WIDE_ROWS + 5])
def test_loss_and_gradients_are_torchs(width, rows):
    generator = torch.Generator().manual_seed(rows)
    h, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (rows, 11))
    bias, targets = torch.randn(11, generator=generator).double(), torch.randint(11, (rows,), generator=generator)
    targets[::3] = -100
    for ours, theirs in zip(*both(h, weight, bias, targets), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_rows_that_do_not_count_may_hold_anything():
    h, weight = torch.randn(4, 8), torch.randn(5, 8)
    h[1] = torch.inf
    targets, kept = torch.tensor([0, -100, 2, 3]), [0, 2, 3]
    ours, _ = both(h, weight, torch.zeros(5), targets)
    _, theirs = both(h[kept], weight, torch.zeros(5), targets[kept])
    assert torch.allclose(ours[0], theirs[0])
    assert torch.allclose(ours[1][kept], theirs[1], atol=1e-6)
    assert torch.allclose(ours[3], theirs[3], atol=1e-6)


def test_no_rows_have_zero_gradients():
    h, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    loss = cross_entropy(h, weight, None, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.abs().sum() == 0


def test_wide_models_hold_more_rows():
    assert training_rows(WIDE - 1) < training_rows(WIDE) == WIDE_ROWS
