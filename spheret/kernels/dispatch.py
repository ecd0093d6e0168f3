"""One operation, `retract`, on several backends, and the one place that chooses between them.

`SPHERET_BACKEND` (read at import, checked at use) or `use(...)` fixes the backend. An explicit choice that cannot run
is an error, never a silent fallback. Without a choice, each call takes the first of BACKENDS that can serve it.
torch.export, torch.jit.trace and make_fx record the closed form, as plain torch ops.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from spheret.kernels import closed, native, reference, triton
from spheret.kernels.closed import compute_dtype
from spheret.kernels.fused import Fused
from spheret.retractions import PROJECTION, P, Retraction, as_retraction
from spheret.support.autograd import recorded, traced_transforms, transformed
from spheret.support.errors import unknown

__all__ = ["BACKENDS", "Backend", "check_rows", "chosen", "compute_dtype", "normalize", "retract", "serving", "use"]


class Backend(NamedTuple):
    """One implementation of `retract`.

    | field | meaning |
    |---|---|
    | `run(h, f, alpha, row, p, cap)` | the update |
    | `normalize(h, radius)` | radius h/|h| for each row |
    | `knows(row)` | whether the backend has code for this retraction |
    | `why_not(h, f, row, p)` | the reason why it cannot serve such a call, or None if it can |
    | `automatic(h)` | whether it may serve a call without an explicit choice |
    """

    run: Callable[[Tensor, Tensor, P, Retraction, P, float | None], Tensor]
    normalize: Callable[[Tensor, P], Tensor]
    knows: Callable[[Retraction], bool]
    why_not: Callable[[Tensor, Tensor, Retraction, P], str | None]
    automatic: Callable[[Tensor], bool]


def _reference(h: Tensor, f: Tensor, alpha: P, row: Retraction, p: P, cap: float | None) -> Tensor:
    dtype = compute_dtype(h, f)
    return reference.retract(h.to(dtype), f.to(dtype), alpha, row, p, cap).to(h.dtype)


def _needs_torch_ops(h: Tensor, f: Tensor) -> str | None:
    """The reason why the call must run as torch ops, not in a kernel that takes pointers, or None."""
    if transformed():
        return "torch.func transforms and forward-mode gradients run on the closed backend."
    for x in (h, f):
        if type(x) not in (Tensor, torch.nn.Parameter):
            return f"it takes plain tensors, got {type(x).__name__}."
    return None


def _fused(module: ModuleType, device: str) -> Backend:
    kernel: Fused = module.KERNEL
    return Backend(
        kernel.retract,
        kernel.normalize,
        lambda row: row.kind in module.KINDS,
        lambda h, f, row, p: _needs_torch_ops(h, f) or module.unsuited(h, f, row, p) or module.missing(),
        lambda h: h.device.type == device,
    )


# in order of preference
BACKENDS: dict[str, Backend] = {
    "triton": _fused(triton, "cuda"),
    "native": _fused(native, "cpu"),
    "closed": Backend(closed.retract, closed.normalize, lambda row: True, lambda h, f, row, p: None, lambda h: True),
    "reference": Backend(_reference, closed.normalize, lambda row: True, lambda h, f, row, p: None, lambda h: False),
}


def _check_name(name: str) -> str:
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    return name


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
        self.name = None if name is None else _check_name(name)
        self.before, _forced = _forced, self.name

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


def chosen(h: Tensor, f: Tensor, retraction: str | float | Retraction = "projection") -> str:
    """The name of the backend that `retract` takes for such a call.

    Args:
        h: the stream.
        f: the branch's output.
        retraction: as in `spheret.retract`.
    """
    row = as_retraction(retraction)
    return _choose(h, f, row, row.p)


def _choose(h: Tensor, f: Tensor, row: Retraction, p: P) -> str:
    check_environment()
    if recorded():
        return _choose_recorded()
    if torch.compiler.is_compiling():
        return _choose_traced(h, f, row, p)
    name = _choose_eager(h, f, row, p)
    if _serving is not None:
        _serving.add(name)
    return name


def _choose_eager(h: Tensor, f: Tensor, row: Retraction, p: P) -> str:
    if _forced is not None:
        reason = BACKENDS[_forced].why_not(h, f, row, p)
        if reason:
            raise RuntimeError(f"the {_forced} backend was asked for, but {reason}")
        return _forced
    for name, backend in BACKENDS.items():
        if backend.automatic(h) and not backend.why_not(h, f, row, p):
            return name
    raise AssertionError("the closed form serves every call")


_OPS: dict[str, ModuleType] = {"triton": triton, "native": native}


def _choose_recorded() -> str:
    """The backend for a graph that is recorded to be run elsewhere: one that consists of torch ops."""
    if _forced in _OPS:
        raise RuntimeError(
            f"the {_forced} backend was asked for, but torch.export, torch.jit.trace and make_fx record torch ops, "
            'not a kernel: record inside `with spheret.kernels.use("closed"):`, or unset SPHERET_BACKEND.'
        )
    return _forced or "closed"


def _choose_traced(h: Tensor, f: Tensor, row: Retraction, p: P) -> str:
    """The backend under torch.compile: the closed form is traced and fused with its neighbours, a kernel is an op.

    On CPUs the native kernel's op is taken, because Inductor's code for the closed form moves about twice as much
    memory there.
    """
    if _forced is not None:
        reason = _OPS[_forced].unsuited(h, f, row, p) if _forced in _OPS else None
        if reason:
            raise RuntimeError(f"the {_forced} backend was asked for, but {reason}")
        return _forced
    suited = h.device.type == "cpu" and native.unsuited(h, f, row, p) is None
    return "native" if suited and not traced_transforms() and native.ready() else "closed"


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


def retract_unchecked(h: Tensor, f: Tensor, alpha: P, row: Retraction, p: P, cap: float | None) -> Tensor:
    """`retract` without the checks; p is an argument beside its row, so that it can be a parameter."""
    return BACKENDS[_choose(h, f, row, p)].run(h, f, alpha, row, p, cap)


def retract(
    h: Tensor,
    f: Tensor,
    alpha: float | Tensor = 1.0,
    retraction: str | float | Tensor | Retraction | Callable[[Tensor], Tensor] = "projection",
    max_angle: float | None = None,
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

    Returns:
        The next state, computed in float32 or better, in the dtype of h.

    A row of zeros in h has no direction. It stays zero, its gradient passes through unchanged, and the gradient of f
    is 0 there. In float32 every row of norm below about 1e-22 counts as zero, because squares underflow. NaN in a row
    of h or f comes out as NaN in that row, and only there.

    Paper: Eq. 3 (GeoNorm), Eq. 6 (Proj-SpheretNorm), Eq. 9 (Cay-SpheretNorm) and Eq. 10 (p-SpheretNorm).
    """
    row = as_retraction(retraction)
    check_rows(h, f)
    if not isinstance(alpha, Tensor) and not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha}.")
    check_scalar("alpha", alpha, h)
    check_scalar("p", row.p, h)
    check_cap(max_angle)
    return retract_unchecked(h, f, alpha, row, row.p, max_angle)


def normalize(h: Tensor, radius: float | Tensor) -> Tensor:
    """radius h/|h| for each row, in h's dtype; radius is a number or a 1-element tensor. A zero row stays zero."""
    if torch.compiler.is_compiling() and not recorded():
        return closed.normalize(h, radius)
    return BACKENDS[_choose(h, h, PROJECTION, 1.0)].normalize(h, radius)
