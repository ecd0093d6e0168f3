"""The bytes that a training step holds, by arithmetic; tests hold it to what autograd keeps of a real step.

The branches and the loss are formulas. What a connection keeps is counted on a few rows of it, so that every scheme
of the table has a plan the moment it exists.
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
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.loss import ROWS

# bytes of a number inside a branch; the stream, the weights and the optimiser are float32 in both
PRECISIONS = {"float32": 4, "bf16": 2}
FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """How many parameters a model has, in how many tensors, in its branches, and in the largest of them."""

    parameters: int
    tensors: int
    branches: int
    largest_branch: int


@lru_cache(maxsize=64)
def _shape(config: str) -> Shape:
    with torch.device("meta"):
        model = GPT(GPTConfig.from_dict(json.loads(config)))
    branches = [branch for block in model.each_block() for branch in (block.attention, block.mlp)]
    sizes = [sum(p.numel() for p in branch.parameters()) for branch in branches]
    return Shape(model.parameter_count(), len(list(model.parameters())), sum(sizes), max(sizes))


def shape(config: GPTConfig) -> Shape:
    return _shape(json.dumps(config.as_dict()))


def weights_bytes(config: GPTConfig) -> int:
    return FLOAT * shape(config).parameters


def optimizer_bytes(config: GPTConfig) -> int:
    """AdamW's two moments, and its step count a tensor."""
    return 2 * FLOAT * shape(config).parameters + FLOAT * shape(config).tensors


def autograd_keeps(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes that autograd keeps of a forward pass for its backward: every storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    # the tensors are held, so that no address comes twice
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept_alive = run()
    total = sum(x.untyped_storage().nbytes() for address, x in seen.items() if address not in own)
    del kept_alive
    return total


@dataclass(frozen=True)
class Kept:
    """Bytes a token: `wide` for each number of its row, and `fixed`."""

    wide: float
    fixed: float

    def bytes(self, tokens: int, width: int) -> float:
        return tokens * (self.wide * width + self.fixed)


# many rows of few numbers: what does not grow with the rows (a gain, a step) disappears in the division
_ROWS, _WIDTHS = 1024, (8, 16)


def _line(count: Callable[[int], int]) -> Kept:
    """The two numbers of Kept, from counts at two widths."""
    (narrow, wide), (d, e) = (count(width) / _ROWS for width in _WIDTHS), _WIDTHS
    slope = round((wide - narrow) / (e - d))
    return Kept(slope, max(0, round(narrow - slope * d)))


def _autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@lru_cache(maxsize=4096)
def _sublayer(made: Scheme, sublayer: int, num_sublayers: int, precision: str, backend: str | None) -> Kept:
    """What a connection keeps, the branch's input included: a stand-in for a branch keeps that and no more."""

    def count(width: int) -> int:
        connection = made.connect(width, sublayer, num_sublayers)
        h, weight = torch.ones(_ROWS, width, requires_grad=True), nn.Parameter(torch.eye(width))

        def run() -> Tensor:
            with _autocast(precision), use(backend) if backend else nullcontext():
                return connection(h, lambda x: F.linear(x, weight))

        copy = 0 if precision == "float32" else PRECISIONS[precision] * weight.numel()
        return autograd_keeps(run, [*connection.parameters(), weight]) - copy

    return _line(count)


def _module(make: Callable[[int], nn.Module]) -> Kept:
    """What an entry or an exit keeps."""

    def count(width: int) -> int:
        module, h = make(width), torch.ones(_ROWS, width, requires_grad=True)
        return autograd_keeps(lambda: module(h) * 1.0, list(module.parameters()))

    return _line(count)


def connections(config: GPTConfig, tokens: int, precision: str, backend: str | None = None) -> list[float]:
    """Bytes kept by each sublayer's connection, its branch's input included."""
    made, sublayers = config.build_scheme(), 2 * config.layers
    each = [_sublayer(made, number, sublayers, precision, backend) for number in range(1, sublayers + 1)]
    return [kept.bytes(tokens, config.width) for kept in each]


@dataclass(frozen=True)
class Activations:
    """Bytes kept between forward and backward, by what keeps them."""

    connections: float
    attention: float
    mlp: float
    ends: float  # embeddings, entry, exit and loss
    copies: float  # of the branches' weights, in autocast's dtype

    @property
    def total(self) -> float:
        return self.connections + self.attention + self.mlp + self.ends + self.copies


def activations(config: GPTConfig, tokens: int, precision: str) -> Activations:
    """What autograd keeps of one forward pass over `tokens` tokens, without recompute.

    Attention keeps q, k, v and its result, and a log-sum-exp a head (the flash kernels of CUDA and CPU alike; no
    square of scores); the MLP its hidden layer before and after the activation. The loss keeps the stream that left,
    its gradient, and that of the head: made with the loss, so that no logits are kept.
    """
    made, d, number = config.build_scheme(), config.width, PRECISIONS[precision]
    ends = _module(made.enter).bytes(tokens, d) + _module(made.exit).bytes(tokens, d)
    # token ids and targets, the stream that left and its gradient, and the gradient of the head
    ends += tokens * (16 + 2 * FLOAT * d) + FLOAT * config.vocab * d
    return Activations(
        connections=sum(connections(config, tokens, precision)),
        attention=config.layers * tokens * (4 * d * number + FLOAT * config.heads),
        mlp=config.layers * tokens * 8 * d * number,
        ends=ends,
        copies=0 if precision == "float32" else number * 12 * d * d * config.layers,
    )


def loss_workspace(config: GPTConfig, tokens: int, precision: str) -> float:
    """What exists while the loss is computed: a few chunks of logits, and two products as large as the head."""
    number, rows = PRECISIONS[precision], min(tokens, ROWS)
    narrow = 0 if precision == "float32" else number
    return rows * config.vocab * (3 * FLOAT + narrow) + config.vocab * config.width * (number + narrow)


def most(config: GPTConfig, tokens: int, precision: str, recompute: bool, copies: bool = True) -> float:
    """The most that a forward and a backward hold beside weights, gradients and optimiser.

    Without recompute that is when the loss is computed. With it a block keeps its input, and it is then, or when
    the largest block stands there in full because it is computed again. Without `copies` autocast finds weights in
    its own dtype.
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
    """What a loss that holds all logits would keep: them in float32, and autocast's own."""
    narrow = 0 if precision == "float32" else PRECISIONS[precision]
    return tokens * config.vocab * (FLOAT + narrow)
