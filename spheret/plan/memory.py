"""The bytes that a training step holds, by arithmetic. Tests compare them with what autograd keeps of a real step.

Branches and loss are formulas. What a scheme adds to them is counted by running it on a few rows, so that a new
scheme needs no formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.connections import Scheme
from spheret.kernels import use
from spheret.model.gpt import GPT, HIDDEN, GPTConfig
from spheret.model.loss import ROWS
from spheret.optim import hidden_matrices

# bytes per number inside a branch; the stream, the weights and the optimiser are float32 in both precisions
PRECISIONS = {"float32": 4, "bf16": 2}
FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """Counts of a model: its parameters, their tensors, the parameters in all branches and in the largest branch.

    matrices: rows and columns of every matrix that Muon orthogonalizes. hidden: the tensors that hold them.
    """

    parameters: int
    tensors: int
    branches: int
    largest_branch: int
    matrices: tuple[tuple[int, int], ...]
    hidden: int


@lru_cache(maxsize=64)
def _shape(config: str) -> Shape:
    with torch.device("meta"):
        model = GPT(GPTConfig.from_dict(json.loads(config)))
    branches = [branch for block in model.each_block() for branch in (block.attention, block.mlp)]
    sizes = [sum(p.numel() for p in branch.parameters()) for branch in branches]
    hidden = hidden_matrices(model)
    matrices = tuple((rows, weight.shape[1]) for weight, heights in hidden.items() for rows in heights)
    tensors = len(list(model.parameters()))
    return Shape(model.parameter_count(), tensors, sum(sizes), max(sizes), matrices, len(hidden))


def shape(config: GPTConfig) -> Shape:
    return _shape(json.dumps(config.as_dict()))


def weights_bytes(config: GPTConfig) -> int:
    return FLOAT * shape(config).parameters


def optimizer_bytes(config: GPTConfig, optimizer: str = "adamw") -> int:
    """AdamW's two moments, and one step count per tensor. Muon keeps one moment of a hidden matrix, and no count."""
    counts = shape(config)
    adamw = 2 * FLOAT * counts.parameters + FLOAT * counts.tensors
    muon = FLOAT * sum(rows * columns for rows, columns in counts.matrices) + FLOAT * counts.hidden
    return adamw - muon if optimizer == "muon" else adamw


def autograd_keeps(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes that autograd keeps of a forward pass for its backward: every storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    # holding the tensors keeps their addresses from being used again
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> None:
        # there is no backward; a graph that held its own results would never be freed
        seen[x.untyped_storage().data_ptr()] = x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept_alive = run()
    total = sum(x.untyped_storage().nbytes() for address, x in seen.items() if address not in own)
    del kept_alive
    # the graph also holds `pack`, and so `seen`
    seen.clear()
    return total


@dataclass(frozen=True)
class Kept:
    """Bytes per token: `wide` for each number of its row, and `fixed`."""

    wide: float
    fixed: float

    def bytes(self, tokens: int, width: int) -> float:
        return tokens * (self.wide * width + self.fixed)


# many short rows: what does not grow with the rows (a gain, a step) vanishes in the division by their number
_ROWS, _WIDTHS = 1024, (8, 16)


def _line(count: Callable[[int], int], widths: tuple[int, int] = _WIDTHS) -> Kept:
    """Kept, from counts at two widths."""
    (narrow, wide), (d, e) = (count(width) / _ROWS for width in widths), widths
    slope = round((wide - narrow) / (e - d))
    return Kept(slope, max(0, round(narrow - slope * d)))


def _autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@lru_cache(maxsize=4096)
def _sublayer(scheme: Scheme, sublayer: int, num_sublayers: int, precision: str, backend: str | None) -> Kept:
    """What a connection keeps, including the branch's input, which is all that the branch here keeps."""

    def count(width: int) -> int:
        connection = scheme.connect(width, sublayer, num_sublayers)
        h, weight = torch.ones(_ROWS, width, requires_grad=True), nn.Parameter(torch.eye(width))

        def run() -> Tensor:
            with _autocast(precision), use(backend) if backend else nullcontext():
                return connection(h, lambda x: F.linear(x, weight))

        copy = 0 if precision == "float32" else PRECISIONS[precision] * weight.numel()
        return autograd_keeps(run, [*connection.parameters(), weight]) - copy

    return _line(count)


def _added(part: nn.Module | None, inputs: list[Tensor]) -> int:
    """What a part inside a branch adds to the inputs, which the branch keeps without it too."""
    if part is None:
        return 0

    def run(*module: nn.Module) -> Tensor:
        # the sine keeps its argument, as attention keeps q, k and v, and the activation the hidden layer
        outputs: tuple[Tensor, ...] = tuple(inputs)
        for each in module:
            result = each(*inputs)
            outputs = result if isinstance(result, tuple) else (result,)
        return torch.stack([x.sin().sum() for x in outputs])

    parameters = list(part.parameters())
    return autograd_keeps(lambda: run(part), parameters) - autograd_keeps(run, parameters)


@lru_cache(maxsize=4096)
def _inside(scheme: Scheme, sublayer: int, num_sublayers: int, precision: str) -> Kept:
    """What the scheme adds inside the branch of a sublayer. `fixed` is per head for attention, else per token."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16

    def count(width: int) -> int:
        with _autocast(precision):
            if sublayer % 2 == 0:
                hidden = torch.ones(_ROWS, HIDDEN * width, dtype=dtype, requires_grad=True)
                return _added(scheme.inside_mlp(width, hidden.shape[-1], sublayer, num_sublayers), [hidden])
            qkv = torch.ones(3, 1, 1, _ROWS, width, dtype=dtype, requires_grad=True)
            return _added(scheme.inside_attention(width, 1, sublayer, num_sublayers), list(qkv.unbind()))

    return _line(count)


def _logit_gain(scheme: Scheme) -> Kept:
    """What the scheme's gain of the logits keeps, per row of the head's weight and not per token."""

    def count(width: int) -> int:
        gain, weight = scheme.logit_gain(width, _ROWS), nn.Parameter(torch.ones(_ROWS, width))
        if gain is None:
            return 0
        return autograd_keeps(lambda: gain(weight.mT).sin(), [weight, *gain.parameters()])

    return _line(count)


@lru_cache(maxsize=4096)
def _end(scheme: Scheme, entry: bool, least: int) -> Kept:
    """What the entry or the exit keeps. least: the model's width, as an option may not allow a smaller one."""

    def count(width: int) -> int:
        module, h = (scheme.enter if entry else scheme.exit)(width), torch.ones(_ROWS, width, requires_grad=True)
        return autograd_keeps(lambda: module(h) * 1.0, list(module.parameters()))

    return _line(count, (least, 2 * least))


def connections(config: GPTConfig, tokens: int, precision: str, backend: str | None = None) -> list[float]:
    """Bytes that each sublayer's connection keeps, including its branch's input."""
    scheme, sublayers = config.build_scheme(), 2 * config.layers
    kept = [_sublayer(scheme, number, sublayers, precision, backend) for number in range(1, sublayers + 1)]
    return [sublayer.bytes(tokens, config.width) for sublayer in kept]


@dataclass(frozen=True)
class Activations:
    """Bytes kept from the forward for the backward, by what keeps them."""

    connections: float
    attention: float
    mlp: float
    ends: float  # embeddings, entry, exit and loss
    copies: float  # of the branches' weights, in autocast's dtype

    @property
    def total(self) -> float:
        return self.connections + self.attention + self.mlp + self.ends + self.copies


def least_activations(config: GPTConfig, tokens: int, precision: str) -> Activations:
    """The part of `activations` that every scheme keeps, by formulas alone: a connection keeps its branch's input."""
    d, number = config.width, PRECISIONS[precision]
    return Activations(
        connections=2 * config.layers * tokens * d * number,
        attention=config.layers * tokens * (4 * d * number + FLOAT * config.heads),
        mlp=config.layers * tokens * 2 * HIDDEN * d * number,
        # token ids and targets, the final stream and its gradient, and the gradient of the head
        ends=tokens * (16 + 2 * FLOAT * d) + FLOAT * config.vocab * d,
        copies=0 if precision == "float32" else number * 12 * d * d * config.layers,
    )


def activations(config: GPTConfig, tokens: int, precision: str) -> Activations:
    """What autograd keeps of one forward pass over `tokens` tokens, without recompute.

    Attention keeps q, k, v, its result, and one log-sum-exp per head and token. The flash kernels of CUDA and CPU
    keep no square of scores. The MLP keeps its hidden layer before and after the activation. The loss keeps the final
    stream, its gradient and the head's gradient. It computes both gradients with the loss, so it keeps no logits.
    """
    scheme, d, least = config.build_scheme(), config.width, least_activations(config, tokens, precision)
    ends = sum(_end(scheme, entry, d).bytes(tokens, d) for entry in (True, False))
    ends += _logit_gain(scheme).bytes(config.vocab, d)
    inside = [_inside(scheme, number, 2 * config.layers, precision) for number in range(1, 2 * config.layers + 1)]
    normed = sum(tokens * (kept.wide * d + kept.fixed * config.heads) for kept in inside[::2])
    scaled = sum(kept.bytes(tokens, d) for kept in inside[1::2])
    return replace(
        least,
        connections=sum(connections(config, tokens, precision)),
        attention=least.attention + normed,
        mlp=least.mlp + scaled,
        ends=least.ends + ends,
    )


def loss_workspace(config: GPTConfig, tokens: int, precision: str) -> float:
    """Bytes in use only while the loss is computed: a few chunks of logits, and two products as large as the head."""
    number, rows = PRECISIONS[precision], min(tokens, ROWS)
    narrow = 0 if precision == "float32" else number
    return rows * config.vocab * (3 * FLOAT + narrow) + config.vocab * config.width * (number + narrow)


def peak(config: GPTConfig, tokens: int, precision: str, recompute: bool, copies: bool = True) -> float:
    """The most bytes that forward and backward hold at once, besides weights, gradients and optimiser.

    Without recompute the peak is while the loss is computed. With recompute every block keeps only its input. The
    peak is then either while the loss is computed, or in the backward, while the largest block is recomputed and held
    in full. Without `copies` the weights are in autocast's dtype already.
    """
    kept, workspace = activations(config, tokens, precision), loss_workspace(config, tokens, precision)
    kept = kept if copies else replace(kept, copies=0)
    if not recompute:
        return kept.total + workspace
    joins = connections(config, tokens, precision)
    block = max(first + second for first, second in zip(joins[::2], joins[1::2], strict=True))
    block += (kept.attention + kept.mlp + kept.copies) / config.layers
    inputs = config.layers * tokens * FLOAT * config.width
    # autocast holds its copies until the forward ends
    return inputs + kept.ends + max(workspace + kept.copies, block)


def full_logits(config: GPTConfig, tokens: int, precision: str) -> float:
    """What a loss that holds all logits would keep: the logits in float32, and autocast's copy of them."""
    narrow = 0 if precision == "float32" else PRECISIONS[precision]
    return tokens * config.vocab * (FLOAT + narrow)
