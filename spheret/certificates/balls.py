r"""Midpoint-radius arithmetic: numbers with a proven error, through a model's own code, and their derivatives.

A `Ball` is a float64 tensor, its midpoint, with a radius per entry. It stands for every real tensor within the
radius of the midpoint. An operation on balls returns a ball that contains the exact result for every choice of real
tensors in its arguments. So the radius covers the rounding of the operation and the radii that it started from.

A ball may carry a `tangent`: one directional derivative per direction, as a ball (directions, *shape). Then every
operation also encloses the derivatives of its result. torch's own functions take balls, so that norms, branches and
connections run unchanged.

What is assumed:

- IEEE double arithmetic, rounded to nearest, u = 2^-53.
- A sum or a dot product of n terms is made of n products and additions in some order (no Strassen). So its error is
  at most gamma_n = n u/(1 - n u) times the same sum of absolute values.
- exp, erf, tanh, sin, cos, asin and atan are accurate to `ULPS` units in the last place.

Constants in the code count as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spheret.certificates import midpoint_radius as raw
from spheret.certificates.midpoint_radius import LIBRARY, Raw


class NotEnclosed(ValueError):
    """An operation has no rule here, or a comparison is not decided. The message says which."""


class Ball(Tensor):
    """A float64 tensor with a radius per entry; None is radius 0. See the module for what it means."""

    mid: Tensor
    rad: Tensor | None
    tangent: Ball | None

    @staticmethod
    def of(mid: Tensor, rad: Tensor | None = None, tangent: Ball | None = None) -> Ball:
        ball = torch.Tensor._make_subclass(Ball, mid.detach(), False)
        ball.mid, ball.rad, ball.tangent = mid.detach(), rad, tangent
        return ball

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name == "__get__":
            # an attribute such as shape or mT
            name = func.__self__.__name__  # type: ignore[attr-defined]
        rule = RULES.get(name)
        if rule is not None:
            try:
                return rule(*args, **(kwargs or {}))
            except TypeError as error:
                raise NotEnclosed(f"{name} with these arguments has no rule in ball arithmetic ({error})") from error
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotEnclosed(f"{name} has no rule in ball arithmetic")


_METADATA = frozenset(
    ("shape", "dtype", "device", "ndim", "dim", "size", "numel", "is_floating_point", "__len__", "is_contiguous",
     "requires_grad", "is_cuda", "is_mps", "layout", "stride")
)  # fmt: skip


def unit_directions(x: Tensor, directions: Tensor) -> Ball:
    """x, exact, with the given directions (directions, *x.shape) as its tangent."""
    return Ball.of(x, None, Ball.of(directions))


def rounded(x: Tensor | float, like: Tensor) -> Ball:
    """A number that the library computed to a few units in the last place."""
    mid = torch.as_tensor(x, dtype=torch.float64, device=like.device)
    return Ball.of(mid, 2 * LIBRARY * mid.abs())


def _pair(x: Any, like: Tensor | None = None) -> Raw:
    if isinstance(x, Ball):
        return x.mid, x.rad
    if isinstance(x, Tensor):
        return x.to(torch.float64), None
    return torch.tensor(float(x), dtype=torch.float64, device=None if like is None else like.device), None


# the rules: each returns a ball, with a tangent where an argument has one


def _ball(value: Raw, tangent: Ball | None = None) -> Ball:
    return Ball.of(*value, tangent)


def _as_ball(x: Any, like: Tensor | None = None) -> Ball:
    return x if isinstance(x, Ball) else Ball.of(*_pair(x, like))


def _fit(tangent: Ball | None, shape: Sequence[int], expand: bool = False) -> Ball | None:
    """The tangent with as many dimensions as the shape has, after the one of directions."""
    if tangent is None:
        return None
    mid = tangent.mid
    full = (mid.shape[0], *(1,) * (len(shape) + 1 - mid.dim()), *mid.shape[1:])
    parts = [None if x is None else x.reshape(full) for x in (mid, tangent.rad)]
    if expand:
        parts = [None if x is None else x.expand(mid.shape[0], *shape) for x in parts]
    assert parts[0] is not None
    return Ball.of(parts[0], parts[1])


def _joined(*tangents: Ball | None) -> Ball | None:
    total: Ball | None = None
    for tangent in tangents:
        if tangent is not None:
            total = tangent if total is None else _ball(raw.add(_pair(total), _pair(tangent)))
    return total


def _times(tangent: Ball | None, factor: Raw, shape: Sequence[int]) -> Ball | None:
    fitted = _fit(tangent, shape)
    return None if fitted is None else _ball(raw.mul(_pair(fitted), factor))


def add(a: Any, b: Any) -> Ball:
    like = a if isinstance(a, Tensor) else b
    x, y = _as_ball(a, like), _as_ball(b, like)
    value = raw.add(_pair(x), _pair(y))
    tangents = (_fit(t, value[0].shape, expand=True) for t in (x.tangent, y.tangent))
    return _ball(value, _joined(*tangents))


def sub(a: Any, b: Any) -> Ball:
    return add(a, neg(_as_ball(b, a if isinstance(a, Tensor) else None)))


def neg(a: Ball) -> Ball:
    return Ball.of(-a.mid, a.rad, None if a.tangent is None else neg(a.tangent))


def mul(a: Any, b: Any) -> Ball:
    like = a if isinstance(a, Tensor) else b
    x, y = _as_ball(a, like), _as_ball(b, like)
    value = raw.mul(_pair(x), _pair(y))
    shape = value[0].shape
    return _ball(value, _joined(_times(x.tangent, _pair(y), shape), _times(y.tangent, _pair(x), shape)))


def div(a: Any, b: Any) -> Ball:
    like = a if isinstance(a, Tensor) else b
    x, y = _as_ball(a, like), _as_ball(b, like)
    value = raw.div(_pair(x), _pair(y))
    shape = value[0].shape
    top = _joined(_fit(x.tangent, shape), _negative(_times(y.tangent, value, shape)))
    return _ball(value, None if top is None else _ball(raw.div(_pair(top), _pair(y))))


def _negative(x: Ball | None) -> Ball | None:
    return None if x is None else neg(x)


def matmul(a: Any, b: Any) -> Ball:
    x, y = _as_ball(a), _as_ball(b)
    tangents = []
    if x.tangent is not None:
        tangents.append(_ball(raw.matmul(_pair(x.tangent), _pair(y))))
    if y.tangent is not None:
        tangents.append(_ball(raw.matmul(_pair(x), _pair(y.tangent))))
    return _ball(raw.matmul(_pair(x), _pair(y)), _joined(*tangents))


def linear(x: Any, weight: Any, bias: Any = None) -> Ball:
    y = matmul(x, weight.mT)
    return y if bias is None else add(y, bias)


def total(x: Ball, dim: Any, keepdim: bool = False, **_: Any) -> Ball:
    dims = [d if d < 0 else d - x.mid.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    tangent = None if x.tangent is None else _ball(raw.sum(_pair(x.tangent), dims, keepdim))
    return _ball(raw.sum(_pair(x), dims, keepdim), tangent)


def mean(x: Ball, dim: Any, keepdim: bool = False, **_: Any) -> Ball:
    summed = total(x, dim, keepdim)
    return div(summed, x.mid.numel() // summed.mid.numel())


def _function(enclose: Callable[[Raw], Raw], slope: Callable[[Ball, Ball], Ball]) -> Callable[..., Ball]:
    """The rule of a function of one number; slope(x, y) is its derivative at x, from its value y."""

    def rule(x: Ball) -> Ball:
        point = Ball.of(x.mid, x.rad)
        value = enclose(_pair(x))
        if x.tangent is None:
            return _ball(value)
        return _ball(value, _times(x.tangent, _pair(slope(point, _ball(value))), value[0].shape))

    return rule


def square(x: Ball) -> Ball:
    return mul(x, x)


exp = _function(raw.exp, lambda x, y: y)
sqrt = _function(raw.sqrt, lambda x, y: div(0.5, y))
tanh = _function(raw.lipschitz(torch.tanh, 1.0), lambda x, y: sub(1.0, square(y)))
atan = _function(raw.lipschitz(torch.atan, 1.0), lambda x, y: div(1.0, add(square(x), 1.0)))
sin: Callable[..., Ball] = _function(raw.lipschitz(torch.sin, 1.0), lambda x, y: cos(x))
cos: Callable[..., Ball] = _function(raw.lipschitz(torch.cos, 1.0), lambda x, y: neg(sin(x)))
# 2/sqrt(pi) = 1.1283...
erf = _function(
    raw.lipschitz(torch.erf, 1.13), lambda x, y: mul(exp(neg(square(x))), rounded(2 / math.sqrt(math.pi), x.mid))
)


asin = _function(raw.asin, lambda x, y: rsqrt(sub(1.0, square(x))))


def rsqrt(x: Ball) -> Ball:
    return div(1.0, sqrt(x))


def power(x: Any, exponent: Any) -> Ball:
    if not isinstance(x, Ball) or isinstance(exponent, Tensor) or exponent not in (1, 2, 3, 4):
        raise NotEnclosed(f"a power {exponent!r} has no rule in ball arithmetic")
    result = x
    for _ in range(int(exponent) - 1):
        result = mul(result, x)
    return result


def softmax(x: Ball, dim: int = -1, **_: Any) -> Ball:
    if dim not in (-1, x.mid.dim() - 1):
        raise NotEnclosed("softmax over another dimension than the last has no rule in ball arithmetic")
    # any shift gives the same quotient, so this one is exact
    grown = exp(sub(Ball.of(x.mid, x.rad), x.mid.amax(-1, keepdim=True)))
    y = div(grown, total(grown, -1, keepdim=True))
    if x.tangent is None:
        return y
    inner = total(mul(x.tangent, y), -1, keepdim=True)
    return Ball.of(y.mid, y.rad, mul(sub(x.tangent, inner), y))


def _pointwise(x: Ball, function: Callable[[Ball], Ball]) -> Ball:
    """A function of single entries. One direction gives the slope, and the slope gives all others."""
    if x.tangent is None:
        return function(x)
    one = function(Ball.of(x.mid, x.rad, Ball.of(torch.ones_like(x.mid)[None])))
    assert one.tangent is not None
    slope = _map(one.tangent, lambda t: t[0])
    return Ball.of(one.mid, one.rad, _times(x.tangent, _pair(slope), x.mid.shape))


def gelu(x: Ball, approximate: str = "none") -> Ball:
    return _pointwise(x, partial(_gelu, approximate=approximate))


def silu(x: Ball, inplace: bool = False) -> Ball:
    return _pointwise(x, lambda x: div(x, add(exp(neg(x)), 1.0)))


def relu(x: Ball, inplace: bool = False) -> Ball:
    return where(_comparison(torch.gt)(x, 0.0), x, 0.0)


def addcmul(x: Any, a: Any, b: Any, value: float = 1.0) -> Ball:
    product = mul(a, b)
    return add(x, product if value == 1 else mul(product, value))


def _gelu(x: Ball, approximate: str) -> Ball:
    if approximate == "none":
        inner = erf(mul(x, rounded(math.sqrt(0.5), x.mid)))
    else:
        cubic = add(x, mul(power(x, 3), 0.044715))
        inner = tanh(mul(cubic, rounded(math.sqrt(2 / math.pi), x.mid)))
    return mul(mul(x, add(inner, 1.0)), 0.5)


def layer_norm(x: Ball, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Ball:
    if len(shape) != 1:
        raise NotEnclosed("a LayerNorm over several dimensions has no rule in ball arithmetic")
    centred = sub(x, mean(x, -1, keepdim=True))
    y = mul(centred, rsqrt(add(mean(square(centred), -1, keepdim=True), eps)))
    y = y if weight is None else mul(y, weight)
    return y if bias is None else add(y, bias)


def attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    enable_gqa: bool = False, **_: Any
) -> Ball:  # fmt: skip
    if attn_mask is not None or dropout_p:
        raise NotEnclosed("attention with a mask or dropout has no rule in ball arithmetic")
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = (_shaped(Tensor.repeat_interleave)(x, group, -3) for x in (k, v))
    scores = div(matmul(q, _shaped(Tensor.transpose)(k, -2, -1)), rounded(math.sqrt(q.shape[-1]), _pair(q)[0]))
    if is_causal:
        future = torch.ones(scores.mid.shape[-2:], dtype=torch.bool, device=scores.mid.device).triu(1)
        scores = masked_fill(scores, future, -math.inf)
    return matmul(softmax(scores), v)


# shapes and choices: nothing is rounded


def _map(x: Ball, function: Callable[[Tensor], Any]) -> Any:
    """A function that only moves entries, of midpoint, radius and tangent alike."""
    rad, tangent = x.rad, x.tangent
    mids = function(x.mid)
    if not isinstance(mids, tuple):
        moved = None
        if tangent is not None:
            tangent = _fit(tangent, x.mid.shape, expand=True)
            assert tangent is not None
            many = torch.vmap(function)
            moved = Ball.of(many(tangent.mid), None if tangent.rad is None else many(tangent.rad))
        return Ball.of(mids, None if rad is None else function(rad), moved)
    return tuple(_map(x, partial(_part, function, i)) for i in range(len(mids)))


def _part(function: Callable[[Tensor], Any], i: int, x: Tensor) -> Any:
    return function(x)[i]


def _shaped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: _map(_as_ball(x), lambda t: function(t, *args, **kwargs))


def cat(tensors: Sequence[Any], dim: int = 0) -> Ball:
    balls = [_as_ball(x) for x in tensors]
    dim = dim if dim < 0 else dim - balls[0].mid.dim()
    mid = torch.cat([b.mid for b in balls], dim)
    rad = torch.cat([torch.zeros_like(b.mid) if b.rad is None else b.rad for b in balls], dim)
    directions = next((b.tangent.mid.shape[0] for b in balls if b.tangent is not None), None)
    if directions is None:
        return Ball.of(mid, rad)
    still = [Ball.of(b.mid.new_zeros(directions, *b.mid.shape)) for b in balls]
    tangents = [zero if b.tangent is None else b.tangent for b, zero in zip(balls, still, strict=True)]
    return Ball.of(mid, rad, cat(tangents, dim))


def where(condition: Tensor, a: Any, b: Any) -> Ball:
    like = a if isinstance(a, Tensor) else b
    x, y = _as_ball(a, like), _as_ball(b, like)

    def choose(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None and other is None:
            return None
        return torch.where(condition, 0.0 if one is None else one, 0.0 if other is None else other)

    mid = torch.where(condition, x.mid, y.mid)
    tangent = None
    if x.tangent is not None or y.tangent is not None:
        zero = Ball.of(mid.new_zeros(()))
        fitted = [zero if t is None else _fit(t, mid.shape) for t in (x.tangent, y.tangent)]
        one, other = (zero if t is None else t for t in fitted)
        tangent = Ball.of(torch.where(condition, one.mid, other.mid), choose(one.rad, other.rad))
    return Ball.of(mid, choose(x.rad, y.rad), _fit(tangent, mid.shape, expand=True))


def masked_fill(x: Ball, mask: Tensor, value: float) -> Ball:
    tangent = x.tangent
    if tangent is not None:
        tangent = masked_fill(tangent, mask, 0.0)
    return Ball.of(x.mid.masked_fill(mask, value), None if x.rad is None else x.rad.masked_fill(mask, 0.0), tangent)


def dropout(x: Ball, p: float = 0.5, training: bool = True, inplace: bool = False) -> Ball:
    if training and p:
        raise NotEnclosed("dropout has no rule in ball arithmetic")
    return x


def convert(x: Ball, *args: Any, **kwargs: Any) -> Ball:
    if x.mid.to(*args, **kwargs).dtype != torch.float64:
        raise NotEnclosed("a conversion from float64 has no rule in ball arithmetic")
    return x


def _comparison(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A plain boolean tensor, the same for every real tensor in the balls; an error where it is not."""

    def rule(a: Any, b: Any) -> Tensor:
        like = a if isinstance(a, Tensor) else b
        mid, rad = _pair(sub(_as_ball(a, like), _as_ball(b, like)))
        # numbers that are equal and exact have difference 0 and radius 0
        if rad is not None and ((mid.abs() <= rad) & (rad > 0)).any():
            raise NotEnclosed("a comparison of two numbers that rounding does not tell apart has no rule")
        return compare(mid, torch.zeros_like(mid))

    return rule


def sign(x: Ball) -> Tensor:
    return _comparison(torch.gt)(x, 0.0).double() - _comparison(torch.lt)(x, 0.0).double()


def _constant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: function(x.mid, *args, **kwargs)


def absolute(x: Ball) -> Ball:
    negative = _comparison(torch.lt)(x, 0.0)
    return where(negative, neg(x), x)


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), add),
    **dict.fromkeys(("sub", "__sub__"), sub),
    **dict.fromkeys(("rsub", "__rsub__"), lambda a, b: sub(b, a)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), div),
    "__rtruediv__": lambda a, b: div(b, a),
    "__rdiv__": lambda a, b: div(b, a),
    "reciprocal": lambda x: div(1.0, x),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), matmul),
    "__rmatmul__": lambda a, b: matmul(b, a),
    "linear": linear,
    **dict.fromkeys(("pow", "__pow__"), power),
    **dict.fromkeys(("neg", "__neg__"), neg),
    "sum": total,
    "mean": mean,
    "square": square,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "exp": exp,
    "tanh": tanh,
    "erf": erf,
    "sin": sin,
    "cos": cos,
    **dict.fromkeys(("asin", "arcsin"), asin),
    "sign": sign,
    **{name: _constant(getattr(torch, name)) for name in ("zeros_like", "ones_like", "full_like")},
    **dict.fromkeys(("atan", "arctan"), atan),
    **dict.fromkeys(("abs", "__abs__", "absolute"), absolute),
    "softmax": softmax,
    "gelu": gelu,
    "silu": silu,
    "relu": relu,
    "addcmul": addcmul,
    "layer_norm": layer_norm,
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "detach": lambda x: Ball.of(x.mid, x.rad),
    "to": convert,
    "cat": cat,
    "where": where,
    "masked_fill": masked_fill,
    **{name: _shaped(getattr(Tensor, name)) for name in ("permute", "transpose", "unbind", "expand", "squeeze",
       "unsqueeze", "flatten", "reshape", "contiguous", "__getitem__", "movedim", "chunk", "split", "clone")},
    "view": _shaped(Tensor.reshape),
    "expand_as": lambda x, other: _shaped(Tensor.expand)(x, other.shape),
    "mT": _shaped(lambda t: t.mT),
    **{symbol: _comparison(compare) for symbol, compare in (("__eq__", torch.eq), ("eq", torch.eq),
       ("__ne__", torch.ne), ("ne", torch.ne), ("__lt__", torch.lt), ("lt", torch.lt), ("__gt__", torch.gt),
       ("gt", torch.gt), ("__le__", torch.le), ("le", torch.le), ("__ge__", torch.ge), ("ge", torch.ge))},
}  # fmt: skip
