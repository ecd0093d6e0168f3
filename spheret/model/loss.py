"""Cross-entropy over a large vocabulary. It never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spheret.support.autograd import needs_torch_ops, recorded, transformed

# targets that are left out: torch's default, and nanoGPT's
IGNORE, NANOGPT_IGNORE = -100, -1
# rows of logits held at a time: 256 x 50,304 float32 are 51 MB
ROWS = 256
# the same while a wide model trains, 206 MB: products of few rows are slow, 4 % of a step of modern-S on a CPU
WIDE, WIDE_ROWS = 512, 1024


def training_rows(width: int) -> int:
    """Rows of logits held at a time while a model of this width trains."""
    return WIDE_ROWS if width >= WIDE else ROWS


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits of a few rows, in float32 or better. Under autocast the product runs in autocast's dtype."""
    logits = F.linear(h, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits + bias.to(logits.dtype)


def _flat(h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if targets.shape != h.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of the tokens, {tuple(h.shape[:-1])}, got {tuple(targets.shape)}."
        )
    flat = targets.reshape(-1).long()
    return h.reshape(-1, h.shape[-1]), flat.masked_fill(flat == NANOGPT_IGNORE, IGNORE)


def _row_losses(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int) -> Tensor:
    parts = [
        F.cross_entropy(_logits(x, weight, bias), t, ignore_index=IGNORE, reduction="none")
        for x, t in zip(h.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def token_losses(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int = ROWS) -> Tensor:
    """The loss of every token, in the shape of targets, without a gradient. It is 0 where the target is ignored."""
    flat, flat_targets = _flat(h, targets)
    return _row_losses(flat, weight, bias, flat_targets, rows).view(targets.shape)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of each row, which may overwrite the logits, and the logarithm of its denominator."""
    if len(logits) <= ROWS:
        norm = logits.logsumexp(-1, keepdim=True)
        return logits.sub_(norm).exp_(), norm
    # half the time for many rows. Other last bits, so that small models keep what theirs have always been
    probability = logits.softmax(-1)
    return probability, logits.amax(-1, keepdim=True) - probability.amax(-1, keepdim=True).log()


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradient together with the loss, chunk by chunk, while the chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: Tensor, rows: int
    ) -> Tensor:
        wide = torch.promote_types(h.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=h.device)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dweight = None
        dbias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        product = _product_dtype(h)
        for start in range(0, max(len(h), 1), rows):
            x, t = h[start : start + rows], targets[start : start + rows]
            live = t != IGNORE
            safe = torch.where(live, t, 0).unsqueeze(-1)
            logits = _logits(x, weight, bias)
            own = logits.gather(-1, safe)
            grad, norm = _softmax(logits)
            total += torch.where(live, (norm - own).squeeze(-1), 0.0).sum()
            # softmax minus one at the target; the division by the count comes later, so that the entries are of size
            # 1 and half precision can represent them
            grad.scatter_add_(-1, safe, torch.full_like(norm, -1.0))
            grad.masked_fill_(~live.unsqueeze(-1), 0.0)
            if dbias is not None:
                dbias += grad.sum(0)
            with torch.autocast(h.device.type, enabled=False):
                narrow = grad.to(product)
                if dh is not None:
                    dh[start : start + rows] = (narrow @ weight.to(product)).to(wide) / count
                if ctx.needs_input_grad[1]:
                    part = narrow.T @ x.to(product)
                    dweight = part.to(wide) if dweight is None else dweight.add_(part)
        dweight = None if dweight is None else dweight.div_(count).to(weight.dtype)
        dbias = None if dbias is None else dbias.div_(count).to(bias.dtype)  # type: ignore[union-attr]
        ctx.save_for_backward(dh, dweight, dbias, h, weight, bias, targets, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, h, weight, bias, targets, count = ctx.saved_tensors
        if needs_torch_ops(g):
            dh, dweight, dbias = _gradients(g, h, weight, bias, targets, count)
            return dh, dweight, None if bias is None else dbias, None, None, None
        return *(None if x is None else x * g.to(x.dtype) for x in gradients), None, None, None


def _gradients(
    g: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same gradients in torch ops that can be differentiated again. They hold all logits at once."""
    probability = _logits(h, weight, bias).softmax(-1)
    live = (targets != IGNORE).unsqueeze(-1)
    one = torch.zeros_like(probability).scatter(-1, torch.where(live, targets.unsqueeze(-1), 0), 1.0)
    grad = (probability - one) * live * (g / count)
    return (
        (grad @ weight.to(grad.dtype)).to(h.dtype),
        (grad.T @ h.to(grad.dtype)).to(weight.dtype),
        grad.sum(0).to((weight if bias is None else bias).dtype),
    )


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, but float32 on a CPU without bfloat16 arithmetic.

    There float32 is a hundred times faster.
    """
    device = x.device.type
    wide = torch.promote_types(x.dtype, torch.float32)
    if not torch.is_autocast_enabled(device) or (device == "cpu" and not has_bfloat16()):
        return wide
    return torch.get_autocast_dtype(device)


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def cross_entropy(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int | None = None) -> Tensor:
    """The mean of -log softmax(weight h + bias)[target] over the targets that are not ignored (-100 and -1).

    h: (..., d), weight: (vocab, d), targets: (...). The loss and its gradient equal those of torch's cross_entropy of
    the full logits. Only `rows` rows of logits (`training_rows` by default) exist at a time, unless the gradient is
    itself differentiated. Under torch.func it consists of plain torch ops.
    """
    rows = training_rows(weight.shape[1]) if rows is None else rows
    flat, flat_targets = _flat(h, targets)
    count = (flat_targets != IGNORE).sum().clamp(min=1)
    if recorded():
        # a loop over chunks would fix the number of rows in the graph
        logits = _logits(flat, weight, bias)
        return F.cross_entropy(logits, flat_targets, ignore_index=IGNORE, reduction="sum") / count
    if not torch.is_grad_enabled() or transformed():
        return _row_losses(flat, weight, bias, flat_targets, rows).sum() / count
    return _CrossEntropy.apply(flat, weight, bias, flat_targets, count, rows)
