"""The branches of a block, attention and MLP, and the block that joins them to the stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.connections import BranchShape, Scheme, State
from spheret.model.config import ACTIVATIONS, GPTConfig
from spheret.support.autograd import needs_torch_ops, plain_backward


class Cache:
    """Keys and values of the tokens seen so far: two tensors (batch, kv_heads, block, d) per layer.

    The model calls only `update` and `get_seq_length`, which transformers' caches have too.
    """

    def __init__(self, config: GPTConfig, batch: int, device: torch.device, dtype: torch.dtype):
        shape = (batch, config.shape.kv_heads, config.block, config.shape.head_dim)
        self.layers = [torch.empty(2, *shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.length = 0

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, ...]:
        """Append new keys and values to a layer's and return all of them. The last layer updates `length`."""
        past, end = self.layers[layer_idx], self.length + k.shape[2]
        past[0, :, :, self.length : end], past[1, :, :, self.length : end] = k, v
        if layer_idx == len(self.layers) - 1:
            self.length = end
        return past[:, :, :, :end].unbind()

    def get_seq_length(self) -> int:
        return self.length


# appends a layer's new keys and values, and returns all of them
Past = Callable[[Tensor, Tensor], Sequence[Tensor]]
# cosines and sines of the angles by which rotary positions turn, each (batch or 1, time, 1, head_dim/2)
Rotation = tuple[Tensor, Tensor]


def rotation(positions: Tensor, head_dim: int, base: float) -> Rotation:
    """The rotation of tokens at positions (time) or (batch, time): the i-th pair turns by position base^(-2i/d).

    It is computed in float32 in Llama's order, for models of any dtype, so that the values equal transformers'.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device).float()
    angles = positions[..., None].float() * (1.0 / base ** (pairs / head_dim))
    angles = angles.unsqueeze(-2) if positions.dim() > 1 else angles[None, :, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """x (batch, time, heads, d) with its i-th and (i + d/2)-th entries turned as one pair, as in Llama."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    # float32 angles make half rows float32 until the end
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def arrange(
    projected: Tensor, shape: BranchShape, inside: nn.Module | None, turn: Rotation | None
) -> Sequence[Tensor]:
    """q (batch, heads, time, d), and k and v (batch, kv_heads, time, d), from their projection (batch, time, all).

    inside: what maps q, k and v, see `Scheme.inside_attention`.
    """
    batch, time, _ = projected.shape
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    # taken apart before the heads move, so that the three gradients are put together in the projection's order
    parts = projected.view(batch, time, sum(heads), shape.head_dim).split(heads, dim=2)
    after = getattr(inside, "after_rotation", False)
    if inside is not None and not after:
        parts = _mapped(inside, parts)
    if turn is not None:
        q, k, v = parts
        # a part of the projection would keep all of it for the backward pass
        parts = rotate(q, turn), rotate(k, turn), v.clone() if inside is None or after else v
    if inside is not None and after:
        parts = _mapped(inside, parts)
    return tuple(part.transpose(1, 2) for part in parts)


def _mapped(inside: nn.Module, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The module inside attention takes the heads before the time."""
    return [part.transpose(1, 2) for part in inside(*(part.transpose(1, 2) for part in parts))]


class StackedLinear(nn.Linear):
    """A linear layer whose weight holds matrices of these heights one above the other: an optimiser reads `parts`.

    x is (batch, time, width), or (batch, time, matrices, width) with an input for each matrix.
    """

    def __init__(self, width: int, heights: tuple[int, ...], bias: bool):
        super().__init__(width, sum(heights), bias=bias)
        self.parts = heights

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 4:
            return super().forward(x)
        biases = [None] * len(self.parts) if self.bias is None else self.bias.split(self.parts)
        inputs = zip(x.unbind(-2), self.weight.split(self.parts), biases, strict=True)
        return torch.cat([F.linear(*each) for each in inputs], -1)


class Attention(nn.Module):
    """Causal self-attention, from (batch, time, width) to the same shape.

    qkv_norm: what the scheme or `qk_norm` puts between the projections and the scores.
    """

    def __init__(self, config: GPTConfig, qkv_norm: nn.Module | None = None):
        super().__init__()
        shape = config.shape
        self.shape, self.heads, self.dropout = shape, config.heads, config.dropout
        self.rope_base = config.rope_base if config.positions == "rope" else None
        heights = tuple(heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
        self.qkv = StackedLinear(shape.dim, heights, config.bias)
        self.qkv_norm = qkv_norm
        self.output = nn.Linear(config.width, config.width, bias=config.bias)

    def rotation(self, positions: Tensor) -> Rotation | None:
        """How rotary positions turn tokens at these positions, (time) or (batch, time); None without them."""
        return None if self.rope_base is None else rotation(positions, self.shape.head_dim, self.rope_base)

    def queries_keys_values(self, x: Tensor, turn: Rotation | None = None) -> Sequence[Tensor]:
        """q (batch, heads, time, d), and k and v (batch, kv_heads, time, d).

        turn: what `rotation` returns; by default the rotation of positions from 0 on.
        """
        if turn is None and self.rope_base is not None:
            turn = self.rotation(torch.arange(x.shape[1], device=x.device))
        return arrange(self.qkv(x), self.shape, self.qkv_norm, turn)

    def for_every_head(self, x: Tensor) -> Tensor:
        """Keys or values (batch, kv_heads, time, d) as (batch, heads, time, d), each repeated for its queries."""
        group = self.shape.heads // self.shape.kv_heads
        return x if group == 1 else x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)

    def weights(self, x: Tensor) -> Tensor:
        """The causal attention weights (batch, heads, time, time), before dropout."""
        q, k, _ = self.queries_keys_values(x)
        scores = q @ self.for_every_head(k).mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)

    def forward(
        self, x: Tensor, past: Past | None = None, mask: Tensor | None = None, turn: Rotation | None = None
    ) -> Tensor:
        batch, time, *_, width = x.shape
        q, k, v = self.queries_keys_values(x, turn)
        if past is not None:
            k, v = past(k, v)
        dropout = self.dropout if self.training else 0.0
        # without a mask a prompt attends causally, and a single new token attends to all tokens before it
        causal = mask is None and (past is None or time > 1)
        grouped = {"enable_gqa": True} if self.shape.kv_heads != self.heads else {}
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, **grouped)
        y = self.output(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) times the rest, from both side by side. It keeps only these, and writes one gradient of both."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, rest = hidden.chunk(2, dim=-1)
        return F.silu(gate).mul_(rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        gate, rest = hidden.chunk(2, dim=-1)
        if needs_torch_ops(g):
            share = gate.sigmoid()
            slope = share * (1 + gate * (1 - share))
            return torch.cat([g * rest * slope, g * F.silu(gate)], dim=-1)
        out = torch.empty_like(hidden)
        of_gate, of_rest = out.chunk(2, dim=-1)
        torch.mul(g, F.silu(gate), out=of_rest)
        torch.ops.aten.silu_backward.grad_input(g * rest, gate, grad_input=of_gate)
        return out


def activate(hidden: Tensor, kind: str, approximate: str = "none") -> Tensor:
    """The hidden layer of an MLP after its activation. kind: a word of MLPS. approximate: as in torch's GELU."""
    if kind == "swiglu":
        if plain_backward(hidden):
            return _SwiGLU.apply(hidden)
        gate, rest = hidden.chunk(2, dim=-1)
        return F.silu(gate) * rest
    if kind == "relu2":
        return F.relu(hidden).square()
    return F.gelu(hidden, approximate=approximate)


class MLP(nn.Module):
    """Two linear layers with an activation between them, which may be gated.

    hidden_norm: what the scheme puts before the activation, see `Scheme.inside_mlp`.
    """

    def __init__(self, config: GPTConfig, hidden_norm: nn.Module | None = None):
        super().__init__()
        shape = config.shape
        self.kind, self.approximate, self.dropout = config.mlp, ACTIVATIONS[config.activation], config.dropout
        heights = (shape.hidden,) * (2 if shape.gated else 1)
        self.hidden = StackedLinear(config.width, heights, config.bias)
        self.hidden_norm = hidden_norm
        self.output = nn.Linear(shape.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        y = self.output(activate(hidden, self.kind, self.approximate))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Two sublayers, attention and MLP. Each joins the stream through its own connection."""

    def __init__(self, config: GPTConfig, scheme: Scheme, index: int):
        super().__init__()
        shape, first, sublayers = config.shape, 2 * index + 1, 2 * config.layers
        inside = config.head_norm() or scheme.inside_attention(shape, first, sublayers)
        self.attention = Attention(config, inside)
        self.mlp = MLP(config, scheme.inside_mlp(shape, first + 1, sublayers))
        self.attention_connection, self.mlp_connection = scheme.connect_block(config.width, index + 1, config.layers)

    def forward(
        self, state: State, past: Past | None = None, mask: Tensor | None = None, turn: Rotation | None = None
    ) -> State:
        state = self.attention_connection(state, lambda x: self.attention(x, past, mask, turn))
        return self.mlp_connection(state, self.mlp)
