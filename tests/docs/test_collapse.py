"""docs/results/collapse.md: the identities of the mechanism, and the rule by which a run counts as collapsed."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from scripts import script

import spheret
from spheret import GPT, GPTConfig
from spheret.model.head import own_logit
from spheret.observe.measures import mean_cosine
from spheret.optim import AdamW, orthogonalized, update_scale

collapse_tables = script("docs/results/collapse_tables.py")
# it has imported the other one
collapse = sys.modules["collapse"]


def rows(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_writer_measures_the_common_part():
    linear = torch.nn.Linear(12, 8).double()
    writer = collapse.Writer(linear)
    y = (rows(50, 12) + 0.5).requires_grad_()
    # every token asks for the same, so the common part is all of the gradient
    (linear(y) @ rows(1, 8, seed=2)[0]).sum().backward()
    assert torch.allclose(writer.common(), linear.weight.grad)


def test_the_first_update_of_adam_moves_the_common_direction_by_the_formula():
    linear = torch.nn.Linear(12, 8, bias=False).double()
    y, lr = rows(50, 12) + 0.5, 1e-3
    optimizer = AdamW(linear.parameters(), lr=lr, weight_decay=0.0, eps=1e-30)
    before = linear(y).mean(0).detach()
    (linear(y) @ rows(1, 8, seed=2)[0]).sum().backward()
    optimizer.step()
    moved = (linear(y).mean(0) - before).norm().item()
    assert moved == pytest.approx(math.sqrt(8) * lr * y.mean(0).abs().sum().item(), rel=1e-6)


def test_muon_moves_a_common_direction_forty_times_less_at_width_64():
    # of a matrix of rank one, at the same learning rate: the largest singular value of the update
    common = torch.outer(rows(1, 64)[0], rows(1, 256, seed=1)[0]).float()
    adam = torch.linalg.matrix_norm(common.sign(), 2).item()
    muon = torch.linalg.matrix_norm(orthogonalized(common), 2).item() * update_scale(64, 256)
    assert adam == pytest.approx(math.sqrt(64 * 256))
    # Newton-Schulz leaves a singular value between 0.5 and 1.5
    assert 40 / 1.5 < adam / muon < 40 / 0.5


def test_a_sum_can_cancel_its_own_embedding_and_a_retraction_cannot():
    h = rows(5, 16)
    assert (h + -1.0 * h).norm() == 0
    # the part of f along h is dropped, so that nothing happens
    assert torch.allclose(spheret.retract(h, -3.0 * h, 0.7, "projection"), h)
    # what is orthogonal to h turns it away, and the part along h stays positive whatever the step is
    out = spheret.retract(h, 10 * rows(5, 16, seed=1), 1.0, "projection")
    assert (F.cosine_similarity(out, h) > 0).all()


def test_turning_towards_a_common_direction_costs_each_token_its_own_part():
    width, step = 16, 0.8
    h = torch.eye(width, dtype=torch.float64)[:2]
    f = step * torch.eye(width, dtype=torch.float64)[2].expand(2, -1)
    theta = math.atan(step)
    out = spheret.retract(h, f, 1.0, "projection")
    # what the tokens share grows by sin^2, what is their own shrinks by cos
    assert float(mean_cosine(out)) == pytest.approx(math.sin(theta) ** 2)
    assert out.diagonal().tolist() == pytest.approx([math.cos(theta)] * 2)
    # and the Jacobian contracts what is orthogonal to h and f by the same cos
    other = torch.eye(width, dtype=torch.float64)[5].expand(2, -1)
    _, moved = torch.func.jvp(lambda x: spheret.retract(x, f, 1.0, "projection"), (h,), (other,))
    assert torch.allclose(moved, math.cos(theta) * other)


def test_the_logit_of_the_token_itself_is_the_formula():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=4, width=64, block=16, vocab=320, head="tied", head_bias="none"))
    tokens = torch.randint(320, (4, 16))
    with torch.no_grad():
        h, embedding = model.stream(tokens), model.tokens(tokens)
        own = own_logit(model(tokens), tokens)
    std = collapse.initial_std(64)
    formula = math.sqrt(64) * std * math.sqrt(64) * F.cosine_similarity(h, embedding, dim=-1).mean().item()
    assert own == pytest.approx(formula, rel=0.1)


def test_the_maps_are_orthogonal_and_a_run_starts_with_the_weights_that_it_asks_for():
    for name in ("permutation", "orthogonal", "flip"):
        matrix = collapse.fixed_map(name, 16, 101).matrix
        assert torch.allclose(matrix @ matrix.mT, torch.eye(16), atol=1e-5)
    plain, scaled = (
        collapse.new_model(collapse.Run("map", "proj-spheretnorm", "tied", 101, start=start), None, 320)
        for start in ("0.02", "scaled")
    )
    assert plain.tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert scaled.tokens.weight.std().item() == pytest.approx(0.02 * math.sqrt(768 / 64), rel=0.02)
    assert torch.allclose(plain.tokens.weight * math.sqrt(12), scaled.tokens.weight)


def row(losses, cosines):
    run = collapse.Run("map", "proj-spheretnorm", "tied", 101)
    return collapse.Row(run, 3.0, 4.0, 3.0, losses, cosines, 3.0, [], 1.0, None, "2")


def test_a_run_counts_as_collapsed_by_the_rule():
    assert collapse_tables.collapsed(row([4.0, 3.0, 3.0], [0.1, 1.0, 1.0]))
    # it left the state
    assert not collapse_tables.collapsed(row([3.0, 2.5, 2.5], [1.0, 1.0, 0.2]))
    # it only learns slowly
    assert not collapse_tables.collapsed(row([4.0, 3.5, 3.4], [0.1, 0.2, 0.3]))
    # a loss that is not a number
    assert collapse_tables.collapsed(row([4.0, 3.0, None], [1.0, 1.0, 1.0]))


def test_every_committed_row_was_asked_for():
    asked = collapse.runs()
    assert len(asked) == len(set(asked))
    assert set(collapse.read_rows()) <= set(asked)
