"""The arithmetic of midpoints and radii, on pairs of plain tensors: see balls.py for what they mean.

A radius of None is 0. Every function returns the rounded result and a radius that covers its rounding and the radii
of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

U = 2.0**-53
# the accuracy that is assumed of torch's exp, erf, tanh, sin, cos, asin and atan; the tests measure less than 2
ULPS = 4
LIBRARY = 2 * ULPS * U
# a radius is itself computed with a few roundings
UP = 1 + 32 * U
# no product that underflows loses more
TINY = 1e-300
Raw = tuple[Tensor, Tensor | None]


def gamma(n: int) -> float:
    """The relative error of a sum or a dot product of n terms in any order, a little enlarged."""
    return (n + 2) * U / (1 - (n + 2) * U)


def _plus(*parts: Tensor | None) -> Tensor | None:
    total = None
    for part in parts:
        total = part if total is None else total if part is None else total + part
    return total


def add(a: Raw, b: Raw) -> Raw:
    mid = a[0] + b[0]
    rad = mid.abs() * U
    for part in (a[1], b[1]):
        rad = rad if part is None else rad + part
    return mid, rad * UP


def mul(a: Raw, b: Raw) -> Raw:
    mid = a[0] * b[0]
    rad = mid.abs() * U
    if a[1] is not None:
        size = b[0].abs()
        rad = rad + a[1] * (size if b[1] is None else size + b[1])
    if b[1] is not None:
        rad = rad + a[0].abs() * b[1]
    return mid, rad * UP + TINY


def div(a: Raw, b: Raw) -> Raw:
    mid = a[0] / b[0]
    size = mid.abs()
    rad = size * U
    least = b[0].abs() if b[1] is None else b[0].abs() - b[1]
    error = _plus(a[1], None if b[1] is None else size * UP * b[1])
    if error is not None:
        rad = rad + error / least
    rad = rad * UP + TINY
    return mid, rad if b[1] is None else torch.where(least > 0, rad, math.inf)


def matmul(a: Raw, b: Raw) -> Raw:
    n = a[0].shape[-1]
    mid, g = a[0] @ b[0], gamma(n)
    size = b[0].abs()
    # |a| g |b| + |a| rb + ra (|b| + rb), in as few products as possible
    left = g * a[0].abs() if a[1] is None else g * a[0].abs() + a[1]
    if b[1] is None:
        rad = left @ size
    else:
        rad = left @ (size + b[1]) + a[0].abs() @ b[1]
    return mid, rad * (1 + 4 * g) + TINY


def sum(a: Raw, dim: Any, keepdim: bool) -> Raw:
    mid = a[0].sum(dim, keepdim)
    g = gamma(a[0].numel() // max(1, mid.numel()))
    rad = g * a[0].abs().sum(dim, keepdim)
    return mid, (rad if a[1] is None else rad + a[1].sum(dim, keepdim)) * (1 + 4 * g)


def sqrt(a: Raw) -> Raw:
    mid = a[0].clamp(min=0).sqrt()
    rad = mid * U
    if a[1] is not None:
        # |sqrt x - sqrt a| <= r/sqrt a; where the ball reaches 0, at most sqrt(a + r)
        inside = a[0] > a[1]
        rad = rad + torch.where(inside, a[1] / torch.where(inside, mid, 1.0), (a[0].abs() + a[1]).sqrt())
    return mid, rad * UP


def exp(a: Raw) -> Raw:
    mid = a[0].exp()
    rad = mid * LIBRARY
    if a[1] is not None:
        # |exp x - exp a| <= exp(a) (exp(r) - 1) <= exp(a) r exp(r)
        rad = rad + mid * (1 + LIBRARY) * a[1] * (a[1].exp() * (1 + LIBRARY))
    # minus infinity is a mask: exactly 0
    return mid, torch.where(a[0] == -math.inf, 0.0, rad * UP + TINY)


def lipschitz(function: Callable[[Tensor], Tensor], constant: float) -> Callable[[Raw], Raw]:
    def enclose(a: Raw) -> Raw:
        mid = function(a[0])
        rad = mid.abs() * LIBRARY
        return mid, (rad if a[1] is None else rad + constant * a[1]) * UP + TINY

    return enclose


def asin(a: Raw) -> Raw:
    mid = a[0].asin()
    rad = mid.abs() * LIBRARY
    if a[1] is not None:
        # the slope is largest at the end of the ball that is farther from 0
        rest = 1 - (a[0].abs() + a[1]).square()
        rad = rad + torch.where(rest > 0, a[1] / rest.clamp(min=TINY).sqrt() * (1 + 1e-6), math.inf)
        rad = torch.where(rest > 1e-9, rad, math.inf)
    return mid, rad * UP + TINY
