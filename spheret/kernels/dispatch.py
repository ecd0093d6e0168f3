"""One operation, `retract`, on several backends, and the one place that chooses between them.

`SPHERET_BACKEND` (read at import, checked at use) or `use(...)` fixes the backend. An explicit choice that cannot run
is an error, never a silent fallback. Without a choice, each call takes the kernel of its device if that can serve it,
else the closed form. torch.export, torch.jit.trace and make_fx record the closed form, as plain torch ops.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.kernels import closed, native, reference, triton
from spheret.kernels.closed import compute_dtype
from spheret.kernels.fused import Kernel
from spheret.retractions import PROJECTION, P, Retraction, as_retraction
from spheret.support.autograd import recorded
from spheret.support.errors import unknown

__all__ = ["BACKENDS", "check_rows", "chosen", "compute_dtype", "normalize", "retract", "serving", "use"]


class TorchOps(NamedTuple):
    """A backend in torch ops, which serves every call and knows every retraction. Its methods are a Kernel's."""

    retract: Callable[[Tensor, Tensor, P, Retraction, P, float | None, Tensor | None], Tensor]
    normalize: Callable[[Tensor, P], Tensor] = closed.normalize
    why_not: Callable[[Tensor, Tensor, Retraction, P], str | None] = lambda *_: None
    knows: Callable[[Retraction], bool] = lambda _: True


BACKENDS: dict[str, Kernel | TorchOps] = {
    "triton": triton.KERNEL,
    "native": native.KERNEL,
    "closed": TorchOps(closed.retract),
    "reference": TorchOps(reference.retract),
}


# the largest float
_LARGEST = sys.float_info.max
_VARIABLE = "SPHERET_BACKEND"
_forced: str | None = os.environ.get(_VARIABLE) or None


def check_environment() -> None:
    """Raise if SPHERET_BACKEND names no backend. It is not asked at import, so that `--help` answers all the same."""
    if _forced is not None and _forced not in BACKENDS:
        raise unknown(f"backend in the environment variable {_VARIABLE}:", _forced, BACKENDS)


class use:
    """Fix the backend: `use("closed")` from here on, `with use("closed"):` inside a block.

    `use(None)` gives the choice back to the library.

    Args:
        name: a name of BACKENDS, or None.
    """

    def __init__(self, name: str | None):
        global _forced
        if name is not None and name not in BACKENDS:
            raise unknown("backend", name, BACKENDS)
        self.name, self.before = name, _forced
        _forced = name

    def __enter__(self) -> None:
        global _forced
        _forced = self.name

    def __exit__(self, *_: object) -> None:
        global _forced
        _forced = self.before


# the names of the backends that serve calls, while someone wants to know
_serving: set[str] | None = None


@contextmanager
def serving() -> Iterator[set[str]]:
    """A context that yields a set, filled with the name of every backend that serves a call inside it.

    A graph that torch.compile has traced makes no calls.
    """
    global _serving
    before, _serving = _serving, set()
    try:
        yield _serving
    finally:
        _serving = before


def chosen(h: Tensor, f: Tensor, retraction: str | float | Retraction = "projection", p: P | None = None) -> str:
    """The name of the backend that `retract` takes for such a call.

    Args:
        h: the stream.
        f: the branch's output.
        retraction: as in `spheret.retract`.
        p: its p, if it is not the retraction's own.
    """
    check_environment()
    compiling, retraction = torch.compiler.is_compiling(), as_retraction(retraction)
    # Inductor fuses the closed form with its neighbours; on CPUs its code still moves twice the memory of native's op
    kernels = {"cpu": "native"} if compiling else {"cpu": "native", "cuda": "triton"}
    name = _forced or kernels.get(h.device.type, "closed")
    reason = BACKENDS[name].why_not(h, f, retraction, retraction.p if p is None else p)
    if reason and _forced:
        raise RuntimeError(f"the {name} backend was asked for, but {reason}")
    name = "closed" if reason else name
    if _serving is not None and not compiling:
        _serving.add(name)
    return name


def native_serves(x: Tensor) -> bool:
    """Whether native.c computes with these float32 rows, where there is no backend but it and torch ops."""
    if _forced not in (None, "native") or torch.compiler.is_compiling() or x.dtype != torch.float32:
        return False
    if native.KERNEL.why_not(x, x, PROJECTION, 1.0):
        return False
    if _serving is not None:
        _serving.add("native")
    return True


def check_rows(h: Tensor, f: Tensor, dim: int | None = None) -> None:
    """Check that h and f are floating-point tensors of the same shape, at least 2 wide."""
    for name, x in (("h", h), ("f", f)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {x.dtype}: convert it first, e.g. {name}.float().")
    if h.shape != f.shape:
        raise ValueError(
            f"h and f must have the same shape, got {tuple(h.shape)} and {tuple(f.shape)}: "
            "the branch must return the width of the stream."
        )
    if h.dim() == 0 or h.shape[-1] < 2:
        raise ValueError(f"rows must be at least 2 wide to turn on a sphere, got shape {tuple(h.shape)}.")
    if dim is not None and h.shape[-1] != dim:
        places = [place for place, size in enumerate(h.shape) if size == dim]
        hint = f": its {dim} channels are in dimension {places[0]}, so give channel_dim={places[0]}" if places else ""
        raise ValueError(f"this connection was built for rows of width {dim}, got shape {tuple(h.shape)}{hint}.")


def check_scalar(name: str, x: float | Tensor, h: Tensor) -> None:
    """Check that x is a number, or a floating-point tensor with one value or one value per row."""
    if not isinstance(x, Tensor):
        return
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {x.dtype}.")
    if x.dim() <= 1 and x.numel() == 1:
        return
    rows = (*h.shape[:-1], 1)
    sizes = zip(reversed(x.shape), reversed(rows), strict=False)
    if x.dim() > h.dim() or not all(length in (1, size) for length, size in sizes):
        raise ValueError(
            f"{name} must be a number or broadcast against the rows {rows}, got shape {tuple(x.shape)}: "
            "its last dimension must be 1."
        )


def check_cap(max_angle: float | None) -> None:
    """Check that max_angle is None or an angle that can cap a turn."""
    if max_angle is not None and not 0 < max_angle <= math.pi:
        raise ValueError(f"max_angle must be None or lie in (0, pi], got {max_angle}.")


def check_gain(gain: Tensor | None, h: Tensor) -> None:
    """Check that gain is None or one floating-point number per channel."""
    if gain is None:
        return
    if not isinstance(gain, Tensor) or not gain.is_floating_point() or gain.shape != h.shape[-1:]:
        what = f"{gain.dtype} of shape {tuple(gain.shape)}" if isinstance(gain, Tensor) else type(gain).__name__
        raise ValueError(f"gain must be a floating-point tensor of shape ({h.shape[-1]},), got {what}.")


def retract_unchecked(
    h: Tensor, f: Tensor, alpha: P, retraction: Retraction, p: P, cap: float | None, gain: Tensor | None = None
) -> Tensor:
    """`retract` without the checks; p is an argument beside its retraction, so that it can be a parameter."""
    return BACKENDS[chosen(h, f, retraction, p)].retract(h, f, alpha, retraction, p, cap, gain)


def retract(
    h: Tensor,
    f: Tensor,
    alpha: float | Tensor = 1.0,
    retraction: str | float | Tensor | Retraction | Callable[[Tensor], Tensor] = "projection",
    max_angle: float | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Turn each row of h towards f on the sphere through h: the functional core. ::

        c = <h,f>/<h,h>    z = f - c h    beta = alpha |z|/|h|
        theta = min(theta(beta), max_angle)
        out = cos(theta) h + |h| sin(theta) z/|z|    so that |out| = |h|

    Args:
        h: the stream, (..., d) of any floating dtype, d >= 2.
        f: the branch's output, of the shape of h.
        alpha: the step size, a number, or a tensor that broadcasts against the rows with last dimension 1. A tensor
            gets a gradient.
        retraction: a name of RETRACTIONS, a number p > 0 (inf is the exponential map), a tensor p to learn,
            a Retraction, or a function theta(beta).
        max_angle: the largest turn in radians, in (0, pi]; None for no limit.
        gain: a vector (d,). f is normed first: gain f/sqrt(mean f^2 + 2^-23) takes its place, in the same kernel.

    Returns:
        The next state, computed in float32 or better, in the dtype of h.

    A row of zeros in h has no direction. It stays zero, its gradient passes through unchanged, and the gradient of f
    is 0 there. All other rows keep their digits, from the smallest numbers of their dtype to the largest. NaN or
    infinity in a row of h or f comes out as NaN in that row, and only there.

    Paper: Eq. 3 (GeoNorm), Eq. 6 (Proj-SpheretNorm), Eq. 9 (Cay-SpheretNorm) and Eq. 10 (p-SpheretNorm).
    """
    retraction = as_retraction(retraction)
    check_rows(h, f)
    # NaN, infinity, and integers beyond any float
    if not isinstance(alpha, Tensor) and not abs(alpha) <= _LARGEST:
        raise ValueError(f"alpha must be finite, got {alpha}.")
    check_scalar("alpha", alpha, h)
    check_scalar("p", retraction.p, h)
    check_cap(max_angle)
    check_gain(gain, h)
    return retract_unchecked(h, f, alpha, retraction, retraction.p, max_angle, gain)


def normalize(h: Tensor, radius: float | Tensor) -> Tensor:
    """radius h/|h| for each row, in h's dtype; radius is a number or a 1-element tensor. A zero row stays zero."""
    if torch.compiler.is_compiling() and not recorded():
        return closed.normalize(h, radius)
    return BACKENDS[chosen(h, h, PROJECTION)].normalize(h, radius)
