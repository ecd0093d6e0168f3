"""What is measured of one sublayer, as numbers on the device: nothing is waited for before all are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spheret.connections import angle_between
from spheret.model.monitor import common_gradient_share, common_share, mean_cosine
from spheret.support.precision import wide
from spheret.support.sharding import local, whole
from spheret.watching.processes import Processes

# states of more tokens are not looked at. They are taken from the whole batch, at equal distances
MOST_TOKENS = 512


def sample(states: Tensor, channel_dim: int = -1) -> Tensor:
    """Rows (tokens, width) of states (..., width): at most MOST_TOKENS of them, at equal distances."""
    rows = states.detach().movedim(channel_dim, -1).flatten(0, -2)
    count = len(rows)
    if count <= MOST_TOKENS:
        return rows
    return rows[torch.arange(MOST_TOKENS, device=rows.device) * count // MOST_TOKENS]


class StreamMeasures(NamedTuple):
    """One sublayer, each a scalar tensor, in float64 where the device has it: see `SublayerObservation`."""

    norm: Tensor
    growth: Tensor
    angle_mean: Tensor
    angle_max: Tensor
    moved: Tensor
    moved_max: Tensor
    cosine: Tensor
    common_stream: Tensor
    common_output: Tensor
    massive: Tensor


@torch.no_grad()
def stream_measures(h: Tensor, f: Tensor, out: Tensor, still: Tensor) -> StreamMeasures:
    """From rows (tokens, width): the state, the branch's output, the next state, and that without the branch."""
    h, f, out, still = map(wide, (h, f, out, still))
    angle, norm = angle_between(h, out), out.norm(dim=-1)
    length = still.norm(dim=-1)
    moved = (out - still).norm(dim=-1) / torch.where(length > 0, length, 1.0)
    size = out.abs().flatten()
    return StreamMeasures(
        norm=norm.mean(),
        growth=norm.mean() / h.norm(dim=-1).mean(),
        angle_mean=angle.mean(),
        angle_max=angle.max(),
        moved=moved.median(),
        moved_max=moved.max(),
        cosine=mean_cosine(out),
        common_stream=common_share(out),
        common_output=common_share(f),
        massive=size.max() / size.median(),
    )


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The norm of each tensor as a whole. If one is sharded, every process must call this."""
    if not tensors:
        return []
    if any(local(x) is not x for x in tensors):
        return [float(whole(torch.linalg.vector_norm(x.detach(), dtype=_summed(x)))) for x in tensors]
    values = [_values(x) for x in tensors]
    found: list[Tensor] = [wide(torch.linalg.vector_norm(x, dtype=_summed(x))) for x in values]
    return torch.stack([x.to(found[0]) for x in found]).tolist()


def _values(x: Tensor) -> Tensor:
    x = x.detach()
    return x.coalesce().values() if x.is_sparse else x


def _summed(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _unit(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=0)


class WriterGradient:
    """The common direction in the gradient G = sum_t delta_t y_t^T of a matrix, over the backward passes of a step.

    It keeps sums over the tokens alone: of delta, of y, and of delta times the sum of y's entries. The last one is
    G times a vector of ones. So it tells by what factor the gradient that is seen later was scaled, e.g. by clipping,
    by a GradScaler or by the mean over processes.
    """

    def __init__(self) -> None:
        self.delta: Tensor | None = None
        self.against_ones: Tensor | None = None
        self.y: Tensor | None = None
        self.tokens = 0

    def see(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook of the module with the matrix."""
        if not isinstance(output, Tensor) or not output.requires_grad or not args or not isinstance(args[0], Tensor):
            return
        rows = args[0].detach().flatten(0, -2)
        rows = rows.to(_summed(rows))
        sums, y, count = rows.sum(-1, keepdim=True), rows.sum(0), len(rows)

        def take(gradient: Tensor) -> None:
            delta = gradient.detach().flatten(0, -2)
            delta = delta.to(_summed(delta))
            found = delta.sum(0), (delta * sums).sum(0), y
            if self.delta is None or self.against_ones is None or self.y is None:
                self.delta, self.against_ones, self.y = found
            else:
                self.delta, self.against_ones, self.y = (
                    self.delta + found[0], self.against_ones + found[1], self.y + found[2]
                )  # fmt: skip
            self.tokens += count

        output.register_hook(take)

    def share(self, gradient: Tensor, processes: Processes) -> float | None:
        """|C| / |G - C| of the gradient (out, in), C = (sum of delta) mean(y)^T; None if nothing was seen."""
        if self.delta is None or self.against_ones is None or self.y is None:
            return None
        count = self.y.new_tensor([self.tokens])
        parts = processes.sum(torch.cat([self.delta, self.against_ones, self.y, count]))
        delta, against_ones, y, count = parts.split([len(self.delta), len(self.delta), len(self.y), 1])
        y = y / count
        full = whole(gradient).to(parts.dtype)
        # some layers hold their matrix transposed, which a square one does not tell by its shape
        ways = [x for x in (full, full.mT) if x.shape == (len(delta), len(y))]
        if not ways:
            return None
        full = min(ways, key=lambda x: float(torch.linalg.vector_norm(_unit(x.sum(-1)) - _unit(against_ones))))
        scale = (full.sum(-1) @ against_ones) / (against_ones @ against_ones)
        return common_gradient_share(full, delta * scale, y)
