"""The chunked loss: what torch computes of all logits at once, in every dtype, and where chunks end."""

import pytest
import torch
import torch.nn.functional as F
from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig
from spheret.model.loss import WIDE, WIDE_ROWS, cross_entropy, token_losses


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


class TestLoss:
    @pytest.mark.parametrize("head_bias", ["none", "zero"])
    @pytest.mark.parametrize(("rows", "ignored"), [(7, -100), (256, -100), (7, -1)])
    def test_chunks_change_nothing(self, head_bias, rows, ignored):
        """-1 is nanoGPT's mark of a target that does not count, -100 is torch's."""
        model = randomize(GPT(GPTConfig(**{**TINY, "head_bias": head_bias}, scheme="pre-ln")).double())
        x, y = tokens(), tokens(seed=1)
        y[0, :5] = y[2, 7] = ignored
        plain = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=ignored)
        truth = torch.autograd.grad(plain, list(model.parameters()))
        chunked = cross_entropy(model.stream(x), model.tokens.weight, model.head_bias, y, rows)
        got = torch.autograd.grad(3 * chunked, list(model.parameters()))
        torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=0)
        for a, b in zip(got, truth, strict=True):
            torch.testing.assert_close(a, 3 * b, rtol=1e-9, atol=1e-12)
        losses = token_losses(model.stream(x), model.tokens.weight, model.head_bias, y.int(), rows)
        torch.testing.assert_close(model.token_losses(x, y), losses)
        assert losses.shape == y.shape
        with torch.no_grad():
            torch.testing.assert_close(
                cross_entropy(model.stream(x), model.tokens.weight, model.head_bias, y, rows), plain
            )
        torch.testing.assert_close(losses.sum() / (y != ignored).sum(), plain)
        assert torch.equal(losses == 0, y == ignored)

    def test_memory(self):
        """The largest tensor of the loss is a chunk of logits, not all of them."""
        vocab, n, d = 4000, 2048, 16
        h, weight = torch.randn(n, d, requires_grad=True), torch.randn(vocab, d, requires_grad=True)
        targets = torch.randint(vocab, (n,))
        sizes = {}
        ways = {
            "plain": lambda: F.cross_entropy(h @ weight.T, targets),
            "chunked": lambda: cross_entropy(h, weight, None, targets),
        }
        for name, loss in ways.items():
            with torch.profiler.profile(profile_memory=True) as profile:
                loss().backward()
            sizes[name] = max(event.self_cpu_memory_usage for event in profile.events())
        assert sizes["chunked"] <= sizes["plain"] / 7
        assert sizes["plain"] >= 4 * n * vocab

    def test_half_precision_gradients_survive_a_loss_scale(self):
        """The chunks' gradients are of size 1 when they are rounded, not of size 1/tokens."""
        h, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(500, 16, requires_grad=True)
        targets = torch.randint(500, (4096,))
        truth = torch.autograd.grad(F.cross_entropy(h @ weight.T, targets), (h, weight))
        with torch.autocast("cpu", torch.float16), pytest.MonkeyPatch.context() as patch:
            patch.setattr("spheret.model.loss.has_bfloat16", lambda: True)
            loss = cross_entropy(h, weight, None, targets)
        for a, b in zip(torch.autograd.grad(65536 * loss, (h, weight)), truth, strict=True):
            assert (a / 65536 - b).norm() <= 2e-3 * b.norm()

    def test_half_precision_parameters_get_exact_sums(self):
        h, weight, bias = torch.randn(4096, 16), torch.randn(50, 16).bfloat16(), torch.zeros(50).bfloat16()
        targets = torch.randint(50, (4096,))
        inputs = [x.requires_grad_() for x in (h.bfloat16(), weight, bias)]
        got = torch.autograd.grad(cross_entropy(*inputs, targets, 64), inputs[1:])
        wide = [x.detach().double().requires_grad_() for x in inputs]
        logits = F.linear(*wide[:2]).to(torch.bfloat16).double() + wide[2]
        truth = torch.autograd.grad(F.cross_entropy(logits, targets), wide[1:])
        for a, b in zip(got, truth, strict=True):
            assert (a.double() - b).norm() <= 4e-3 * b.norm()

    def test_under_torch_func_and_twice(self):
        model = GPT(GPTConfig(**TINY, scheme="pre-ln")).double()
        x, y = tokens(), tokens(seed=1)
        weights = {k: v.detach() for k, v in model.named_parameters()}

        def loss(weights):
            return torch.func.functional_call(model, weights, (x, y))

        grads = torch.func.grad(loss)(weights)
        model(x, y).backward()
        torch.testing.assert_close(grads["tokens.weight"], model.tokens.weight.grad)
        h, weight, bias = (
            torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 3), (5, 3), (5,))
        )
        y = torch.tensor([0, -1, -100, 2])
        assert torch.autograd.gradgradcheck(lambda *x: cross_entropy(*x, y, 2), (h, weight, bias))
        assert torch.autograd.gradcheck(
            lambda *x: cross_entropy(*x, y, 2), (h, weight, bias), check_batched_grad=True
        )

    def test_other_negative_targets_are_errors(self):
        model = GPT(GPTConfig(**TINY))
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(tokens(), tokens(seed=1).masked_fill(tokens() == 3, -2))
