"""Muon for hidden matrices, beside AdamW for all other parameters; several processes share its work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spheret.optim.adamw import AdamW, adamw_step
from spheret.support.sharding import like, local, whole

# the quintic of Keller Jordan's Muon, which torch.optim.Muon has too: steps, coefficients, and the least norm
_STEPS, _QUINTIC, _LEAST_NORM = 5, (3.4445, -4.7750, 2.0315), 1e-7


def orthogonalized(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """U V' of a matrix U S V', roughly: five Newton-Schulz steps put its singular values between 0.5 and 1.5.

    The operations are torch.optim.Muon's, in the dtype that suits the device: bfloat16 on a GPU that has it.
    A CPU without bfloat16 arithmetic takes 70 times as long for it as for float32.
    """
    dtype = dtype or _orthogonal_dtype(matrix)
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _orthogonal_dtype(matrix: Tensor) -> torch.dtype:
    in_bfloat16 = matrix.device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if in_bfloat16 else matrix.dtype


def newton_schulz_flops(rows: int, columns: int) -> int:
    """FLOP of the matrix products of `orthogonalized`."""
    short, long = sorted((rows, columns))
    return _STEPS * 2 * short * short * (2 * long + short)


def update_scale(rows: int, columns: int) -> float:
    """torch's match_rms_adamw: entries as large as in an AdamW update, so that both share learning rate and decay."""
    # arXiv 2502.16982
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(AdamW):
    """Muon for the groups that have `heights`, AdamW for all others, in one optimiser with one state.

    A step on a matrix w with gradient g, as in torch.optim.Muon with Nesterov momentum:

        m <- 0.95 m + 0.05 g        w <- (1 - lr decay) w - lr scale orthogonalized(0.05 g + 0.95 m)

    A weight that holds several matrices is cut into them first. Several processes, with the same or with sharded
    gradients, share the work: each weight is orthogonalized, whole, by one of them, which sends it to the others.

    groups: as `optimizer_groups` returns them.
    rank, size: of this process among those that share the work, which are all of torch's default group.
    """

    momentum: float = 0.95

    def __init__(self, groups: Iterable[dict[str, Any]], rank: int = 0, size: int = 1, **options: Any) -> None:
        self.rank, self.size = rank, size
        super().__init__(groups, **options)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return super().state_names(group) if group["heights"] is None else ("momentum_buffer",)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        self._update([
            (weight, group)
            for group in groups
            if group["heights"] is not None
            for weight in group["params"]
            if weight.grad is not None
        ])  # fmt: skip
        try:
            self.param_groups = [group for group in groups if group["heights"] is None]
            adamw_step(self)
        finally:
            self.param_groups = groups
        return loss

    def _update(self, weights: list[tuple[Tensor, dict[str, Any]]]) -> None:
        work = [
            sum(newton_schulz_flops(rows, weight.shape[1]) for rows in group["heights"]) for weight, group in weights
        ]
        owners, mine = shared_out(work, self.size), {}
        for number, (weight, group) in enumerate(weights):
            # shards are gathered by all together
            direction = whole(self._direction(weight))
            if owners[number] == self.rank:
                mine[number] = self._orthogonal(direction, group["heights"])
            if self.size == 1:
                self._apply(weight, group, mine.pop(number))
        for number, (weight, group) in enumerate(weights) if self.size > 1 else ():
            update = mine.pop(number, None)
            if update is None:
                update = torch.empty(weight.shape, dtype=_orthogonal_dtype(weight), device=weight.device)
            torch.distributed.broadcast(update, src=owners[number])
            self._apply(weight, group, update)

    def _direction(self, weight: Tensor) -> Tensor:
        """The gradient with Nesterov momentum."""
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad, memory_format=torch.preserve_format)
        state["momentum_buffer"].lerp_(weight.grad, 1 - self.momentum)
        return weight.grad.lerp(state["momentum_buffer"], self.momentum)

    def _orthogonal(self, direction: Tensor, heights: tuple[int, ...]) -> Tensor:
        """Every matrix of a weight orthogonalized, and scaled in relation to the first one."""
        matrices = direction.split(heights)
        scales = [update_scale(*matrix.shape) for matrix in matrices]
        pieces = [
            orthogonalized(matrix) if scale == scales[0] else orthogonalized(matrix) * (scale / scales[0])
            for matrix, scale in zip(matrices, scales, strict=True)
        ]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)

    def _apply(self, weight: Tensor, group: Mapping[str, Any], update: Tensor) -> None:
        own = local(weight)
        own.mul_(1 - group["lr"] * group["weight_decay"])
        scale = update_scale(group["heights"][0], weight.shape[1])
        own.add_(local(like(update, weight)), alpha=-group["lr"] * scale)


def shared_out(work: Sequence[int], size: int) -> list[int]:
    """Who of `size` processes does each piece of work: the largest first, each to the one that has least to do."""
    load, owners = [0] * size, [0] * len(work)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += work[number]
    return owners
