"""The bridge from a kernel's own forward and backward to autograd and torch.compile; native and triton share it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from spheret.kernels import closed
from spheret.retractions import P, Retraction
from spheret.support.autograd import needs_torch_ops

# forward(h, f, alpha, p, kind, cap) -> out, kept
Forward = Callable[[Tensor, Tensor, P, P, str, "float | None"], tuple[Tensor, Tensor]]
# backward(g, h, f, alpha, p, kind, cap, kept) -> dh, df, dalpha, dp; the last two are sums, or one value per row
Backward = Callable[
    [Tensor, Tensor, Tensor, P, P, str, "float | None", Tensor], tuple[Tensor, Tensor, Tensor, Tensor]
]

# norm_forward(h, radius) -> out, kept;  norm_backward(g, h, radius, kept) -> dh, dradius
NormForward = Callable[[Tensor, P], tuple[Tensor, Tensor]]
NormBackward = Callable[[Tensor, Tensor, P, Tensor], tuple[Tensor, Tensor]]


def unsuited(
    h: Tensor, f: Tensor, row: Retraction, p: P, dtypes: Collection[torch.dtype], kinds: Collection[str]
) -> str | None:
    """The reason why a kernel for these dtypes and kinds of retraction cannot take this call, or None if it can."""
    if h.dtype not in dtypes or f.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes rows of {names}, got {h.dtype} and {f.dtype}."
    if row.kind not in kinds:
        return f"it has no code for {row.name!r}: this retraction runs on the closed backend."
    if isinstance(p, Tensor) and p.numel() != 1:
        return f"it takes one p for all rows, got a tensor of shape {tuple(p.shape)}."
    return None


class Fused:
    """A kernel's `retract` and `normalize` on contiguous rows.

    Eager mode runs an autograd.Function. torch.compile gets the ops `spheret::NAME_forward` and
    `spheret::NAME_backward`, with fake kernels and a registered gradient. A gradient that is itself differentiated
    takes the closed form's backward.
    """

    def __init__(
        self, name: str, forward: Forward, backward: Backward, norm_forward: NormForward, norm_backward: NormBackward
    ):
        self.forward, self.function = forward, _function(forward, backward)
        self.norm_function = _norm_function(norm_forward, norm_backward)
        self.forward_op, self.backward_op = _operators(name, forward, backward)

    def normalize(self, h: Tensor, radius: P) -> Tensor:
        return self.norm_function.apply(h, radius)

    def retract(self, h: Tensor, f: Tensor, alpha: P, row: Retraction, p: P, cap: float | None) -> Tensor:
        if torch.compiler.is_compiling():
            step, number = (0.0 if isinstance(x, Tensor) else float(x) for x in (alpha, p))
            steps, free = (x if isinstance(x, Tensor) else None for x in (alpha, p))
            return self.forward_op(h, f, steps, step, free, number, row.kind, cap)[0]
        if not torch.is_grad_enabled():
            # the overhead of autograd would dominate for the single rows of generation
            return self.forward(h.contiguous(), f.contiguous(), alpha, p, row.kind, cap)[0]
        return self.function.apply(h, f, alpha, p, row, cap)


def _function(forward: Forward, backward: Backward) -> type[torch.autograd.Function]:
    class Retract(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, f: Tensor, alpha: P, p: P, row: Retraction, cap: float | None) -> Tensor:
            out, kept = forward(h.contiguous(), f.contiguous(), alpha, p, row.kind, cap)
            ctx.row, ctx.cap = row, cap
            steps, ctx.alpha = (alpha, None) if isinstance(alpha, Tensor) else (None, alpha)
            free, ctx.p = (p, None) if isinstance(p, Tensor) else (None, p)
            ctx.save_for_backward(h, f, steps, free, kept)
            return out

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            h, f, alpha, p, kept = ctx.saved_tensors
            alpha, p = ctx.alpha if alpha is None else alpha, ctx.p if p is None else p
            if needs_torch_ops(g):
                return closed.for_inputs(ctx, alpha, p, *closed.gradients(g, h, f, alpha, p, ctx.row, ctx.cap))
            rows_g, rows_h, rows_f = (x.contiguous() for x in (g, h, f))
            grads = backward(rows_g, rows_h, rows_f, alpha, p, ctx.row.kind, ctx.cap, kept)
            return closed.for_inputs(ctx, alpha, p, *grads)

    return Retract


def _norm_function(forward: NormForward, backward: NormBackward) -> type[torch.autograd.Function]:
    class Normalize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, radius: P) -> Tensor:
            out, kept = forward(h.contiguous(), radius)
            ctx.radius = None if isinstance(radius, Tensor) else radius
            ctx.save_for_backward(h, radius if isinstance(radius, Tensor) else None, kept)
            return out

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            h, radius, kept = ctx.saved_tensors
            radius = ctx.radius if radius is None else radius
            if needs_torch_ops(g):
                dh, dradius = closed.norm_gradients(g, h, radius)
            else:
                dh, dradius = backward(g.contiguous(), h.contiguous(), radius, kept)
            learned = ctx.needs_input_grad[1] and isinstance(radius, Tensor)
            return dh, closed.reduce_to(dradius, radius) if learned else None

    return Normalize


def _operators(name: str, forward: Forward, backward: Backward) -> tuple[Any, Any]:
    @torch.library.custom_op(f"spheret::{name}_forward", mutates_args=())
    def forward_op(
        h: Tensor, f: Tensor, alpha: Tensor | None, step: float, p: Tensor | None, number: float, kind: str,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        a, b = step if alpha is None else alpha, number if p is None else p
        return forward(h.contiguous(), f.contiguous(), a, b, kind, cap)

    @forward_op.register_fake
    def _(
        h: Tensor, f: Tensor, alpha: Tensor | None, step: float, p: Tensor | None, number: float, kind: str,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n = h.numel() // h.shape[-1]
        return h.new_empty(h.shape), h.new_empty((n, 3), dtype=torch.float32)

    # an op returns only tensors, so the gradient of a plain number is a tensor without elements
    @torch.library.custom_op(f"spheret::{name}_backward", mutates_args=())
    def backward_op(
        g: Tensor, h: Tensor, f: Tensor, alpha: Tensor | None, step: float, p: Tensor | None, number: float,
        kind: str, cap: float | None, kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        a, b = step if alpha is None else alpha, number if p is None else p
        g, h, f = (x.contiguous() for x in (g, h, f))
        dh, df, dalpha, dp = backward(g, h, f, a, b, kind, cap, kept)
        none = h.new_empty(0)
        return (
            dh,
            df,
            none if alpha is None else closed.reduce_to(dalpha, alpha).clone(),
            none.clone() if p is None else closed.reduce_to(dp, p).clone(),
        )

    @backward_op.register_fake
    def _(
        g: Tensor, h: Tensor, f: Tensor, alpha: Tensor | None, step: float, p: Tensor | None, number: float,
        kind: str, cap: float | None, kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dalpha, dp = (h.new_empty(0) if x is None else torch.empty_like(x) for x in (alpha, p))
        return h.new_empty(h.shape), f.new_empty(f.shape), dalpha, dp

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        h, f, alpha, ctx.step, p, ctx.number, ctx.kind, ctx.cap = inputs
        ctx.save_for_backward(h, f, alpha, p, output[1])

    def gradient(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, kept = ctx.saved_tensors
        dh, df, dalpha, dp = backward_op(g, h, f, alpha, ctx.step, p, ctx.number, ctx.kind, ctx.cap, kept)
        needed = ctx.needs_input_grad
        return dh, df, dalpha if needed[2] else None, None, dp if needed[4] else None, None, None, None

    forward_op.register_autograd(gradient, setup_context=setup_context)
    return forward_op, backward_op
