"""The bytes that a training step holds, by arithmetic. Tests compare them with what autograd keeps of a real step.

Branches and loss are formulas. What a scheme adds to them is counted by running it on a few rows, so that a new
scheme needs no formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from spheret.connections import BranchShape, HeadNorm, Scheme, State
from spheret.kernels import use
from spheret.model.branches import activate, arrange, rotation
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.loss import training_rows
from spheret.optim import hidden_matrices

# bytes per number inside a branch; the stream, the weights and the optimiser are float32 in both precisions
PRECISIONS = {"float32": 4, "bf16": 2}
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
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


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _storages(run: Callable[[], State], others: Iterable[Tensor]) -> dict[int, int]:
    """Addresses and bytes of the storages that autograd keeps of a forward pass, without those of `others`."""
    own = set(map(_address, others))
    # holding the tensors keeps their addresses from being used again
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> None:
        # there is no backward; a graph that held its own results would never be freed
        seen[_address(x)] = x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept_alive = run()
    kept = {address: x.untyped_storage().nbytes() for address, x in seen.items() if address not in own}
    del kept_alive
    # the graph also holds `pack`, and so `seen`
    seen.clear()
    return kept


def autograd_keeps(run: Callable[[], State], others: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps of a forward pass for its backward: every storage once, without `others`."""
    return sum(_storages(run, others).values())


@dataclass(frozen=True)
class Kept:
    """Bytes per token: `wide` for each number of its row, and `fixed`."""

    wide: float
    fixed: float

    def bytes(self, tokens: int, width: int) -> float:
        return tokens * (self.wide * width + self.fixed)


# many short rows: what does not grow with the rows (a gain, a step) vanishes in the division by their number
_ROWS, _WIDTHS = 1024, (8, 16)


def _line(counts: Iterable[int], widths: tuple[int, int] = _WIDTHS) -> Kept:
    """Kept, from counts at two widths."""
    (narrow, wide), (d, e) = (count / _ROWS for count in counts), widths
    slope = round((wide - narrow) / (e - d))
    return Kept(slope, max(0, round(narrow - slope * d)))


def _autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@dataclass(frozen=True)
class Carried:
    """What a scheme keeps between its entry and the head.

    sublayers: what each connection keeps, including its branch's input, which is all that the branch here keeps.
    exit: what the exit keeps.
    inputs: the states before all blocks together.

    A tensor that stays in the state from sublayer to sublayer is counted once.
    """

    sublayers: tuple[Kept, ...]
    exit: Kept
    inputs: Kept


@lru_cache(maxsize=256)
def _carried(scheme: Scheme, num_sublayers: int, precision: str, backend: str | None) -> Carried:
    both = [_carried_bytes(scheme, num_sublayers, precision, backend, width) for width in _WIDTHS]
    *sublayers, leaving, inputs = (_line(counts) for counts in zip(*both, strict=True))
    return Carried(tuple(sublayers), leaving, inputs)


def _carried_bytes(scheme: Scheme, num_sublayers: int, precision: str, backend: str | None, width: int) -> list[int]:
    """The bytes of each field of `Carried` at one width, in order."""
    counts: list[int] = []
    # tensors of the state that are counted already, by address
    counted: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}

    def through(module: nn.Module, state: State, weights: list[nn.Parameter]) -> State:
        """The state after a connection, whose branch has the weight, or after the exit; its bytes join the counts."""
        results: list[State] = []

        def run() -> State:
            branches = [partial(F.linear, weight=weight) for weight in weights]
            with _autocast(precision), use(backend) if backend else nullcontext():
                results.append(module(state, *branches))
            return results

        kept = _storages(run, [*module.parameters(), *weights, *counted.values()])
        copies = 0 if precision == "float32" else PRECISIONS[precision] * sum(weight.numel() for weight in weights)
        counts.append(sum(kept.values()) - copies)
        known = kept.keys() | counted.keys()
        counted.clear()
        counted.update((_address(x), x) for x in tree_leaves(results) if _address(x) in known)
        return tree_map(lambda x: x.detach().requires_grad_(), results.pop())

    x = torch.ones(_ROWS, width, requires_grad=True)
    # the state of one stream is the stream, whose entry may not allow so small a width
    state: State = x if scheme.one_stream else scheme.enter(width)(x)
    for sublayer in range(1, num_sublayers + 1):
        if sublayer % 2:
            inputs |= {_address(x): x for x in tree_leaves(state)}
        weight = nn.Parameter(torch.zeros(width, width))
        state = through(scheme.connect(width, sublayer, num_sublayers), state, [weight])
    through(scheme.exit(width), state, [])
    return [*counts, sum(x.untyped_storage().nbytes() for x in inputs.values())]


# so few tokens, and twice as many: the difference is what grows with the tokens
_TOKENS = 2


def _per_token(run: Callable[[int], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes that autograd keeps per token of a function of a number of tokens."""
    few, many = (autograd_keeps(partial(run, tokens), parameters) for tokens in (_TOKENS, 2 * _TOKENS))
    return (many - few) // _TOKENS


def _kept(*kept: Tensor) -> Tensor:
    """A function that keeps its arguments and nothing else, as attention keeps q, k and v."""
    return torch.stack([x.sin().sum() for x in kept])


# a scheme, a sublayer and their number: where a scheme puts a module inside a branch
Place = tuple[Scheme, int, int]


@lru_cache(maxsize=4096)
def _attention(shape: BranchShape, qk_norm: bool, rope: bool, place: Place | None, precision: str) -> int:
    """Bytes per token of q, k and v, and of what is computed on the way to them from their projection."""
    inside: nn.Module | None = HeadNorm(shape.head_dim) if qk_norm else None
    if place is not None:
        inside = place[0].inside_attention(shape, *place[1:])
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def run(tokens: int) -> Tensor:
        projected = torch.ones(1, tokens, width, dtype=_DTYPES[precision], requires_grad=True)
        with _autocast(precision):
            return _kept(*arrange(projected, shape, inside, turn if rope else None))

    # all layers share one rotation: here it is that of one token, which does not grow with the tokens
    turn = rotation(torch.zeros(1), shape.head_dim, 1.0)
    return _per_token(run, [] if inside is None else list(inside.parameters()))


@lru_cache(maxsize=4096)
def _mlp(shape: BranchShape, kind: str, place: Place | None, precision: str) -> int:
    """Bytes per token of the hidden layer before and after its activation, and of what the scheme puts inside."""
    inside = None if place is None else place[0].inside_mlp(shape, *place[1:])
    width = (2 if shape.gated else 1) * shape.hidden

    def run(tokens: int) -> Tensor:
        hidden = torch.ones(tokens, width, dtype=_DTYPES[precision], requires_grad=True)
        with _autocast(precision):
            return _kept(activate(hidden if inside is None else inside(hidden), kind))

    return _per_token(run, [] if inside is None else list(inside.parameters()))


def _branches(config: GPTConfig, precision: str) -> tuple[int, int]:
    """Bytes per token inside all attentions and inside all MLPs, without attention's result."""
    scheme, shape, count = config.build_scheme(), config.shape, 2 * config.layers
    attention = mlp = 0
    for sublayer in range(1, count + 1):
        ask = scheme.inside_attention if sublayer % 2 else scheme.inside_mlp
        # most schemes put nothing there, and all sublayers are the same
        with torch.device("meta"):
            place = None if ask(shape, sublayer, count) is None else (scheme, sublayer, count)
        if sublayer % 2:
            attention += _attention(shape, config.qk_norm, config.positions == "rope", place, precision)
        else:
            mlp += _mlp(shape, config.mlp, place, precision)
    return attention, mlp


def rotation_bytes(config: GPTConfig, tokens: int) -> int:
    """Bytes of the rotary positions of so many tokens: a cosine and a sine per pair of a head's entries."""
    return FLOAT * config.shape.head_dim * tokens if config.positions == "rope" else 0


def _logit_gain(scheme: Scheme) -> Kept:
    """What the scheme's gain of the logits keeps, per row of the head's weight and not per token."""

    def count(width: int) -> int:
        gain, weight = scheme.logit_gain(width, _ROWS), nn.Parameter(torch.ones(_ROWS, width))
        if gain is None:
            return 0
        return autograd_keeps(lambda: gain(weight.mT).sin(), [weight, *gain.parameters()])

    return _line(map(count, _WIDTHS))


@lru_cache(maxsize=4096)
def _entry(scheme: Scheme, least: int) -> Kept:
    """What the entry keeps. least: the model's width, as an option may not allow a smaller one."""

    def count(width: int) -> int:
        module, x = scheme.enter(width), torch.ones(_ROWS, width, requires_grad=True)
        return autograd_keeps(lambda: module(x), list(module.parameters()))

    widths = least, 2 * least
    return _line(map(count, widths), widths)


@lru_cache(maxsize=256)
def connection_flops(scheme: Scheme, num_sublayers: int, width: int) -> int:
    """FLOP per token of the matrix products outside the branches: in entry, connections and exit."""
    # the counter hooks whatever needs a gradient
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        state = scheme.enter(width).requires_grad_(False)(torch.empty(1, width))
        for sublayer in range(1, num_sublayers + 1):
            connection = scheme.connect(width, sublayer, num_sublayers).requires_grad_(False)
            state = connection(state, lambda x: x)
        scheme.exit(width).requires_grad_(False)(state)
    return counter.get_total_flops()


def connections(config: GPTConfig, tokens: int, precision: str, backend: str | None = None) -> list[float]:
    """Bytes that each sublayer's connection keeps, including its branch's input."""
    kept = _carried(config.build_scheme(), 2 * config.layers, precision, backend).sublayers
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
    d, shape, number = config.width, config.shape, PRECISIONS[precision]
    queries_keys_values = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return Activations(
        connections=2 * config.layers * tokens * d * number,
        attention=config.layers * tokens * ((queries_keys_values + d) * number + FLOAT * config.heads),
        # before and after the activation, which halves it if it is gated
        mlp=config.layers * tokens * (3 if shape.gated else 2) * shape.hidden * number,
        # token ids and targets, the final stream and its gradient, the gradient of the head, and rotary positions
        ends=tokens * (16 + 2 * FLOAT * d) + FLOAT * config.vocab * d + rotation_bytes(config, config.block),
        copies=0 if precision == "float32" else number * config.matrix_entries * config.layers,
    )


def activations(config: GPTConfig, tokens: int, precision: str) -> Activations:
    """What autograd keeps of one forward pass over `tokens` tokens, without recompute.

    Attention keeps q, k, v, its result, and one log-sum-exp per head and token. The flash kernels of CUDA and CPU
    keep no square of scores. The MLP keeps its hidden layer before and after the activation. The loss keeps the final
    stream, its gradient and the head's gradient. It computes both gradients with the loss, so it keeps no logits.
    """
    scheme, d, least = config.build_scheme(), config.width, least_activations(config, tokens, precision)
    leaving = _carried(scheme, 2 * config.layers, precision, None).exit
    ends = sum(kept.bytes(tokens, d) for kept in (_entry(scheme, d), leaving))
    ends += _logit_gain(scheme).bytes(config.vocab, d)
    attention, mlp = _branches(config, precision)
    attention += config.layers * (d * PRECISIONS[precision] + FLOAT * config.heads)
    return replace(
        least,
        connections=sum(connections(config, tokens, precision)),
        attention=tokens * attention,
        mlp=tokens * mlp,
        ends=least.ends + ends,
    )


def loss_workspace(config: GPTConfig, tokens: int, precision: str) -> float:
    """Bytes in use only while the loss is computed: a few chunks of logits, and two products as large as the head."""
    number, rows = PRECISIONS[precision], min(tokens, training_rows(config.width))
    narrow = 0 if precision == "float32" else number
    return rows * config.vocab * (2 * FLOAT + narrow) + config.vocab * config.width * (number + narrow)


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
    inputs = _carried(config.build_scheme(), 2 * config.layers, precision, None).inputs.bytes(tokens, config.width)
    # autocast holds its copies until the forward ends
    return inputs + kept.ends + max(workspace + kept.copies, block)


def full_logits(config: GPTConfig, tokens: int, precision: str) -> float:
    """What a loss that holds all logits would keep: the logits in float32, and autocast's copy of them."""
    narrow = 0 if precision == "float32" else PRECISIONS[precision]
    return tokens * config.vocab * (FLOAT + narrow)
