"""What schemes put inside attention, MLP and head, and what the sublayers of a block share."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import x_transformers.x_transformers as xt
from safetensors.torch import load, save
from small_models import TINY, randomize, tokens

from spheret import GPT, GPTConfig, parameter_groups
from spheret.connections.ngpt import QueryKeyNorm

D, HEADS = TINY["width"], TINY["heads"]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def split(x):
    """(batch, time, width) as (batch, heads, time, d_k)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def ngpt_logits(model, ids):
    """nGPT as its paper states it, in torch's functions. Every scale is its parameter times s_init/s_scale."""
    root = math.sqrt(D)
    future = torch.full((ids.shape[1],) * 2, -math.inf, dtype=torch.float64).triu(1)
    embedding = model.tokens.weight
    h = unit(embedding[ids] + model.positions.weight[: ids.shape[1]])
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        q, k, v = F.linear(h, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
        s_qk = (attention.qkv_norm.weight * root).view(HEADS, 1, D // HEADS)
        q, k = s_qk * unit(split(q)), s_qk * unit(split(k))
        weights = torch.softmax(math.sqrt(D // HEADS) * q @ k.mT + future, dim=-1)
        h_attention = (weights @ split(v)).transpose(1, 2).flatten(2)
        h_attention = F.linear(h_attention, attention.output.weight, attention.output.bias)
        rate = (block.attention_connection.norm.a * 0.05 * root).abs()
        h = unit(h + rate * (unit(h_attention) - h))
        u = F.linear(h, mlp.hidden.weight, mlp.hidden.bias) * mlp.hidden_norm.weight * root
        h_mlp = F.linear(F.gelu(u), mlp.output.weight, mlp.output.bias)
        rate = (block.mlp_connection.norm.a * 0.05 * root).abs()
        h = unit(h + rate * (unit(h_mlp) - h))
    return h @ embedding.T * (model.logit_norm.weight * root)


class TestNGPT:
    def test_it_computes_the_published_formulas(self):
        model = randomize(GPT(GPTConfig(**TINY, scheme="ngpt")).double())
        x, y = tokens(), tokens(seed=1)
        truth = ngpt_logits(model, x)
        torch.testing.assert_close(model(x), truth, rtol=1e-9, atol=1e-12)
        loss = F.cross_entropy(truth.flatten(0, 1), y.flatten())
        torch.testing.assert_close(model(x, y), loss, rtol=1e-9, atol=0)
        got, wanted = (torch.autograd.grad(value, list(model.parameters())) for value in (model(x, y), loss))
        for mine, its in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-11)
        torch.testing.assert_close(
            model.token_losses(x, y), F.cross_entropy(truth.mT, y, reduction="none"), rtol=1e-9, atol=1e-12
        )

    def test_attention_equals_x_transformers_with_normalised_queries_and_keys(self):
        attention = randomize(GPT(GPTConfig(**TINY, scheme="ngpt", bias=False)).double()).blocks[0].attention
        other = xt.Attention(
            D, dim_head=D // HEADS, heads=HEADS, causal=True, qk_norm=True, qk_norm_dim_scale=True
        ).double()
        q, k, v = attention.qkv.weight.chunk(3)
        s = (math.sqrt(D) * attention.qkv_norm.weight).view(HEADS, 1, -1)
        # it divides the scores by sqrt(d_k), where nGPT multiplies them by it
        scales = {"qk_norm_q_scale": s * (D // HEADS), "qk_norm_k_scale": s}
        weights = {"to_q.weight": q, "to_k.weight": k, "to_v.weight": v, "to_out.weight": attention.output.weight}
        other.load_state_dict({**scales, **weights})
        x = torch.randn(2, 9, D, dtype=torch.float64)
        torch.testing.assert_close(attention(x), other(x), rtol=1e-9, atol=1e-12)

    def test_every_scale_starts_at_its_published_value(self):
        model = GPT(GPTConfig(**TINY, scheme="ngpt"))
        block, root = model.blocks[0], math.sqrt(D)
        # the parameter, its size, its start, and its effective start
        for part, size, start, effective in (
            (block.attention.qkv_norm, D, 1 / root, 1.0),
            (block.mlp.hidden_norm, 4 * D, 1.0, root),
            (model.logit_norm, 50, 1 / root, 1.0),
        ):
            assert part.weight.tolist() == pytest.approx([start] * size)
            if part is not block.attention.qkv_norm:
                torch.testing.assert_close(part(torch.ones(size)), torch.full((size,), effective))
        q, k, v = torch.randn(3, 1, HEADS, 5, D // HEADS).unbind()
        scaled_q, scaled_k, same = block.attention.qkv_norm(q, k, v)
        torch.testing.assert_close(scaled_k, unit(k))
        torch.testing.assert_close(scaled_q, D // HEADS * unit(q))
        assert same is v

    def test_its_matrices_are_normalised_before_the_first_step_and_after_each(self):
        def check(model):
            for block in model.blocks:
                for weight, dim in (
                    (model.tokens.weight, 1), (block.attention.qkv.weight, 1), (block.mlp.hidden.weight, 1),
                    (block.attention.output.weight, 0), (block.mlp.output.weight, 0),
                ):  # fmt: skip
                    torch.testing.assert_close(weight.norm(dim=dim), torch.ones(weight.shape[1 - dim]))

        model = GPT(GPTConfig(**TINY, scheme="ngpt"))
        check(model)
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.1)
        model(tokens(), tokens(seed=1)).backward()
        before = model.tokens.weight.detach().clone()
        optimizer.step()
        assert (model.tokens.weight - before).abs().max() > 0.01
        check(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        model.constrain()
        check(model)
        model.reset_parameters()
        check(model)

    def test_its_scales_are_computed_in_float32(self):
        norm = QueryKeyNorm(48, 4, dtype=torch.bfloat16)
        parts = torch.randn(3, 2, 4, 8, 12).unbind()
        halves = norm(*parts)
        assert all(torch.equal(got, wanted) for got, wanted in zip(halves, norm.float()(*parts), strict=True))


class TestSharedStep:
    """rezero: one learned step per block."""

    @pytest.fixture
    def model(self):
        return randomize(GPT(GPTConfig(**TINY, scheme="rezero")))

    def test_it_is_one_parameter_and_one_tensor(self, model):
        names = [name for name, p in model.named_parameters() if p.numel() == 1]
        assert names == [f"blocks.{block}.attention_connection.output_norm.weight" for block in (0, 1)]
        assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
        model(tokens(), tokens(seed=1)).backward()
        assert all(p.grad.abs().max() > 0 for p in model.parameters())

    def test_copies_files_and_empty_models_share_too(self, model):
        loaded = GPT(model.config)
        # safetensors refuses tensors that share memory
        loaded.load_state_dict(load(save(model.state_dict())))
        with torch.device("meta"):
            empty = GPT(model.config)
        empty.to_empty(device="cpu").reset_parameters()
        empty.load_state_dict(model.state_dict())
        with torch.device("meta"):
            assigned = GPT(model.config)
        assigned.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
        for twin in (copy.deepcopy(model), loaded, empty, assigned):
            assert torch.equal(twin(tokens()), model(tokens()))
            with torch.no_grad():
                twin.blocks[0].attention_connection.output_norm.weight.fill_(0.7)
            h, f = torch.randn(2, 5, D), torch.randn(2, 5, D)
            torch.testing.assert_close(twin.blocks[0].mlp_connection.write(h, f), h + 0.7 * f)
            assert model.blocks[0].attention_connection.output_norm.weight.item() != pytest.approx(0.7)
