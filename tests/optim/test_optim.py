"""The optimiser of a training run."""

import inspect
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import (
    AdamW,
    Factors,
    Muon,
    build_optimizer,
    hidden_matrices,
    newton_schulz_flops,
    optimizer_groups,
    orthogonalized,
    parameter_groups,
    set_learning_rate,
    shared_out,
)

TINY = {"layers": 2, "heads": 2, "width": 16, "block": 16, "vocab": 64, "head": "tied", "head_bias": "none"}


@pytest.fixture
def without_dynamo(monkeypatch):
    """Every import of torch._dynamo is an error, also where an earlier test has imported it."""
    for method in (torch.optim.AdamW.add_param_group, torch.optim.AdamW.zero_grad):
        monkeypatch.delattr(inspect.unwrap(method), "__dynamo_disable", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)


def _train(optimizer_class):
    torch.manual_seed(0)
    model = GPT(GPTConfig(scheme="proj-spheretnorm", **TINY))
    optimizer = optimizer_class(parameter_groups(model, 0.1), lr=0.3, betas=(0.9, 0.95), fused=True)
    x = torch.randint(64, (2, 17))
    for _ in range(3):
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    return model


def test_an_update_does_not_import_dynamo(without_dynamo):
    _train(AdamW)


def test_it_is_torchs_adamw_to_the_bit_with_its_hooks():
    ours, theirs = _train(AdamW), _train(torch.optim.AdamW)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    # the hook after a step keeps the step sizes within their bounds: without it this rate would carry them out
    assert all(m.attention_connection.alpha.item() <= 1.0 for m in ours.each_block())
    assert all(float(b.attention_connection.norm.a.detach()) <= 0.5414 for b in ours.each_block())


def steps(optimizer, model, count=3):
    x = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def a_model(scheme="proj-spheretnorm"):
    torch.manual_seed(0)
    return GPT(GPTConfig(scheme=scheme, **TINY))


class Wide(torch.Tensor):
    """A gradient that keeps its dtype where torch.optim.Muon asks for bfloat16."""

    def bfloat16(self):
        return self.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_is_torchs_to_the_bit(dtype):
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 40), (16, 16), (1, 8)]
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    groups = [{"params": [each], "heights": (len(each),)} for each in ours]
    optimizers = (
        Muon(groups, lr=0.1, weight_decay=0.3),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            # a gradient of zeros moves nothing by itself
            mine.grad = torch.randn_like(mine) * (step != 1)
            other.grad = mine.grad.clone().as_subclass(Wide)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_a_stacked_weight_is_cut_into_its_matrices():
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(20, 8))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split((8, 8, 4))]
    ours = Muon([{"params": [whole], "heights": (8, 8, 4)}], lr=0.1, weight_decay=0.1)
    theirs = torch.optim.Muon(parts, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        whole.grad = torch.randn_like(whole)
        for part, grad in zip(parts, whole.grad.split((8, 8, 4)), strict=True):
            part.grad = grad.clone().as_subclass(Wide)
        ours.step()
        theirs.step()
    assert torch.equal(whole[:16], torch.cat(parts[:2]))
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6)


def test_bfloat16_is_torchs_own():
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.zeros(4, 6))
    matrix.grad = torch.randn(4, 6)
    # one step from 0 with rate 1, without momentum and decay, is the update itself
    torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    assert torch.equal(-matrix, orthogonalized(matrix.grad, torch.bfloat16).float())
    # on a CPU it is not used
    assert orthogonalized(matrix).dtype == torch.float32
    values = torch.linalg.svdvals(orthogonalized(torch.randn(12, 30)))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_every_matrix_of_a_modern_backbone_goes_to_muon_by_itself():
    model = GPT(GPTConfig.preset("modern-S", layers=1, heads=4, kv_heads=2, width=32, block=8, vocab=16))
    names = {weight: name.removeprefix("blocks.0.") for name, weight in model.named_parameters()}
    assert {names[weight]: heights for weight, heights in hidden_matrices(model).items()} == {
        "attention.qkv.weight": (32, 16, 16),
        "attention.output.weight": (32,),
        "mlp.hidden.weight": (96, 96),
        "mlp.output.weight": (32,),
    }
    assert all(sum(heights) == len(weight) for weight, heights in hidden_matrices(model).items())


def test_hidden_matrices_go_to_muon_and_all_else_to_adamw():
    model = a_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = {names[weight]: heights for weight, heights in hidden_matrices(model).items()}
    assert hidden == {
        f"blocks.{block}.{layer}.weight": heights
        for block in range(2)
        for layer, heights in {
            "attention.qkv": (16, 16, 16), "attention.output": (16,), "mlp.hidden": (64,), "mlp.output": (16,),
        }.items()
    }  # fmt: skip
    optimizer = build_optimizer(model, "muon", 1e-3, 0.1, (0.9, 0.95), torch.device("cpu"))
    held = [names[p] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(names.values())
    by_muon = {names[p] for group in optimizer.param_groups if group["heights"] is not None for p in group["params"]}
    assert by_muon == hidden.keys()
    for group in optimizer.param_groups:
        assert {group["weight_decay"]} == {0.1 if p.dim() >= 2 else 0.0 for p in group["params"]}
    steps(optimizer, model, 1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert sorted(optimizer.state[parameter]) == sorted(optimizer.state_names(group))


def test_adamw_groups_without_rules_change_no_bit():
    plain, grouped = a_model(), a_model()
    steps(AdamW(parameter_groups(plain, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True), plain)
    optimizer = build_optimizer(grouped, "adamw", 1e-2, 0.1, (0.9, 0.95), torch.device("cpu"))
    set_learning_rate(optimizer, 1e-2)
    steps(optimizer, grouped)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), grouped.parameters(), strict=True))


def test_factors_make_groups_of_their_own():
    model = a_model()
    factors = {"tokens.weight": Factors(0.5, 4.0, 0.25)}
    groups = optimizer_groups(model, 0.1, "adamw", factors)
    (own,) = [group for group in groups if any(p is model.tokens.weight for p in group["params"])]
    assert (own["lr_factor"], own["weight_decay"], own["eps"]) == (0.5, 0.4, 2.5e-9)
    assert len(own["params"]) == 1
    assert {group["lr_factor"] for group in groups if group is not own} == {1.0}


def test_muon_needs_no_dynamo_and_keeps_bounds_and_constraints(without_dynamo):
    model = a_model("ngpt")
    optimizer = build_optimizer(model, "muon", 0.3, 0.1, (0.9, 0.95), torch.device("cpu"))
    steps(optimizer, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    for block in model.each_block():
        assert torch.allclose(block.attention.qkv.weight.norm(dim=1), torch.ones(48), atol=1e-5)
        assert torch.allclose(block.mlp.output.weight.norm(dim=0), torch.ones(64), atol=1e-5)
    model = a_model()
    steps(build_optimizer(model, "muon", 0.3, 0.1, (0.9, 0.95), torch.device("cpu")), model)
    assert all(block.attention_connection.alpha.item() <= 1.0 for block in model.each_block())


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8), (24, 10)])
def test_flops_of_newton_schulz_are_what_torch_counts(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalized(torch.randn(shape))
    assert newton_schulz_flops(*shape) == counter.get_total_flops()


def test_processes_share_the_work_out_evenly():
    work = [30, 10, 30, 30] * 3
    for size in (1, 2, 3, 8):
        owners = shared_out(work, size)
        load = [sum(each for each, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(size)]
        assert sum(load) == sum(work)
        assert max(load) - min(load) <= 30
    assert shared_out([], 4) == []
