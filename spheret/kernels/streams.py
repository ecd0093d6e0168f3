"""What schemes with several streams or earlier states compute for every token, in few passes over memory.

In eager mode each function has a backward of its own. native.c has float32 sums of streams and Sinkhorn and Knopp's
loop on a CPU. All other calls are plain torch ops, which can be compiled, transformed and differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spheret.kernels import native
from spheret.kernels.dispatch import native_serves
from spheret.support.autograd import needs_torch_ops, plain_backward

# added to the entries that Sinkhorn and Knopp's loop starts from, and to its divisors, as in DeepSeek-V4
EPSILON = 1e-6
# of the columns, and 19 times of the rows and the columns
DIVISIONS = 39
# native.c holds all iterates of a few matrices on the stack
LARGEST_MATRIX = 8


def exact_products(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which matrix products have the dtype of their arguments, under autocast too."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class Rule(NamedTuple):
    """A function of tensors with a backward of its own.

    ops: the function in torch ops.
    forward: returns the output, and tensors that the backward needs beside the inputs.
    backward: takes the gradient, the inputs and these tensors, and returns the gradients of the inputs.
    """

    ops: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]


class _Ruled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *inputs: Tensor | None) -> Tensor:
        out, *kept = rule.forward(*inputs)
        ctx.rule, ctx.inputs = rule, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # read once, because a checkpoint computes them when they are read
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if not needs_torch_ops(g):
            return None, *ctx.rule.backward(g, *saved)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # views: an input may itself be a function of the others
            views = [None if x is None else x.view_as(x) for x in saved[: ctx.inputs]]
            wanted = [x for x, wants in zip(views, needed, strict=True) if x is not None and wants]
            grads = iter(torch.autograd.grad(ctx.rule.ops(*views), wanted, g, create_graph=again))
        return None, *(next(grads) if wants else None for wants in needed)


def mix(weights: Tensor, x: Tensor, post: Tensor | None = None, f: Tensor | None = None) -> Tensor:
    """weights x, (..., m, d), and with f plus the rows post_i f. All have one dtype.

    Args:
        weights: (..., m, n), or (m, n) for all tokens.
        x: the streams, (..., n, d).
        post: (..., m), or (m) for all tokens.
        f: (..., d).
    """
    return _Ruled.apply(_MIX, weights, x, post, f) if native_serves(x) else _mix(weights, x, post, f)


def _mix(weights: Tensor, x: Tensor, post: Tensor | None, f: Tensor | None) -> Tensor:
    with exact_products(x):
        # torch would copy all streams to multiply them with one matrix
        mixed = weights.expand(*x.shape[:-2], *weights.shape[-2:]) @ x
    return mixed if f is None or post is None else mixed + post.unsqueeze(-1) * f.unsqueeze(-2)


_MIX = Rule(_mix, lambda *inputs: (native.mix_forward(*inputs),), native.mix_backward)


def sinkhorn(logits: Tensor) -> Tensor:
    """A matrix (..., n, n) whose rows and columns sum to 1, nearly, by Sinkhorn and Knopp's alternating division."""
    if not native_serves(logits) or logits.shape[-1] > LARGEST_MATRIX:
        return _divide(logits.softmax(-1))
    # torch's softmax over so few entries takes longer than the loop
    return _Ruled.apply(_SINKHORN, (logits - logits.detach().amax(-1, keepdim=True)).exp())


def _divide(matrix: Tensor) -> Tensor:
    matrix = matrix + EPSILON
    for step in range(DIVISIONS):
        matrix = matrix / (matrix.sum(-1 if step % 2 else -2, keepdim=True) + EPSILON)
    return matrix


_SINKHORN = Rule(
    lambda start: _divide(start / start.sum(-1, keepdim=True)),
    lambda start: (native.sinkhorn(start, None, DIVISIONS, EPSILON).view(start.shape),),
    lambda g, start: (native.sinkhorn(start, g, DIVISIONS, EPSILON).view(start.shape),),
)


def normed_products(x: Tensor, vectors: Tensor, eps: float, centre: bool = False) -> Tensor:
    """The products of the normed rows (..., d) with vectors (m, d), as (..., m). Both have one dtype.

    centre: the rows are those of a LayerNorm without gain and bias, not of an RMSNorm.
    """
    if centre:
        # of a vector without its mean only the products with centred rows are left
        vectors = vectors - vectors.mean(-1, keepdim=True)
    if not plain_backward(x):
        return _products(x, vectors, eps, centre)
    options = {"eps": eps, "centre": centre}
    rule = Rule(*(partial(f, **options) for f in (_products, _products_forward, _products_backward)))  # type: ignore
    return _Ruled.apply(rule, x, vectors)


def _centred(x: Tensor, centre: bool) -> Tensor:
    return x - x.mean(-1, keepdim=True) if centre else x


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _products(x: Tensor, vectors: Tensor, eps: float, centre: bool) -> Tensor:
    x = _centred(x, centre)
    with exact_products(x):
        return (x @ vectors.mT) * _inverse_rms(x, eps)


def _products_forward(x: Tensor, vectors: Tensor, eps: float, centre: bool) -> tuple[Tensor, ...]:
    rows = _centred(x, centre).reshape(-1, x.shape[-1])
    inverse = _inverse_rms(rows, eps).squeeze(-1)
    with exact_products(x):
        # one row per vector: its parts are contiguous, and MKL is faster
        out = (vectors @ rows.mT).mul_(inverse)
    return out.view(len(vectors), *x.shape[:-1]).movedim(0, -1), out, inverse


def _products_backward(
    g: Tensor, x: Tensor, vectors: Tensor, out: Tensor, inverse: Tensor, eps: float, centre: bool
) -> tuple[Tensor, Tensor]:
    rows = _centred(x, centre).reshape(-1, x.shape[-1])
    g = g.movedim(-1, 0).reshape(out.shape)
    along = (g * out).sum(0).mul_(inverse.square()).mul_(-1 / x.shape[-1])
    of_products = g * inverse
    with exact_products(x):
        # the rows and the vectors have the mean 0 if they are centred, and so has their sum
        of_x = (along.unsqueeze(-1) * rows).addmm_(of_products.mT, vectors)
        return of_x.view(x.shape), of_products @ rows


def attend(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """sum_i p_i x_i with p = softmax_i <q, RMS(x_i)> for each vector q of (m, d), (..., m, d). All have one dtype.

    The backward puts the rows side by side once more, so that no copy of them is kept.
    """
    if not plain_backward(rows[0]):
        return _attend(query, *rows, eps=eps)
    rule = Rule(*(partial(f, eps=eps) for f in (_attend, _attend_forward, _attend_backward)))  # type: ignore
    return _Ruled.apply(rule, query, *rows)


def _attend(query: Tensor, *rows: Tensor, eps: float) -> Tensor:
    values = torch.stack(rows, -2)
    return _mix(_products(values, query, eps, False).mT.softmax(-1), values, None, None)


def _attend_forward(query: Tensor, *rows: Tensor, eps: float) -> tuple[Tensor, ...]:
    values = torch.stack(rows, -2)
    products, *kept = _products_forward(values, query, eps, False)
    shares = products.mT.softmax(-1)
    with torch.no_grad():
        return mix(shares, values), shares, *kept


def _attend_backward(g: Tensor, query: Tensor, *rest: Tensor, eps: float) -> tuple[Tensor | None, ...]:
    *rows, shares, products, inverse = rest
    values = torch.stack(rows, -2)
    if native_serves(values):
        of_shares, of_values, *_ = native.mix_backward(g, shares, values, None, None)
        assert of_shares is not None
        assert of_values is not None
    else:
        with exact_products(g):
            of_shares, of_values = g @ values.mT, shares.mT @ g
    of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
    of_rows, of_query = _products_backward(of_scores.mT, values, query, products, inverse, eps, False)
    return of_query, *of_rows.add_(of_values).unbind(-2)


def length(x: Tensor) -> Tensor:
    """|x| of the rows (..., d), as (..., 1). Its gradient at a row of zeros is 0."""
    return _Ruled.apply(_LENGTH, x) if plain_backward(x) else _length(x)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _length_backward(g: Tensor, x: Tensor, size: Tensor) -> tuple[Tensor]:
    return ((g / size).masked_fill_(size == 0, 0.0) * x,)


_LENGTH = Rule(_length, lambda x: (size := _length(x), size), _length_backward)
