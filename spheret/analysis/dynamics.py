"""Measurements of the stream after every sublayer, for any scheme: the symptoms that deep connections should cure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spheret.analysis.decoders import Decoder
from spheret.analysis.sublayers import decoder_of, is_inactive, moved
from spheret.connections import angle_between
from spheret.model.gpt import GPT
from spheret.model.monitor import mean_cosine
from spheret.model.probes import BranchKind, Sublayer


@dataclass(frozen=True)
class SublayerDynamics:
    """What one sublayer does.

    norm: the mean |h| after it.
    massive: see `massive`.
    angle: the mean angle by which it turns the stream.
    moved: by how much its branch moves the stream, as a share of its length; inactive: whether that is nothing.
    update_cosine: see `consecutive`.
    token_cosine: the mean cosine between tokens after it.
    effective_rank: see `effective_rank`.
    sink, sink_heads: see `sink`, the mean over the heads and each head; None without attention.
    removal: see `removals`.
    gradient, stream_gradient: see `gradients`.
    """

    sublayer: int
    branch: BranchKind
    norm: float
    massive: float
    angle: float
    moved: float
    inactive: bool
    update_cosine: float | None
    token_cosine: float
    effective_rank: float
    sink: float | None
    sink_heads: list[float] | None
    removal: float
    gradient: float
    stream_gradient: float


@dataclass(frozen=True)
class Dynamics:
    """What `dynamics` measured. inactive: the numbers of the sublayers that do nothing."""

    loss: float
    entry_norm: float
    sublayers: list[SublayerDynamics]
    inactive: list[int]
    angular_distance: list[list[float | None]]


def massive(states: Tensor) -> float:
    """The largest |x_i| over the median |x_i| of the same tokens."""
    size = states.abs().flatten()
    return float(size.max() / size.median())


def effective_rank(states: Tensor) -> float:
    """exp of the entropy of the normalised singular values of the states, (tokens, width): from 1 to width."""
    values = torch.linalg.svdvals(states.flatten(0, -2).double())
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def sink(weights: Tensor) -> list[float]:
    """Each head's mean attention weight on the first token, from (batch, heads, time, time).

    The first token's own query is left out.
    """
    return [] if weights.shape[-1] < 2 else [float(x) for x in weights[:, :, 1:, 0].double().mean((0, 2))]


def angular_distances(states: list[Tensor]) -> list[list[float | None]]:
    """Entry (i, j) is the mean angle between a token's states after i and after j sublayers, divided by pi."""
    return [[float(angle_between(a, b).mean()) / math.pi for b in states] for a in states]


def consecutive(states: list[Tensor]) -> list[float | None]:
    """The mean cosine between each sublayer's update of the stream and the previous update; None for the first."""
    steps = [after.double() - before.double() for before, after in pairwise(states)]
    pairs = pairwise(steps)
    return [None, *(float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs)]


@torch.no_grad()
def loss_of(model: Decoder, x: Tensor, y: Tensor) -> float:
    return float(model.token_losses(x, y).double().mean())


def removals(model: GPT | Decoder, x: Tensor, y: Tensor, tick: Callable[[], object] = lambda: None) -> list[float]:
    """By how much the loss rises when one sublayer is removed, for each sublayer.

    Values near 0 mean that the sublayer does nothing: the curse of depth.
    """
    decoder = decoder_of(model)
    whole = loss_of(decoder, x, y)
    rises = []
    for sublayer in range(1, len(decoder.kinds) + 1):
        with decoder.removed(sublayer):
            rises.append(loss_of(decoder, x, y) - whole)
        tick()
    return rises


def _gradient_norm(tensors: list[Tensor]) -> float:
    norms = [float(x.grad.double().norm()) for x in tensors if x.grad is not None]
    return math.hypot(*norms) if norms else math.nan


def gradients(model: GPT | Decoder, x: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Norms of the loss's gradient with respect to each sublayer's weights, and to the state before it.

    A tensor that stays in the state from sublayer to sublayer counts in each of them with its whole gradient. The
    model's own gradients do not change.
    """
    decoder = decoder_of(model)
    kept = [(p, p.grad, p.requires_grad) for p in decoder.parameters()]
    records: list[Sublayer] = []
    try:
        for p, _, _ in kept:
            p.grad = None
            p.requires_grad_(True)
        with torch.enable_grad(), decoder.probe(records.append):
            loss = decoder.loss(x, y)
            carried = [tree_leaves(s.state) for s in records]
            for x in itertools.chain(*carried):
                x.retain_grad()
            loss.backward()
        return {"weights": decoder.gradient_norms(), "stream": [_gradient_norm(tensors) for tensors in carried]}
    finally:
        for p, grad, requires_grad in kept:
            p.grad = grad
            p.requires_grad_(requires_grad)


@torch.no_grad()
def dynamics(model: GPT | Decoder, x: Tensor, y: Tensor, tick: Callable[[], object] = lambda: None) -> Dynamics:
    """All measurements of this module on some windows.

    Args:
        model: a GPT in evaluation mode, or a `Decoder`.
        x: the tokens, (windows, time).
        y: their targets, one token later.
        tick: called after every sublayer that was removed.
    """
    decoder = decoder_of(model)
    records: list[Sublayer] = []
    sinks: list[list[float] | None] = []

    def measure(s: Sublayer) -> None:
        records.append(s)
        # attention weights are large, and gone after this call
        weights = s.attention
        sinks.append(None if weights is None else sink(weights))

    with decoder.probe(measure):
        loss = loss_of(decoder, x, y)
    states = [records[0].h, *(s.out for s in records)]
    slopes = gradients(decoder, x, y)
    cosines, rises = consecutive(states), removals(decoder, x, y, tick)
    sublayers = []
    for index, s in enumerate(records):
        share, heads = moved(s), sinks[index]
        sublayers.append(
            SublayerDynamics(
                sublayer=s.number,
                branch=s.kind,
                norm=float(s.out.double().norm(dim=-1).mean()),
                massive=massive(s.out),
                angle=float(angle_between(s.h, s.out).mean()),
                moved=float(share.median()),
                inactive=is_inactive(share),
                update_cosine=cosines[index],
                token_cosine=float(mean_cosine(s.out)),
                effective_rank=effective_rank(s.out),
                sink=sum(heads) / len(heads) if heads else None,
                sink_heads=heads,
                removal=rises[index],
                gradient=slopes["weights"][index],
                stream_gradient=slopes["stream"][index],
            )
        )
    return Dynamics(
        loss=loss,
        entry_norm=float(states[0].double().norm(dim=-1).mean()),
        sublayers=sublayers,
        inactive=[record.sublayer for record in sublayers if record.inactive],
        angular_distance=angular_distances(states),
    )
