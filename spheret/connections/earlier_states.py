"""Schemes whose state holds earlier states beside the stream: `x0`, `denseformer` and `attn-res`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from spheret.connections.base import (
    Connection,
    PreparedConnection,
    add,
    check_parts,
    check_state_type,
)
from spheret.connections.euclidean import ResidualScheme
from spheret.connections.norms import Device, empty_parameter
from spheret.kernels import check_rows, compute_dtype
from spheret.kernels.streams import attend, exact_products, mix
from spheret.schedules import check_sublayer
from spheret.support.ranges import check_count


class Started(NamedTuple):
    """The stream, and what entered it: (..., dim) each."""

    h: Tensor
    start: Tensor

    @classmethod
    def first(cls, x: Tensor) -> Started:
        return cls(x, x)


class Outputs(NamedTuple):
    """The stream; and what entered it and the output of every block so far, (..., dim) each."""

    h: Tensor
    blocks: tuple[Tensor, ...]

    @classmethod
    def first(cls, x: Tensor) -> Outputs:
        return cls(x, (x,))


class Sums(NamedTuple):
    """What entered the stream, and the sum of the branches' outputs of each group of sublayers: (..., dim) each."""

    parts: tuple[Tensor, ...]

    @classmethod
    def first(cls, x: Tensor) -> Sums:
        return cls((x,))


class FirstState(nn.Module):
    """The entry: x as the first state of its type."""

    def __init__(self, state_type: type[Started] | type[Outputs] | type[Sums]):
        super().__init__()
        self.state_type = state_type

    def forward(self, x: Tensor) -> Started | Outputs | Sums:
        return self.state_type.first(x)


class NormOfStream(nn.Module):
    """A norm of the stream, which is the field h of the state."""

    def __init__(self, state_type: type, norm: nn.Module):
        super().__init__()
        self.state_type, self.norm = state_type, norm

    def forward(self, state: Started | Outputs) -> Tensor:
        check_state_type(state, self.state_type)
        return self.norm(state.h)


def weighted_sum(weights: Iterable[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """sum_i w_i x_i in float32 or better."""
    dtype = compute_dtype(*rows)
    terms = [weight.to(dtype) * x.to(dtype) for weight, x in zip(weights, rows, strict=True)]
    return functools.reduce(torch.add, terms)


class StartMix(nn.Module):
    """r h + m start, with learned scalars r = keep and m = mix at the start, in float32 or better."""

    def __init__(self, mix: float, keep: float = 1.0, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.mix, self.keep = mix, keep
        self.r, self.m = empty_parameter(1, device, dtype), empty_parameter(1, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.r, self.keep)
        nn.init.constant_(self.m, self.mix)

    def forward(self, h: Tensor, start: Tensor) -> Tensor:
        return weighted_sum((self.r, self.m), (h, start))


class WeightedSum(nn.Module):
    """sum_i w_i x_i over as many rows as `starts`, with learned w_i that start there, in float32 or better."""

    def __init__(self, starts: Sequence[float], *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.starts, self.weights = tuple(starts), empty_parameter(len(starts), device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weights.copy_(torch.tensor(self.starts, device="cpu"))

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        return weighted_sum(self.weights.unbind(), rows)


class StartConnection(PreparedConnection):
    """h' = x + F(norm x), with x = mix_norm(h, start), or x = h without `mix_norm`."""

    state_type = Started

    def __init__(
        self, dim: int, sublayer: int, num_sublayers: int, inner_norm: nn.Module, mix_norm: nn.Module | None = None
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.inner_norm, self.mix_norm = inner_norm, mix_norm

    def stream(self, state: Started) -> Tensor:
        return state.h

    def prepare(self, state: Started) -> Tensor:
        return state.h if self.mix_norm is None else self.mix_norm(*state)

    def read_prepared(self, state: Started, x: Tensor) -> Tensor:
        return self.inner_norm(x).to(state.h.dtype)

    def write_prepared(self, state: Started, x: Tensor, f: Tensor) -> Started:
        check_rows(x, f, self.dim)
        dtype = compute_dtype(x, f)
        return Started((x.to(dtype) + f.to(dtype)).to(state.h.dtype), state.start)


class FactorConnection(Connection):
    """h' = r h + p F(norm h) + m start, with a learned r and p and, if the sublayer is attention, m."""

    state_type = Started

    def __init__(self, dim: int, sublayer: int, num_sublayers: int, inner_norm: nn.Module):
        super().__init__(dim, sublayer, num_sublayers)
        # as in modded-nanogpt: the two sublayers of a block scale the stream by 1.1
        starts = (math.sqrt(1.1), 1.0, 0.0)[: 3 if sublayer % 2 else 2]
        self.inner_norm, self.factor_norm = inner_norm, WeightedSum(starts)

    def stream(self, state: Started) -> Tensor:
        return state.h

    def read(self, state: Started) -> Tensor:
        self.check_state(state)
        return self.inner_norm(state.h)

    def write(self, state: Started, f: Tensor) -> Started:
        self.check_state(state)
        check_rows(state.h, f, self.dim)
        rows = (state.h, f, state.start)[: len(self.factor_norm.starts)]
        return Started(self.factor_norm(rows).to(state.h.dtype), state.start)


@dataclass(frozen=True)
class X0(ResidualScheme):
    """h' = x + F(LN x), with x = r h + m h_0 before a block and x = h within it; h_0 is what entered the stream.

    r and m are learned scalars, one each per block. r starts at 1 and m at `mix`. And a final norm. With `falling`
    they start at nanochat's values, which fall over the blocks: r from 1.15 to 1.05, m from 0.2 to 0.05. With `post`
    it is modded-nanogpt's form, h' = r h + p F(LN h) + m h_0 with r and p per sublayer, from sqrt 1.1 and 1, and m at
    attention, from 0.
    """

    mix: float = 0.1
    falling: bool = False
    post: bool = False
    source: ClassVar[str] = "nanochat; modded-nanogpt"
    one_stream: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post and self.falling:
            raise ValueError("post and falling are the forms of two sources with different starts: give one of them.")

    def enter(self, dim: int) -> nn.Module:
        return FirstState(Started)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        if self.post:
            return FactorConnection(dim, sublayer, num_sublayers, self.build_norm(dim))
        depth = (sublayer - 1) / max(1, num_sublayers - 2)
        starts = (0.2 - 0.15 * depth, 1.15 - 0.1 * depth) if self.falling else (self.mix,)
        mix = StartMix(*starts) if sublayer % 2 else None
        return StartConnection(dim, sublayer, num_sublayers, self.build_norm(dim), mix)

    def exit(self, dim: int) -> nn.Module:
        return NormOfStream(Started, self.build_norm(dim))


class DenseConnection(Connection):
    """h' = x = h + F(norm h), or with `average_norm` h' = average_norm of what entered, earlier outputs and x."""

    state_type = Outputs

    def __init__(
        self,
        dim: int,
        sublayer: int,
        num_sublayers: int,
        inner_norm: nn.Module,
        average_norm: nn.Module | None = None,
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.inner_norm, self.average_norm = inner_norm, average_norm

    def check_state(self, state: Outputs) -> None:
        super().check_state(state)
        check_parts(state.blocks, (self.sublayer + 1) // 2, self.sublayer)

    def stream(self, state: Outputs) -> Tensor:
        return state.h

    def read(self, state: Outputs) -> Tensor:
        self.check_state(state)
        return self.inner_norm(state.h)

    def write(self, state: Outputs, f: Tensor) -> Outputs:
        self.check_state(state)
        h, blocks = state
        check_rows(h, f, self.dim)
        dtype = compute_dtype(h, f)
        x = h.to(dtype) + f.to(dtype)
        if self.average_norm is None:
            return Outputs(x.to(h.dtype), blocks)
        return Outputs(self.average_norm((*blocks, x)).to(h.dtype), (*blocks, x.to(h.dtype)))

    def skip(self, state: Outputs) -> Outputs:
        return self.write(state, torch.zeros_like(state.h))


@dataclass(frozen=True)
class DenseFormer(ResidualScheme):
    """Pre-LN whose h after block b is sum_i a_i x_i, over what entered and the outputs of blocks 1 to b.

    x_b = h + F(LN h) is the block's own output. The learned a_i start at 0, and the block's own at 1. And a
    final norm.
    """

    source: ClassVar[str] = "arXiv 2402.02622"
    one_stream: ClassVar[bool] = False

    def enter(self, dim: int) -> nn.Module:
        return FirstState(Outputs)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        check_sublayer(sublayer, num_sublayers)
        # the block itself at first, and nothing of the earlier ones
        average = None if sublayer % 2 else WeightedSum((*[0.0] * (sublayer // 2), 1.0))
        return DenseConnection(dim, sublayer, num_sublayers, self.build_norm(dim), average)

    def exit(self, dim: int) -> nn.Module:
        return NormOfStream(Outputs, self.build_norm(dim))


class Attend(nn.Module):
    """sum_i p_i v_i, with p = softmax_i <q, RMS(v_i)> and a learned q in R^dim that is 0 at the start.

    RMS has no gain. `count` is the number of rows v_i. One row is returned as it is, without a q.

    queries: with more than one, the sums of all of them, (..., queries, dim).
    normed: RMS(v_i) takes the place of v_i, and the scores are divided by sqrt dim, as in Inkling 2.
    """

    eps: float = 1e-5

    def __init__(
        self,
        dim: int,
        count: int,
        queries: int = 1,
        normed: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim, self.queries, self.normed = dim, queries, normed
        self.query: nn.Parameter | None = empty_parameter(queries * dim, device, dtype) if count > 1 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.query is not None:
            nn.init.zeros_(self.query)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        if self.query is None:
            row = rows[0]
            return row if self.queries == 1 else row.unsqueeze(-2).expand(*row.shape[:-1], self.queries, self.dim)
        dtype = compute_dtype(*rows)
        wide, query = [row.to(dtype) for row in rows], self.query.to(dtype).view(-1, self.dim)
        if self.normed:
            values = rms_norm(torch.stack(wide, -2), (self.dim,), eps=self.eps)
            with exact_products(values):
                scores = values @ query.mT / math.sqrt(self.dim)
            out = mix(scores.mT.softmax(-1), values)
        else:
            out = attend(wide, query, self.eps)
        return (out.squeeze(-2) if self.queries == 1 else out).to(rows[0].dtype)


class NormEach(nn.Module):
    """A norm of its own for each of the inputs of q, k and v, (..., 3, dim)."""

    def __init__(self, norms: Iterable[nn.Module]):
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(row) for norm, row in zip(self.norms, x.unbind(-2), strict=True)], -2)


class GroupedConnection(Connection):
    """F reads norm(attend(parts)); its output joins the last part, or begins one at the start of a group.

    `group` is the number of sublayers whose outputs are summed.
    """

    state_type = Sums

    def __init__(
        self, dim: int, sublayer: int, num_sublayers: int, group: int, attend: Attend, inner_norm: nn.Module
    ):
        super().__init__(dim, sublayer, num_sublayers)
        self.inner_norm, self.attend_norm = inner_norm, attend
        self.begins = (sublayer - 1) % group == 0
        self.count = parts_after(sublayer - 1, group)

    def check_state(self, state: Sums) -> None:
        super().check_state(state)
        check_parts(state.parts, self.count, self.sublayer)

    def stream(self, state: Sums) -> Tensor:
        # what a residual stream of these branches would be
        return functools.reduce(add, state.parts)

    def read(self, state: Sums) -> Tensor:
        self.check_state(state)
        return self.inner_norm(self.attend_norm(state.parts))

    def write(self, state: Sums, f: Tensor) -> Sums:
        self.check_state(state)
        *earlier, last = state.parts
        check_rows(last, f, self.dim)
        return Sums((*earlier, last, f.to(last.dtype)) if self.begins else (*earlier, add(last, f)))

    def skip(self, state: Sums) -> Sums:
        return self.write(state, torch.zeros_like(state.parts[-1]))


def parts_after(sublayers: int, group: int) -> int:
    """How many parts a state of `attn-res` has after so many sublayers, whose outputs are summed in groups."""
    return 1 + -(-sublayers // group)


class AttendedNorm(nn.Module):
    """The exit of `attn-res`: a norm of Attend(parts)."""

    def __init__(self, attend: Attend, norm: nn.Module):
        super().__init__()
        self.attend, self.norm = attend, norm

    def forward(self, state: Sums) -> Tensor:
        check_state_type(state, Sums)
        return self.norm(self.attend(state.parts))


@dataclass(frozen=True)
class AttnRes(ResidualScheme):
    """F reads RMS(sum_i p_i v_i), p = softmax_i <q, RMS(v_i)>; v_i are what entered and sums of branches' outputs.

    A sublayer's q is 0 at the start, so that it reads their mean. The outputs of the branches are summed in `blocks`
    groups of equally many sublayers; as many groups as sublayers attend to every single output. The exit reads as a
    sublayer does, with a q of its own. With `separate` the inputs of attention's queries, keys and values have a q
    and a norm each. With `normed` the sum is of RMS(v_i), with scores over sqrt d. Inkling 2 has both.
    """

    norm: str = "rmsnorm"
    blocks: int = 8
    separate: bool = False
    normed: bool = False
    source: ClassVar[str] = "arXiv 2603.15031"
    one_stream: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("blocks", self.blocks)

    def enter(self, dim: int) -> nn.Module:
        return FirstState(Sums)

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        group = -(-num_sublayers // self.blocks)
        three = self.separate and sublayer % 2 == 1
        attend = Attend(dim, parts_after(sublayer - 1, group), 3 if three else 1, self.normed)
        norm = NormEach(self.build_norm(dim) for _ in range(3)) if three else self.build_norm(dim)
        return GroupedConnection(dim, sublayer, num_sublayers, group, attend, norm)

    def exit(self, dim: int) -> nn.Module:
        # there is a sublayer, so there are two parts or more
        return AttendedNorm(Attend(dim, 2, normed=self.normed), self.build_norm(dim))
