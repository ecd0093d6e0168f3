"""The bridge from a kernel's own forward and backward to autograd and torch.compile; native and triton share it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spheret.kernels import closed
from spheret.retractions import P, Retraction
from spheret.support.autograd import needs_torch_ops, recorded, transformed


def _vector(gain: Tensor | None) -> Tensor | None:
    """The gain as the kernels take it: a contiguous float32 vector."""
    return None if gain is None else gain.detach().float().contiguous()


@dataclass(eq=False)
class Kernel:
    """A backend that is made from a kernel's functions of contiguous rows.

    | field | meaning |
    |---|---|
    | `name` | of the backend |
    | `device` | the type of device that it runs on; None for any |
    | `dtypes` | dtypes of the rows that it takes |
    | `kinds` | the retractions that it has code for, by their `kind` |
    | `kept` | how many float32 scalars per row its forward keeps; one more with a gain |
    | `missing()` | the reason why this machine does not have the kernel, or None if it does |
    | `forward(h, f, alpha, p, gain, kind, cap)` | returns out, kept |
    | `backward(g, h, f, alpha, p, gain, kind, cap, kept)` | returns dh, df, dalpha, dp, dgain |
    | `norm_forward(h, radius)` | returns out, kept |
    | `norm_backward(g, h, radius, kept)` | returns dh, dradius |

    dalpha, dp and dradius are sums, or have one value per row.
    Eager mode runs an autograd.Function. torch.compile gets the ops `spheret::NAME_forward` and
    `spheret::NAME_backward`, with fake kernels and a registered gradient. A gradient that is itself differentiated
    takes the closed form's backward.
    """

    name: str
    device: str | None
    dtypes: Collection[torch.dtype]
    kinds: Collection[str]
    kept: int
    missing: Callable[[], str | None]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Any]
    norm_forward: Callable[[Tensor, P], tuple[Tensor, Tensor]]
    norm_backward: Callable[[Tensor, Tensor, P, Tensor], tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        self.forward_op, self.backward_op = _operators(self)

    def knows(self, retraction: Retraction) -> bool:
        """Whether the kernel has code for this retraction."""
        return retraction.kind in self.kinds

    def why_not(self, h: Tensor, f: Tensor, retraction: Retraction, p: P) -> str | None:
        """The reason why the kernel cannot take such a call, or None if it can."""
        if h.device != f.device or self.device not in (None, h.device.type):
            return f"it runs on {self.device or 'one device'}, and the rows are on {h.device} and {f.device}."
        if recorded():
            return (
                "torch.export, torch.jit.trace and make_fx record torch ops, not a kernel: record inside "
                '`with spheret.kernels.use("closed"):`, or unset SPHERET_BACKEND.'
            )
        if transformed():
            return "torch.func transforms and forward-mode gradients run on the closed backend."
        for x in (h, f):
            if type(x) not in (Tensor, torch.nn.Parameter):
                return f"it takes plain tensors, got {type(x).__name__}."
        if h.dtype not in self.dtypes or f.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"it takes rows of {names}, got {h.dtype} and {f.dtype}."
        if not self.knows(retraction):
            return f"it has no code for {retraction.name!r}: this retraction runs on the closed backend."
        if isinstance(p, Tensor) and p.numel() != 1:
            return f"it takes one p for all rows, got a tensor of shape {tuple(p.shape)}."
        return self.missing()

    def retract(
        self, h: Tensor, f: Tensor, alpha: P, retraction: Retraction, p: P, cap: float | None, gain: Tensor | None
    ) -> Tensor:
        if torch.compiler.is_compiling():
            # an argument of an op is a tensor or a number, not either
            alpha, p = (x if isinstance(x, Tensor) else h.new_full((1,), x, dtype=torch.float64) for x in (alpha, p))
            return self.forward_op(h, f, alpha, p, gain, retraction.kind, cap)[0]
        if not torch.is_grad_enabled():
            # the overhead of autograd would dominate for the single rows of generation
            return self.forward(h.contiguous(), f.contiguous(), alpha, p, _vector(gain), retraction.kind, cap)[0]
        return _Retract.apply(h, f, alpha, p, gain, retraction, cap, self)

    def normalize(self, h: Tensor, radius: P) -> Tensor:
        return _Normalize.apply(h, radius, self)


class _Retract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, retraction: Retraction,
        cap: float | None, kernel: Kernel,
    ) -> Tensor:  # fmt: skip
        out, kept = kernel.forward(h.contiguous(), f.contiguous(), alpha, p, _vector(gain), retraction.kind, cap)
        ctx.retraction, ctx.cap, ctx.kernel = retraction, cap, kernel
        closed.save(ctx, h, f, alpha, p, gain, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, gain, (kept,) = closed.saved(ctx)
        if needs_torch_ops(g):
            grads = closed.gradients(g, h, f, alpha, p, gain, ctx.retraction, ctx.cap)
        else:
            rows = (x.contiguous() for x in (g, h, f))
            grads = ctx.kernel.backward(*rows, alpha, p, _vector(gain), ctx.retraction.kind, ctx.cap, kept)
        return *closed.for_inputs(ctx, alpha, p, gain, *grads), None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, radius: P, kernel: Kernel) -> Tensor:
        out, kept = kernel.norm_forward(h.contiguous(), radius)
        ctx.radius, ctx.kernel = None if isinstance(radius, Tensor) else radius, kernel
        ctx.save_for_backward(h, radius if isinstance(radius, Tensor) else None, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, radius, kept = ctx.saved_tensors
        radius = ctx.radius if radius is None else radius
        if needs_torch_ops(g):
            dh, dradius = closed.norm_gradients(g, h, radius)
        else:
            dh, dradius = ctx.kernel.norm_backward(g.contiguous(), h.contiguous(), radius, kept)
        learned = ctx.needs_input_grad[1] and isinstance(radius, Tensor)
        return dh, closed.reduce_to(dradius, radius) if learned else None, None


def _operators(kernel: Kernel) -> tuple[Any, Any]:
    """The ops of a kernel, for torch.compile."""

    @torch.library.custom_op(f"spheret::{kernel.name}_forward", mutates_args=())
    def forward_op(
        h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, gain: Tensor | None, kind: str, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        return kernel.forward(h.contiguous(), f.contiguous(), alpha, p, _vector(gain), kind, cap)

    @forward_op.register_fake
    def _(h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, gain: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        kept = (h.numel() // h.shape[-1], kernel.kept + (gain is not None))
        return h.new_empty(h.shape), h.new_empty(kept, dtype=torch.float32)

    # an op returns only tensors, so the gradient of a gain that is None is a tensor without elements
    @torch.library.custom_op(f"spheret::{kernel.name}_backward", mutates_args=())
    def backward_op(
        g: Tensor, h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, gain: Tensor | None, kind: str,
        cap: float | None, kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows = (x.contiguous() for x in (g, h, f))
        dh, df, dalpha, dp, dgain = kernel.backward(*rows, alpha, p, _vector(gain), kind, cap, kept)
        dalpha, dp = closed.reduce_to(dalpha, alpha).clone(), closed.reduce_to(dp, p).clone()
        return dh, df, dalpha, dp, h.new_empty(0) if gain is None else dgain.to(gain.dtype, copy=True)

    @backward_op.register_fake
    def _(
        g: Tensor, h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, gain: Tensor | None, *_: Any
    ) -> tuple[Tensor, ...]:
        dgain = h.new_empty(0) if gain is None else torch.empty_like(gain)
        return h.new_empty(h.shape), f.new_empty(f.shape), torch.empty_like(alpha), torch.empty_like(p), dgain

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.kind, ctx.cap = inputs
        ctx.save_for_backward(*tensors, output[1])

    def gradient(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        grads = backward_op(g, *tensors, ctx.kind, ctx.cap, kept)
        needed = ctx.needs_input_grad[: len(grads)]
        return *(x if wanted else None for x, wanted in zip(grads, needed, strict=True)), None, None

    forward_op.register_autograd(gradient, setup_context=setup_context)
    return forward_op, backward_op
