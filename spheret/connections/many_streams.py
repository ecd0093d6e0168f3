"""Schemes with n parallel streams, X in R^(n x d) per token: `hyper`, `mhc` and `spherical-hyper`. ::

    F reads sum_i pre_i X_i        X' = mix X + post (x) F

`post (x) F` is the n x d matrix with the rows post_i F. n streams are nearly n times the memory traffic of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from spheret.connections.base import (
    Connection,
    PreparedConnection,
    check_dim,
    check_state_type,
)
from spheret.connections.euclidean import ResidualScheme
from spheret.connections.norms import Device, Norm, ScaleNorm, empty_parameter, make_branch_norm
from spheret.connections.spherical import SpheretNorm
from spheret.kernels import check_rows, compute_dtype, normalize
from spheret.kernels.streams import EPSILON, exact_products, length, mix, normed_products, sinkhorn
from spheret.schedules import factor
from spheret.support.errors import unknown
from spheret.support.ranges import check_above_zero, check_count


class Streams(NamedTuple):
    """The streams of every token, (..., n, dim)."""

    x: Tensor


def check_streams(state: Streams, streams: int, dim: int) -> None:
    """Raise an error unless the state holds so many streams of this width."""
    check_state_type(state, Streams)
    shape = tuple(state.x.shape)
    if shape[-2:] != (streams, dim):
        raise ValueError(
            f"the state of this scheme holds {streams} streams of width {dim}, in a tensor (..., {streams}, {dim}), "
            f"got shape {shape}: take the entry, all connections and the exit from one scheme."
        )


def own_stream(sublayer: int, streams: int, own: float, other: float) -> Tensor:
    """`own` at the stream that belongs to the sublayer, in turn, and `other` elsewhere.

    The streams start equal. Without such a difference they would have equal gradients, and stay equal.
    """
    start = torch.full((streams,), other, device="cpu")
    start[(sublayer - 1) % streams] = own
    return start


class Copies(nn.Module):
    """The entry: `streams` copies of scale x, after a norm if there is one."""

    def __init__(self, streams: int, scale: float = 1.0, norm: nn.Module | None = None):
        super().__init__()
        self.streams, self.scale, self.norm = streams, scale, norm

    def forward(self, x: Tensor) -> Streams:
        x = x if self.norm is None else self.norm(x)
        x = x if self.scale == 1 else x * self.scale
        return Streams(x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]))


def read_streams(pre: Tensor, x: Tensor) -> Tensor:
    """sum_i pre_i x_i, (..., dim), in float32 or better."""
    dtype = compute_dtype(x)
    return mix(pre.to(dtype).unsqueeze(-2), x.to(dtype)).squeeze(-2)


# pre, mix and post: (..., n), (..., n, n) and (..., n), without the leading dimensions if all tokens have the same. A
# mix of None is the identity
Weights = tuple[Tensor, Tensor | None, Tensor]


class StreamConnection(PreparedConnection):
    """F reads norm(sum_i pre_i X_i), and X' = mix X + post (x) F.

    weights: a module that maps X to `Weights`.
    """

    state_type = Streams

    def __init__(
        self, dim: int, sublayer: int, num_sublayers: int, streams: int, inner_norm: nn.Module, weights: nn.Module
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.streams, self.inner_norm, self.weights_norm = streams, inner_norm, weights

    def check_state(self, state: Streams) -> None:
        check_streams(state, self.streams, self.dim)

    def stream(self, state: Streams) -> Tensor:
        """The mean of the streams."""
        return state.x.to(compute_dtype(state.x)).mean(-2).to(state.x.dtype)

    def prepare(self, state: Streams) -> Weights:
        return self.weights_norm(state.x)

    def mixing(self, state: Streams) -> Tensor | None:
        return self.prepare(state)[1]

    def read_prepared(self, state: Streams, weights: Weights) -> Tensor:
        return self.inner_norm(read_streams(weights[0], state.x)).to(state.x.dtype)

    def write_prepared(self, state: Streams, weights: Weights, f: Tensor) -> Streams:
        x, (_, across, post) = state.x, weights
        # the first stream has the shape of f
        check_rows(x.select(-2, 0), f, self.dim)
        dtype = compute_dtype(x, f)
        wide, post, f = x.to(dtype), post.to(dtype), f.to(dtype)
        if across is None:
            return Streams((wide + mix(post.unsqueeze(-1), f.unsqueeze(-2))).to(x.dtype))
        return Streams(mix(across.to(dtype), wide, post, f).to(x.dtype))


# where the factors on what depends on the token start
SCALE = 0.01


class HyperWeights(nn.Module):
    """The weights of hyper-connections, the same for every token: pre, mix and post are learned.

    At the start pre reads one stream, mix is the identity, and post is 1.
    """

    def __init__(self, streams: int, sublayer: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.streams, self.sublayer = streams, sublayer
        # pre, mix and post in one vector: what has two dimensions decays, and has the learning rate of embeddings
        self.weights = empty_parameter((streams + 2) * streams, device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        pre, eye = own_stream(self.sublayer, self.streams, 1.0, 0.0), torch.eye(self.streams, device="cpu")
        self.weights.copy_(torch.cat([pre, eye.flatten(), torch.ones(self.streams, device="cpu")]))

    def forward(self, x: Tensor) -> Weights:
        n = self.streams
        pre, mix, post = self.weights.to(compute_dtype(x)).split((n, n * n, n))
        return pre, mix.view(n, n), post


class TokenWeights(nn.Module):
    """What a token's streams X (..., n, dim) add to the weights of hyper-connections, with x = norm(X). ::

        pre: s_1 tanh(x w_1)    mix^T: s_1 tanh(x W)    post: s_2 tanh(x w_2)

    At the start w_1, W and w_2 are 0, and s_1 and s_2 are 0.01.
    """

    def __init__(self, dim: int, streams: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.dim, self.streams = dim, streams
        # pre, mix and post side by side; a vector, as in HyperWeights
        self.projection = empty_parameter(dim * (streams + 2), device, dtype)
        self.scale = empty_parameter(2, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.projection)
        nn.init.constant_(self.scale, SCALE)

    def forward(self, x: Tensor, norm: Norm) -> Weights:
        n, dtype = self.streams, x.dtype
        projected = norm.project(x, self.projection.to(dtype).view(self.dim, n + 2).mT)
        # torch 2.13's Inductor compiles the gradient of x wrongly if the tanh comes before the split
        pre, mix, post = (part.tanh() for part in projected.split((1, n, 1), -1))
        first, second = self.scale.to(dtype).split(1)
        return first * pre.squeeze(-1), first * mix.mT, second * post.squeeze(-1)


class DynamicHyperWeights(nn.Module):
    """The weights of dynamic hyper-connections: `HyperWeights` plus `TokenWeights` of norm(X)."""

    def __init__(self, static: HyperWeights, dynamic: TokenWeights, norm: Norm):
        super().__init__()
        self.static, self.dynamic, self.norm = static, dynamic, norm

    def forward(self, x: Tensor) -> Weights:
        pre, mix, post = self.dynamic(x.to(compute_dtype(x)), self.norm)
        static = self.static(x)
        return static[0] + pre, static[1] + mix, static[2] + post


class StreamShares(nn.Module):
    """One learned weight per stream, each `start` at the start, (n)."""

    def __init__(self, streams: int, start: float, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.start, self.weights = start, empty_parameter(streams, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weights, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights


class SumNorm(nn.Module):
    """The exit: a norm of sum_i pre_i X_i.

    shares: a module that maps X to pre; without it pre is 1.
    """

    def __init__(self, streams: int, dim: int, norm: nn.Module, shares: nn.Module | None = None):
        super().__init__()
        self.streams, self.dim, self.norm, self.shares = streams, dim, norm, shares

    def forward(self, state: Streams) -> Tensor:
        check_streams(state, self.streams, self.dim)
        x = state.x
        total = x.to(compute_dtype(x)).sum(-2) if self.shares is None else read_streams(self.shares(x), x)
        return self.norm(total).to(x.dtype)


@dataclass(frozen=True)
class CopiedStreams(ResidualScheme, ABC):
    """`streams` copies of what enters, joined by `StreamConnection` unless `connect` says otherwise."""

    streams: int = 4
    one_stream: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("streams", self.streams, 2)

    def enter(self, dim: int) -> nn.Module:
        return Copies(self.streams)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        weights = self.weights(check_dim(dim), sublayer)
        return StreamConnection(dim, sublayer, num_sublayers, self.streams, self.build_norm(dim), weights)

    @abstractmethod
    def weights(self, dim: int, sublayer: int) -> nn.Module:
        """What maps X to pre, mix and post."""


@dataclass(frozen=True)
class Hyper(CopiedStreams):
    """Hyper-connections: F reads LN(sum_i pre_i X_i), and X' = mix X + post (x) F, with n streams. And a final norm.

    | option | meaning |
    |---|---|
    | `streams` | n |
    | `dynamic` | whether pre, mix and post depend on the token |
    | `norm`, `bias` | options of the norms |
    """

    dynamic: bool = True
    source: ClassVar[str] = "arXiv 2409.19606"

    def weights(self, dim: int, sublayer: int) -> nn.Module:
        static = HyperWeights(self.streams, sublayer)
        if not self.dynamic:
            return static
        return DynamicHyperWeights(static, TokenWeights(dim, self.streams), self.build_norm(dim))

    def exit(self, dim: int) -> nn.Module:
        return SumNorm(self.streams, dim, self.build_norm(dim))


def project_streams(x: Tensor, projection: Tensor) -> Tensor:
    """A projection (outputs * n * dim) of the RMS-normed streams (..., n, dim) as one row, (..., outputs)."""
    flat = x.to(compute_dtype(x)).flatten(-2)
    return normed_products(flat, projection.to(flat.dtype).view(-1, flat.shape[-1]), EPSILON)


class ManifoldWeights(nn.Module):
    """The weights of mHC, with DeepSeek-V4's arithmetic: r = RMS(vec X), and with learned W, b and scalars a ::

        pre = sigmoid(a_1 W_1 r + b_1) + eps    post = 2 sigmoid(a_2 W_2 r + b_2)    mix^T = sinkhorn(a_3 W_3 r + b_3)

    At the start W = 0 and a = 0.01. b_1 prefers one stream, b_2 = 0, and b_3 prefers the identity.

    mixes: False leaves out the third: the mix is the identity, and eps is added to post, as in HY-V4.
    """

    # logits at the start: of the stream that the sublayer prefers, and of a stream that stays itself
    preferred: float = 1.0
    identity: float = 4.0

    def __init__(
        self,
        dim: int,
        streams: int,
        sublayer: int,
        mixes: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.streams, self.sublayer = streams, sublayer
        self.sizes = (streams, streams, streams**2) if mixes else (streams, streams)
        # a vector, as in HyperWeights
        self.projection = empty_parameter(sum(self.sizes) * streams * dim, device, dtype)
        self.base = empty_parameter(sum(self.sizes), device, dtype)
        self.scale = empty_parameter(len(self.sizes), device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.projection)
        nn.init.constant_(self.scale, SCALE)
        pre = own_stream(self.sublayer, self.streams, self.preferred, -self.preferred)
        identity = self.identity * torch.eye(self.streams, device="cpu")
        start = torch.cat([pre, torch.zeros(self.streams, device="cpu"), identity.flatten()])
        self.base.copy_(start[: len(self.base)])

    def forward(self, x: Tensor) -> Weights:
        n, projected = self.streams, project_streams(x, self.projection)
        dtype = projected.dtype
        scales = zip(self.scale.to(dtype).split(1), self.sizes, strict=True)
        scale = torch.cat([part.expand(size) for part, size in scales])
        pre, post, *comb = (scale * projected + self.base.to(dtype)).split(self.sizes, -1)
        pre, post = pre.sigmoid() + EPSILON, 2 * post.sigmoid()
        return (pre, sinkhorn(comb[0].unflatten(-1, (n, n))).mT, post) if comb else (pre, None, post + EPSILON)


class Gates(nn.Module):
    """pre = sigmoid(a W RMS(vec X) + b) + eps, (..., n). At the start W = 0, a = 0.01 and b = 0."""

    def __init__(self, dim: int, streams: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.projection = empty_parameter(streams * streams * dim, device, dtype)
        self.base, self.scale = empty_parameter(streams, device, dtype), empty_parameter(1, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.projection)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.scale, SCALE)

    def forward(self, x: Tensor) -> Tensor:
        projected = project_streams(x, self.projection)
        dtype = projected.dtype
        return (self.scale.to(dtype) * projected + self.base.to(dtype)).sigmoid() + EPSILON


@dataclass(frozen=True)
class ManifoldHyper(CopiedStreams):
    """mHC: F reads RMS(sum_i pre_i X_i), and X' = mix X + post (x) F; mix is doubly stochastic. And a final norm.

    `streams` is n. pre, post and mix are functions of all streams of the token. mix="identity" leaves each stream to
    itself, as HY-V4 in transformers does: X' = X + post (x) F.
    """

    norm: str = "rmsnorm"
    mix: Literal["sinkhorn", "identity"] = "sinkhorn"
    source: ClassVar[str] = "arXiv 2512.24880; DeepSeek-V4, in transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix not in ("sinkhorn", "identity"):
            raise unknown("mix", self.mix, ("sinkhorn", "identity"))

    def weights(self, dim: int, sublayer: int) -> nn.Module:
        return ManifoldWeights(dim, self.streams, sublayer, self.mix == "sinkhorn")

    def exit(self, dim: int) -> nn.Module:
        return SumNorm(self.streams, dim, self.build_norm(dim), Gates(dim, self.streams))


def cayley(skew: Tensor) -> Tensor:
    """The orthogonal matrix (I + S)^-1 (I - S) of S = A - A^T, for any square A."""
    s = skew - skew.mT
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    # I + S is never singular, so nothing has to be checked, which would make a GPU wait
    with exact_products(s):
        return torch.linalg.solve_ex(eye + s, eye - s).result


class SphericalHyperWeights(nn.Module):
    """pre, an orthogonal mix = `cayley(A)` and a post of length 1, learned and the same for every token.

    At the start pre is sqrt n at one stream, mix is the identity, and post is (1, ..., 1)/sqrt n.

    Args:
        streams: n.
        sublayer: the 1-based index of the sublayer.
        steady: mix leaves equal streams as they are: the rows and columns of A have their means taken off.
        pace: the weights are their start plus `pace` times a parameter, so that an update of AdamW moves them by
            `pace` times the learning rate. In half precision, too: parameters that start at 0 can take small steps.
        device: where the parameters are made.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        streams: int,
        sublayer: int,
        steady: bool = True,
        pace: float = 0.1,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        # the stream that the sublayer prefers
        self.own = (sublayer - 1) % streams
        self.streams, self.steady, self.pace = streams, steady, pace
        self.pre_offset = empty_parameter(streams, device, dtype)
        self.post_offset = empty_parameter(streams, device, dtype)
        # a vector, as in HyperWeights
        self.skew = empty_parameter(streams * streams, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def read(self, x: Tensor) -> Tensor:
        """sum_i pre_i x_i, (..., dim), in float32 or better; if steady, at the length of all streams together."""
        n, offset = self.streams, self.pre_offset.to(compute_dtype(x))
        start = torch.eye(n, dtype=offset.dtype, device=offset.device)[self.own]
        total = read_streams(math.sqrt(n) * start + self.pace * offset, x)
        if not self.steady:
            return total
        return normalize(total, 1.0) * length(x.to(total.dtype).flatten(-2))

    def mix_and_post(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        skew = self.pace * self.skew.to(dtype).view(self.streams, self.streams)
        if self.steady:
            skew = skew - skew.mean(0, keepdim=True)
            skew = skew - skew.mean(1, keepdim=True)
        return cayley(skew), normalize(1 + self.pace * self.post_offset.to(dtype), 1.0)


class SphericalHyperConnection(Connection):
    """All streams together on the sphere of R^(n d): F reads sum_i pre_i X_i, and X' = R_(O X)(alpha P (post (x) F)).

    O is orthogonal and |post| = 1, so that |X'| = |X|. At the start n equal streams are one spherical stream.

    update: the SpheretNorm of rows of n d entries.
    branch_norm: the norm of the branch's output, or None.
    """

    state_type = Streams

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int,
        weights: SphericalHyperWeights,
        update: SpheretNorm,
        branch_norm: nn.Module | None = None,
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.weights_norm, self.norm, self.branch_norm = weights, update, branch_norm

    def check_state(self, state: Streams) -> None:
        check_streams(state, self.weights_norm.streams, self.dim)

    def stream(self, state: Streams) -> Tensor:
        """sum_i X_i/sqrt n, which is not longer than X."""
        return state.x.to(compute_dtype(state.x)).sum(-2).div(math.sqrt(self.weights_norm.streams)).to(state.x.dtype)

    def read(self, state: Streams) -> Tensor:
        self.check_state(state)
        return self.weights_norm.read(state.x).to(state.x.dtype)

    def write(self, state: Streams, f: Tensor) -> Streams:
        self.check_state(state)
        x = state.x
        check_rows(x.select(-2, 0), f, self.dim)
        dtype = compute_dtype(x, f)
        orthogonal, post = self.weights_norm.mix_and_post(dtype)
        mixed = mix(orthogonal, x.to(dtype))
        f = f.to(dtype) if self.branch_norm is None else self.branch_norm(f.to(dtype))
        along = mix(post.unsqueeze(-1), f.unsqueeze(-2))
        out = self.norm(mixed.flatten(-2), along.flatten(-2))
        return Streams(out.unflatten(-1, x.shape[-2:]).to(x.dtype))

    def mixing(self, state: Streams) -> Tensor:
        return self.weights_norm.mix_and_post(compute_dtype(state.x))[0]

    @property
    def alpha(self) -> Tensor:
        return self.norm.alpha

    def branch_gains(self) -> list[nn.Parameter]:
        return [] if self.branch_norm is None else list(self.branch_norm.parameters())


@dataclass(frozen=True)
class SphericalHyper(CopiedStreams):
    """n streams as one point of a sphere: F reads sum_i pre_i X_i, and X' = R_(O X)(alpha P (post (x) F)).

    O is orthogonal and learned, so that |X| is the same after every sublayer. ScaleNorm at the entry, a final norm.

    | option | meaning |
    |---|---|
    | `streams` | n |
    | `steady` | O leaves equal streams as they are, and F reads the sum at the length of X |
    | `pace` | how fast pre, post and O learn, relative to the other weights, above 0 and at most 1 |
    | `retraction` | a name of RETRACTIONS, or a number p |
    | `schedule` | a name of SCHEDULES |
    | `norm`, `bias` | options of the final norm |
    | `branch_norm` | an RMSNorm of each branch's output: none, or where its gain starts; true is 0.3 |
    """

    steady: bool = True
    pace: float = 0.1
    retraction: str | float = "projection"
    schedule: str = "sqrt"
    branch_norm: bool | float | None = None
    source: ClassVar[str] = "this library"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero("pace", self.pace, 1.0)
        # building one sublayer here checks all other options before a model is built
        self._update(2, 1, 2)
        make_branch_norm(2, self.branch_norm)

    def _update(self, dim: int, sublayer: int, num_sublayers: int) -> SpheretNorm:
        return SpheretNorm(
            self.streams * dim, sublayer, num_sublayers, retraction=self.retraction, schedule=self.schedule
        )

    def enter(self, dim: int) -> nn.Module:
        return Copies(self.streams, 1 / math.sqrt(self.streams), ScaleNorm(dim))

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        update, weights = self._update(check_dim(dim), sublayer, num_sublayers), self.weights(dim, sublayer)
        branch_norm = make_branch_norm(dim, self.branch_norm)
        return SphericalHyperConnection(dim, sublayer, num_sublayers, weights, update, branch_norm)

    def weights(self, dim: int, sublayer: int) -> SphericalHyperWeights:
        return SphericalHyperWeights(self.streams, sublayer, self.steady, self.pace)

    def exit(self, dim: int) -> nn.Module:
        shares = StreamShares(self.streams, 1 / math.sqrt(self.streams))
        return SumNorm(self.streams, dim, self.build_norm(dim), shares)

    def step_sum(self, num_sublayers: int) -> float | None:
        """The sum of lambda_l, as for one spherical stream."""
        return math.fsum(factor(self.schedule, sublayer, num_sublayers) for sublayer in range(1, num_sublayers + 1))
