"""What a run costs, before it starts: parameters, FLOPs, and the memory of a step."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from spheret.connections import Scheme
from spheret.kernels import use
from spheret.model.gpt import GPT, GPTConfig
from spheret.optim import hidden_matrices, newton_schulz_flops
from spheret.runs.config import RunConfig
from spheret.support.machine import check_bytes
from spheret.support.ranges import divisors, nearest

# bytes per number inside a branch; the stream, the weights and the optimiser are float32 in both precisions
PRECISIONS = {"float32": 4, "bf16": 2}
FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """The number of parameters, and the rows and columns of every matrix that Muon orthogonalizes."""

    parameters: int
    matrices: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _shape(config: str) -> Shape:
    with torch.device("meta"):
        model = GPT(GPTConfig.from_dict(json.loads(config)))
    hidden = hidden_matrices(model)
    matrices = tuple((rows, weight.shape[1]) for weight, heights in hidden.items() for rows in heights)
    return Shape(model.parameter_count(), matrices)


def shape(config: GPTConfig) -> Shape:
    return _shape(json.dumps(config.as_dict()))


def split(sequences: int, processes: int, batch_size: int) -> tuple[int, int]:
    """Sequences per process and micro-batch, at most `batch_size`, and micro-batches per update of `sequences`."""
    if processes < 1 or sequences % processes:
        allowed = nearest(divisors(sequences), processes)
        raise ValueError(f"an update of {sequences} sequences divides over {allowed} processes, got {processes}.")
    each = sequences // processes
    batch = max(number for number in divisors(each) if number <= batch_size)
    return batch, each // batch


@lru_cache(maxsize=256)
def _connection_flops(scheme: Scheme, num_sublayers: int, width: int) -> int:
    """FLOP per token of the matrix products outside the branches: in entry, connections and exit."""
    # the counter hooks whatever needs a gradient
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        state = scheme.enter(width).requires_grad_(False)(torch.empty(1, width))
        for sublayer in range(1, num_sublayers + 1):
            connection = scheme.connect(width, sublayer, num_sublayers).requires_grad_(False)
            state = connection(state, lambda x: x)
        scheme.exit(width).requires_grad_(False)(state)
    return counter.get_total_flops()


def step_flops(config: GPTConfig, tokens: int, recompute: bool = False) -> int:
    """FLOP of the matrix products of a forward and a backward pass; attention counts as a full square.

    The backward counts twice the forward. With recompute the blocks' forward runs once more. That is an upper bound:
    the last operations may be skipped.
    """
    d = config.width
    blocks = config.layers * tokens * (2 * config.matrix_entries + 4 * config.block * d)
    blocks += tokens * _connection_flops(config.build_scheme(), 2 * config.layers, d)
    return 3 * (blocks + 2 * tokens * d * config.vocab) + (blocks if recompute else 0)


def optimizer_flops(config: GPTConfig, optimizer: str) -> int:
    """FLOP of the matrix products of one update. AdamW has none; Muon orthogonalizes every hidden matrix."""
    if optimizer != "muon":
        return 0
    return sum(newton_schulz_flops(rows, columns) for rows, columns in shape(config).matrices)


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that exist at once, counted after every operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._see(x.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _see(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.held:
            self.held[key] = storage.nbytes()
            self.now += self.held[key]
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.held.pop(key)


def step_bytes(
    config: GPTConfig, sequences: int, precision: str, optimizer: str = "adamw", shards: int = 1
) -> dict[str, int]:
    """Bytes that training holds at the peak of a step, by what they hold.

    A real step runs on tensors without memory, so that every scheme and option is counted without a formula. FSDP
    divides weights, gradients and moments over `shards` processes; what it gathers is not counted.
    """
    with FakeTensorMode(), use("closed"), _Peak() as peak:
        model = GPT(config)
        for parameter in model.parameters():
            # gradients of an earlier micro-batch
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.zeros(sequences, config.block, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            # ids would be read, and these have no values
            loss = model(model.tokens(tokens), tokens.clone())
        loss.backward()
    weights = FLOAT * shape(config).parameters
    one_moment = FLOAT * sum(rows * columns for rows, columns in shape(config).matrices)
    return {
        "weights": weights // shards,
        "gradients": weights // shards,
        optimizer: (2 * weights - (one_moment if optimizer == "muon" else 0)) // shards,
        "activations": peak.most - 2 * weights,
    }


def least_training_bytes(
    config: GPTConfig, tokens: int, precision: str, shards: int = 1, optimizer: str = "adamw"
) -> float:
    """A lower bound of what training on micro-batches of `tokens` tokens holds, whatever the scheme, by arithmetic.

    shards: the number of processes among which FSDP divides weights, gradients and moments.
    """
    branch, layers = config.shape, config.layers
    # weights, gradients and AdamW's two moments, or Muon's one moment of a matrix
    held = 4 * FLOAT * config.least_parameters / shards
    if optimizer == "muon":
        held -= FLOAT * config.matrix_entries * layers / shards
    # the inputs of both branches, q, k, v and attention's result, and the MLP's hidden layer before and after the
    # activation, which halves it if it is gated
    numbers = 3 * config.width + (branch.heads + 2 * branch.kv_heads) * branch.head_dim
    numbers += (3 if branch.gated else 2) * branch.hidden
    kept = FLOAT * config.width if config.recompute else numbers * PRECISIONS[precision]
    return held + layers * tokens * kept


def check_run(config: RunConfig, device: torch.device, ignore: bool, shards: int = 1) -> None:
    """Raise if the model and a micro-batch of a run cannot fit into the memory of the device.

    ignore: what --ignore-memory says.
    """
    if ignore:
        return
    model, train = config.model, config.train
    tokens = train.batch_size * model.block
    needed = least_training_bytes(model, tokens, train.precision, shards, train.optimizer)
    check_bytes(
        needed,
        device,
        f"training {model.layers:,} layers of width {model.width:,}, and {tokens:,} tokens at once,",
        "take a smaller model, batch or block, or give --ignore-memory to try all the same",
    )


def check_model(config: GPTConfig, device: torch.device, what: str) -> None:
    """Raise if a model's weights cannot fit into the memory of the device."""
    check_bytes(FLOAT * config.least_parameters, device, what, "its config.json is damaged, or take a larger machine")


def check_generating(config: GPTConfig, rows: int, tokens: int, device: torch.device) -> None:
    """Raise if generating `rows` texts of `tokens` tokens at once cannot fit: weights, keys and values, and ids."""
    cache = 2 * FLOAT * config.layers * config.block * config.shape.kv_heads * config.shape.head_dim
    needed = FLOAT * config.least_parameters + rows * (cache + 8 * tokens)
    check_bytes(needed, device, f"{rows:,} texts of {tokens:,} tokens at once", "ask for fewer or shorter texts")
