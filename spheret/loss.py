"""Cross-entropy over a large vocabulary that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
# rows of logits held at a time: 256 x 50,304 float32 are 51 MB
ROWS = 256


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The head's logits of a few rows, in float32 or better; under autocast its product is autocast's."""
    logits = F.linear(h, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits + bias.to(logits.dtype)


@torch.no_grad()
def token_losses(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int = ROWS) -> Tensor:
    """The loss of every token, in the shape of targets and without a gradient; 0 where the target is ignored."""
    flat, wanted = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    parts = [
        F.cross_entropy(_logits(x, weight, bias), t, ignore_index=IGNORE, reduction="none")
        for x, t in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(parts).view(targets.shape)


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made with the loss, chunk by chunk, while the chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: Tensor, rows: int
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(h), rows):
            x, t = h[start : start + rows], targets[start : start + rows]
            live = t != IGNORE
            safe = torch.where(live, t, 0).unsqueeze(-1)
            logits = _logits(x, weight, bias)
            norm = logits.logsumexp(-1, keepdim=True)
            total += torch.where(live, (norm - logits.gather(-1, safe)).squeeze(-1), 0.0).sum()
            if dh is None and dweight is None and dbias is None:
                continue
            # softmax minus one at the target, over the number of tokens
            grad = (logits - norm).exp_()
            grad.scatter_add_(-1, safe, torch.full_like(norm, -1.0))
            grad *= (live.to(grad.dtype) / count).unsqueeze(-1)
            if dbias is not None:
                dbias += grad.sum(0)
            narrow = grad.to(_product_dtype(grad))
            if dh is not None:
                dh[start : start + rows] = narrow @ weight.to(narrow.dtype)
            if dweight is not None:
                dweight += narrow.T @ x.to(narrow.dtype)
        ctx.save_for_backward(dh, dweight, dbias)
        return total / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight, dbias = (None if x is None else x * g.to(x.dtype) for x in ctx.saved_tensors)
        return dh, dweight, dbias, None, None, None


def _product_dtype(x: Tensor) -> torch.dtype:
    """What autocast would multiply in; a CPU without bfloat16 arithmetic is a hundred times faster in float32."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or (device == "cpu" and not has_bfloat16()):
        return x.dtype
    return torch.get_autocast_dtype(device)


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cross_entropy(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int = ROWS) -> Tensor:
    """The mean of -log softmax(weight h + bias)[target] over the targets that are not ignored (-100).

    h: (..., d), weight: (vocab, d), targets: (...). Equal to torch's cross_entropy of the full logits, with its
    gradient; of the logits only `rows` rows exist at a time.
    """
    flat, wanted = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    count = (wanted != IGNORE).sum().clamp(min=1)
    return _CrossEntropy.apply(flat, weight, bias, wanted, count, rows)
