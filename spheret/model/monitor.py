"""Metrics of the stream at every sublayer, measured on fixed tokens during training. Training is not affected."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spheret.connections import Bounded
from spheret.kernels import compute_dtype
from spheret.model.gpt import GPT
from spheret.model.head import own_logit
from spheret.model.linear import Linear, linear
from spheret.model.probes import Sublayer, probe
from spheret.support.precision import wide
from spheret.support.sharding import whole

# a loss this close to the unigram entropy, as a share of it, is that of a model that knows only token frequencies
ENTROPY_MARGIN = 0.03
# at the start Pre-LN has 1.0, a spherical stream 2.0 at width 32 and 3.1 at width 64
HIGH_OWN_LOGIT = 1.5


def mean_cosine(states: Tensor) -> Tensor:
    """The mean cosine between the states of different tokens, from (..., width): (|sum u|^2 - n) / (n (n - 1))."""
    units = nn.functional.normalize(wide(states).flatten(0, -2), dim=-1)
    count = len(units)
    return (units.sum(0).square().sum() - count) / max(1, count * (count - 1))


def common_share(rows: Tensor) -> Tensor:
    """|mean| / |rest| over rows (..., width): the common direction against the root mean square of what is left."""
    rows = wide(rows).flatten(0, -2)
    mean = rows.mean(0)
    return mean.norm() / (rows - mean).square().sum(-1).mean().sqrt()


def common_gradient_share(gradient: Tensor, delta_sum: Tensor, y_mean: Tensor) -> float:
    """|C| / |G - C| of the gradient G = sum_t delta_t y_t^T of a matrix, with C = N mean(delta) mean(y)^T.

    C is what all tokens ask for together, and G - C what tells them apart.

    Args:
        gradient: G, (out, in).
        delta_sum: the sum over the tokens of the gradient at the matrix's output, (out).
        y_mean: the mean over the tokens of the matrix's input, (in).
    """
    dtype = compute_dtype(gradient)
    common = torch.outer(delta_sum.to(dtype), y_mean.to(dtype))
    return float(common.norm() / (gradient.to(dtype) - common).norm())


@dataclass(frozen=True)
class SublayerMetrics:
    """The metrics of one sublayer, with its number. alpha: None if its connection has no step size."""

    sublayer: int
    angle_mean: float
    angle_max: float
    alpha: float | None
    norm: float
    drift: float
    cosine: float
    common_output: float


@dataclass(frozen=True)
class StreamMetrics:
    """The radius, None for a stream that is not on a sphere; the scalars on a bound; the sublayers in order."""

    radius: float | None
    on_bound: list[str]
    sublayers: list[SublayerMetrics]


def _sublayer_metrics(measured: Sublayer, first_norm: Tensor) -> SublayerMetrics:
    """first_norm: the norm of every state before the first sublayer."""
    angle, norm = measured.angle, wide(measured.out).norm(dim=-1)
    alpha = measured.connection.alpha
    return SublayerMetrics(
        sublayer=measured.number,
        angle_mean=float(angle.mean()),
        angle_max=float(angle.max()),
        alpha=None if alpha is None else float(alpha),
        norm=float(norm.mean()),
        drift=float(((norm - first_norm).abs() / first_norm).max()),
        cosine=float(mean_cosine(measured.out)),
        common_output=float(common_share(measured.f)),
    )


def on_bound(model: nn.Module) -> list[str]:
    """The names of the bounded scalars that are on a bound."""
    names = []
    for prefix, module in model.named_modules():
        if not isinstance(module, Bounded):
            continue
        for scalar in module.bounded_scalars():
            value = wide(scalar.softplus())
            # the softplus of the starting value may be rounded to either side of its bound
            if ((value <= scalar.low * (1 + 1e-6)) | (value >= scalar.high * (1 - 1e-6))).any():
                names.append(f"{prefix}.{scalar.name}" if prefix else scalar.name)
    return names


@torch.no_grad()
def measure_stream(model: GPT, tokens: Tensor, targets: Tensor) -> StreamMetrics:
    """The metrics of the stream, from one forward pass in evaluation mode."""
    sublayers: list[SublayerMetrics] = []
    first_norm: list[Tensor] = []

    def measure(sublayer: Sublayer) -> None:
        if not first_norm:
            first_norm.append(wide(sublayer.h).norm(dim=-1))
        sublayers.append(_sublayer_metrics(sublayer, first_norm[0]))

    training = model.training
    model.eval()
    try:
        with probe(model, measure):
            model.token_losses(tokens, targets)
    finally:
        model.train(training)
    return StreamMetrics(_radius(model.entry_norm), on_bound(model), sublayers)


def common_gradients(model: GPT, tokens: Tensor, targets: Tensor) -> list[float]:
    """`common_gradient_share` of each matrix that writes to the stream, one per sublayer, in order.

    It takes one forward and one backward pass in evaluation mode, and leaves the gradients of the model as they are.
    """
    writers = [branch.output for block in model.each_block() for branch in (block.attention, block.mlp)]
    weights: dict[nn.Module, Tensor] = {}
    means: dict[nn.Module, Tensor] = {}
    # the gradient of a zero that is added to every output is the sum of the outputs' gradients
    dtype = compute_dtype(model.tokens.weight)
    zeros = {writer: torch.zeros(writer.out_features, dtype=dtype, device=tokens.device) for writer in writers}

    def keep(module: Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        # with FSDP it is the whole matrix, and exists only now
        weights[module] = module.weight
        means[module] = args[0].detach().flatten(0, -2).to(dtype).mean(0)
        return output + zeros[module].to(output.dtype)

    handles = [writer.register_forward_hook(keep) for writer in writers]
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            for zero in zeros.values():
                zero.requires_grad_(True)
            loss = model(tokens, targets)
        asked = [weights[writer] for writer in writers] + list(zeros.values())
        found = torch.autograd.grad(loss, asked)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    pairs = zip(writers, found[: len(writers)], found[len(writers) :], strict=True)
    return [common_gradient_share(gradient, delta_sum, means[writer]) for writer, gradient, delta_sum in pairs]


@torch.no_grad()
def own_logit_and_loss(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """`own_logit` without the head's bias, and the mean loss, from one forward pass in evaluation mode."""
    own: list[float] = []

    def measure(module: nn.Module, args: tuple[Tensor], h: Tensor) -> None:
        weight = model.head_weight()
        # one window at a time, because logits are large
        own.extend(
            own_logit(linear(model.read_out(states), weight), ids)
            for states, ids in zip(h.split(1), tokens.split(1), strict=True)
        )

    handle = model.final_norm.register_forward_hook(measure)
    training = model.training
    model.eval()
    try:
        losses = model.token_losses(tokens, targets)
    finally:
        handle.remove()
        model.train(training)
    return statistics.fmean(own), float(wide(losses).mean())


def expected_start(model: GPT, unigram_entropy: float | None) -> float:
    """The loss of a model that knows nothing: ln(vocabulary), or the unigram entropy if its head's bias knows it."""
    if model.config.head_bias == "unigram" and unigram_entropy is not None:
        return unigram_entropy
    return math.log(model.config.vocab)


def keeps_its_norm(model: GPT) -> bool:
    """Whether the entry puts the stream on a sphere, which it does not leave."""
    return _radius(model.entry_norm) is not None


def _radius(entry: nn.Module) -> float | None:
    """The radius of the sphere on which the entry puts the stream, or None if it has no `radius_value`."""
    radius_value: Callable[[], float] | None = getattr(entry, "radius_value", None)
    return None if radius_value is None else radius_value()


def gradient_norms(model: GPT) -> list[float]:
    """The gradient norm of each sublayer, its branch and connection together, in order."""
    norms = []
    for block in model.each_block():
        for parts in ((block.attention, block.attention_connection), (block.mlp, block.mlp_connection)):
            grads = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
            norms.append(float(whole(torch.nn.utils.get_total_norm(grads))))
    return norms
