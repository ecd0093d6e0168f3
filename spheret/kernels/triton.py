"""The launcher of the CUDA kernels. The kernels are in triton_rows.py, which is imported at the first launch."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from spheret.kernels.fused import Kernel
from spheret.retractions import P
from spheret.support.autograd import constant_when_traced
from spheret.support.precision import widest

# the retractions that triton_rows.py has code for
KINDS = ("projection", "cayley", "angular", "exponential")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton can interpret its kernels in Python, slowly, which works on any device
DEVICE = None if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# rows up to this width stay in registers; wider rows are read in a loop over tiles
WHOLE_ROW = 8192
TILE = 2048
# the same for the backward with a gain, which holds the gain and the sums of its gradient in registers, too
NORMED_ROW = 4096
# tiles of rows per program of the backward with a gain: their share of the gain's gradient is one row of memory
STRIP = 16
# the scalars that the forward keeps per row: the powers of two that scale h and f, |h|^2, <h,f> and |z|^2
KEPT = 5


@functools.cache
def _missing() -> str | None:
    installed = importlib.util.find_spec("triton") is not None
    return None if installed else 'triton is not installed. Run: pip install "spheret[triton]"'


@constant_when_traced
def missing() -> str | None:
    """The reason why the Triton kernels are missing, or None if they are installed."""
    return _missing()


def shape(d: int, strip: int = 1) -> dict[str, Any]:
    """The tile for rows of width d: rows and columns per program, whether it loops, and the number of warps.

    strip: the number of tiles per program.
    """
    block = 1 << (d - 1).bit_length()
    loop = block > (WHOLE_ROW if strip == 1 else NORMED_ROW)
    block = TILE if loop else max(block, 16)
    return {
        "ROWS": max(1, 1024 // block),
        "BLOCK": block,
        "LOOP": loop,
        "num_warps": 4 if block <= 1024 else 8 if block <= 4096 // min(strip, 2) else 16,
    }


def programs(n: int, d: int, strip: int = 1) -> int:
    """How many programs go through n rows of width d, in strips of so many tiles."""
    rows = shape(d, strip)["ROWS"] * strip
    return (n + rows - 1) // rows


def _empty(h: Tensor, *shape: int) -> Tensor:
    """float32 memory on the device of the rows, independent of torch's default dtype and device."""
    return torch.empty(shape, dtype=torch.float32, device=h.device)


def _number(x: P) -> tuple[Tensor | None, float, int]:
    """Pointer, value and mode of an alpha or a p, as the kernels take them."""
    return (None, float(x), 0) if not isinstance(x, Tensor) else (x, 0.0, 1 if x.numel() == 1 else 2)


def _launch(
    kernel: Any, tensors: tuple[Tensor | None, ...], h: Tensor, alpha: P, p: P, gain: Tensor | None, kind: str,
    cap: float | None, strip: int | None = None,
) -> None:  # fmt: skip
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    if isinstance(alpha, Tensor) and alpha.numel() != 1:
        alpha = alpha.expand(*h.shape[:-1], 1).contiguous()
    if not isinstance(p, Tensor) and math.isinf(p):
        # the exponential map does not read p, and Triton would compile an infinity into the kernel
        p = 1.0
    alpha_ptr, alpha_value, alpha_mode = _number(alpha)
    p_ptr, p_value, p_mode = _number(p)
    # the backward goes through strips of tiles
    tile = shape(d) if strip is None else shape(d, strip) | {"STRIP": strip}
    # the kernel ignores these numbers of the cap where CAPPED is false
    limit = 4.0 if cap is None else cap
    kernel[(programs(n, d, strip or 1),)](
        *tensors, n, d, alpha_ptr, alpha_value, p_ptr, p_value,
        limit, -2.0 if cap is None else math.cos(cap), math.sin(limit),
        KIND=kind, CAPPED=cap is not None, ALPHA=alpha_mode, P=p_mode, GAIN=gain is not None, **tile,
    )  # fmt: skip


def forward(
    h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, kind: str, cap: float | None
) -> tuple[Tensor, Tensor]:
    """As native.forward."""
    from spheret.kernels import triton_rows

    out = torch.empty_like(h)
    kept = _empty(h, h.numel() // h.shape[-1], KEPT if gain is None else KEPT + 1)
    if h.numel():
        _launch(triton_rows.forward_rows, (h, f, gain, out, kept), h, alpha, p, gain, kind, cap)
    return out, kept


def backward(
    g: Tensor, h: Tensor, f: Tensor, alpha: P, p: P, gain: Tensor | None, kind: str, cap: float | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dh, df, dalpha and dp as (..., 1) float32, one value per row, and dgain."""
    from spheret.kernels import triton_rows

    dh, df = torch.empty_like(h), torch.empty_like(f)
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    sums, strip = _empty(h, n, 2), 1 if gain is None else STRIP
    gains = None if gain is None else _empty(h, programs(n, d, strip), d)
    if h.numel():
        tensors = (g, h, f, gain, kept, dh, df, sums, gains)
        _launch(triton_rows.backward_rows, tensors, h, alpha, p, gain, kind, cap, strip)
    dalpha, dp = (sums[:, i].reshape(*h.shape[:-1], 1) for i in (0, 1))
    return dh, df, dalpha, dp, None if gains is None else gains.sum(0, dtype=widest(h.device))


def _norm_launch(kernel: Any, tensors: tuple[Tensor, ...], radius: P) -> None:
    h = tensors[0]
    n, d = h.numel() // h.shape[-1], h.shape[-1]
    pointer, value, mode = _number(radius)
    tile = shape(d)
    del tile["LOOP"]
    kernel[(programs(n, d),)](*tensors, n, d, pointer, value, RADIUS=mode, **tile)


def norm_forward(h: Tensor, radius: P) -> tuple[Tensor, Tensor]:
    """radius h/|h| of contiguous rows, and of each row |h|^2 and the power of two that scales it."""
    from spheret.kernels import triton_rows

    out, kept = torch.empty_like(h), _empty(h, h.numel() // h.shape[-1], 2)
    if h.numel():
        _norm_launch(triton_rows.norm_forward_rows, (h, out, kept), radius)
    return out, kept


def norm_backward(g: Tensor, h: Tensor, radius: P, kept: Tensor) -> tuple[Tensor, Tensor]:
    """dh, and the gradient of radius as (..., 1), one value per row."""
    from spheret.kernels import triton_rows

    dh, sums = torch.empty_like(h), _empty(h, *h.shape[:-1], 1)
    if h.numel():
        _norm_launch(triton_rows.norm_backward_rows, (g, h, kept, dh, sums), radius)
    return dh, sums


KERNEL = Kernel("triton", DEVICE, DTYPES, KINDS, KEPT, missing, forward, backward, norm_forward, norm_backward)
