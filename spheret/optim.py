"""AdamW and Muon, their groups of parameters, and gradient clipping for a model with connections."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spheret.connections import Bounded
from spheret.support.errors import unknown
from spheret.support.sharding import like, local, whole

OPTIMIZERS = ("adamw", "muon")
# AdamW's epsilon
EPSILON = 1e-8
# modules whose weight maps the stream to logits
_HEADS = ("head", "lm_head")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: matrices decay, all other parameters do not.

    Decay would pull the step sizes a_l, the radius gamma, a learned p, gains and biases towards 0, which is not a
    neutral value for them. Every learnable scalar of this library is a 1-element vector. So nanoGPT's rule applies:
    parameters of two or more dimensions decay. Shared parameters appear once. Frozen parameters are left out.

    Args:
        model: any module.
        weight_decay: that of the matrices, at least 0.
    """
    _check_decay(weight_decay)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": float(weight_decay)},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _check_decay(weight_decay: float) -> None:
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The weights of the hidden linear layers, each with the heights of the matrices that are stacked in it.

    Embeddings, a head, and weights that they share are none. A layer whose weight holds several matrices one above
    the other, as that of q, k and v does, says so in its attribute `parts`.
    """
    outer = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden: dict[Tensor, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name.rpartition(".")[2] in _HEADS:
                outer.add(module.weight)
            else:
                hidden[module.weight] = tuple(getattr(module, "parts", ())) or (module.out_features,)
    return {weight: heights for weight, heights in hidden.items() if weight not in outer}


@dataclass(frozen=True)
class Factors:
    """The factors of one parameter on the learning rate, the weight decay and AdamW's epsilon."""

    lr: float = 1.0
    weight_decay: float = 1.0
    epsilon: float = 1.0


def optimizer_groups(
    model: nn.Module, weight_decay: float, optimizer: str = "adamw", factors: Mapping[str, Factors] | None = None
) -> list[dict[str, Any]]:
    """The groups of an optimiser of OPTIMIZERS. Parameters with the same rules share a group.

    What decays is as in `parameter_groups`. factors: by the names of parameters; all are 1 where there is no entry.
    Each group has `lr_factor`, by which the learning rate is multiplied, and `heights`: None for AdamW; for Muon the
    heights of the matrices that are stacked in its weights.
    """
    _check_decay(weight_decay)
    hidden = hidden_matrices(model) if optimizer == "muon" else {}
    same: dict[tuple[bool, tuple[int, ...] | None, Factors], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = (factors or {}).get(name, Factors())
            same.setdefault((parameter.dim() >= 2, hidden.get(parameter), factor), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": float(weight_decay) * factor.weight_decay if decays else 0.0,
            "lr_factor": factor.lr,
            "eps": EPSILON * factor.epsilon,
            "heights": heights,
        }
        for (decays, heights, factor), parameters in same.items()
    ]


# torch keeps a step out of compiled graphs, and imports dynamo for it
_adamw_step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the import of torch._dynamo, which takes a second at the start of every run.

    torch keeps these methods out of compiled graphs, and imports dynamo for it. No graph here holds an optimiser.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    # the first optimiser that is made puts the hooks of a step around it again
    step = _adamw_step

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The tensors that the optimiser keeps for each parameter of a group after a step."""
        return "exp_avg", "exp_avg_sq", "step"


# the quintic of Keller Jordan's Muon, which torch.optim.Muon has too: steps, coefficients, and the least norm
_STEPS, _QUINTIC, _LEAST_NORM = 5, (3.4445, -4.7750, 2.0315), 1e-7


def orthogonalized(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """U V' of a matrix U S V', roughly: five Newton-Schulz steps put its singular values between 0.5 and 1.5.

    The operations are those of torch.optim.Muon, in the dtype that suits the device: bfloat16 on a GPU that has it.
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


# how the orthogonal update is scaled for a matrix of this height and width: the names are torch.optim.Muon's
SCALES: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan's: the same change of the outputs whatever the height
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    # arXiv 2502.16982: entries as large as those of an AdamW update, so that both share learning rate and decay
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(AdamW):
    """Muon for the groups that have `heights`, AdamW for all others, in one optimiser with one state.

    A step on a matrix w with gradient g, as in torch.optim.Muon with Nesterov momentum:

        m <- 0.95 m + 0.05 g        w <- (1 - lr decay) w - lr scale orthogonalized(0.05 g + 0.95 m)

    A weight that holds several matrices is cut into them first. Several processes, with the same or with sharded
    gradients, share the work: each weight is orthogonalized, whole, by one of them, which sends it to the others.

    groups: as `optimizer_groups` returns them. scale: a name of SCALES.
    rank, size: of this process among those that share the work, which are all of torch's default group.
    """

    momentum: float = 0.95

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        scale: str = "match_rms_adamw",
        rank: int = 0,
        size: int = 1,
        **options: Any,
    ) -> None:
        if scale not in SCALES:
            raise unknown("scale", scale, SCALES)
        self.scale, self.rank, self.size = SCALES[scale], rank, size
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
            _adamw_step(self)
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
        scales = [self.scale(*matrix.shape) for matrix in matrices]
        pieces = [
            orthogonalized(matrix) if scale == scales[0] else orthogonalized(matrix) * (scale / scales[0])
            for matrix, scale in zip(matrices, scales, strict=True)
        ]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)

    def _apply(self, weight: Tensor, group: Mapping[str, Any], update: Tensor) -> None:
        own = local(weight)
        own.mul_(1 - group["lr"] * group["weight_decay"])
        scale = self.scale(group["heights"][0], weight.shape[1])
        own.add_(local(like(update, weight)), alpha=-group["lr"] * scale)


def shared_out(work: Sequence[int], size: int) -> list[int]:
    """Who of `size` processes does each piece of work: the largest first, each to the one that has least to do."""
    load, owners = [0] * size, [0] * len(work)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += work[number]
    return owners


def build_optimizer(
    model: nn.Module,
    optimizer: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    device: torch.device,
    factors: Mapping[str, Factors] | None = None,
    rank: int = 0,
    size: int = 1,
) -> AdamW:
    """The optimiser of OPTIMIZERS for a model on a device. rank, size: as in `Muon`."""
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    groups = optimizer_groups(model, weight_decay, optimizer, factors)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "fused": device.type in ("cpu", "cuda")}
    return Muon(groups, rank=rank, size=size, **options) if optimizer == "muon" else AdamW(groups, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group: `lr` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`. Returns the norm before.

    A gradient that would push a bounded scalar beyond its bound is set to 0 first. The bound would take that push
    back after the step, so it counts neither in the norm nor in the optimiser's moments. Call this when the gradients
    are complete: summed over all micro-batches and processes.

    Args:
        model: any module.
        max_norm: the largest norm that is kept.
    """
    for module in model.modules():
        if isinstance(module, Bounded):
            module.drop_outward_gradients()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
