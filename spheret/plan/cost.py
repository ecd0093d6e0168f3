"""What a step computes and sends, how long it takes, and which setup fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spheret.model.config import MODERN_KV_HEADS, PRESETS, GPTConfig
from spheret.optim import newton_schulz_flops
from spheret.plan import memory
from spheret.plan.memory import FLOAT, PRECISIONS
from spheret.support.errors import unknown
from spheret.support.ranges import divisors, nearest

# the paper's sizes, GPT-2's largest, and GPT-3's 2.7 B and 6.7 B: layers, heads, width
SIZES = {**PRESETS, "1.5B": (48, 25, 1600), "2.7B": (32, 32, 2560), "7B": (32, 32, 4096)}
PARALLEL = ("ddp", "fsdp")
GPUS_PER_NODE = 8
# the share of a link's stated rate that a transfer reaches
LINK_UTILISATION = 0.8
# the share of a GPU's memory that tensors may fill; the allocator's gaps, NCCL and the CUDA context take the rest
USABLE = 0.9


@dataclass(frozen=True)
class GPU:
    """A GPU's stated rates.

    bf16, float32: matrix products without sparsity, in FLOP/s.
    memory: in bytes.
    link: NVLink or PCIe, one way, in bytes per second.
    """

    bf16: float
    float32: float
    memory: float
    link: float
    source: str


GPUS = {
    "a100": GPU(312e12, 19.5e12, 80e9, 300e9, "NVIDIA A100 datasheet, SXM 80 GB"),
    "h100": GPU(989.4e12, 66.9e12, 80e9, 450e9, "NVIDIA H100 datasheet, SXM 80 GB, without sparsity"),
    "h200": GPU(989.4e12, 66.9e12, 141e9, 450e9, "NVIDIA H200 datasheet, SXM, without sparsity"),
    "b200": GPU(2250e12, 75e12, 180e9, 900e9, "NVIDIA DGX B200 datasheet, an eighth of it, without sparsity"),
    "rtx4090": GPU(165.2e12, 82.6e12, 24e9, 32e9, "NVIDIA Ada architecture whitepaper; PCIe 4.0 x16"),
}


def split(sequences: int, gpus: int, batch_size: int) -> tuple[int, int]:
    """Sequences per GPU and micro-batch, at most `batch_size`, and micro-batches per update of `sequences` in all."""
    if gpus < 1 or sequences % gpus:
        allowed = nearest(divisors(sequences), gpus)
        raise ValueError(f"an update of {sequences} sequences divides over {allowed} processes, got {gpus}.")
    per_gpu = sequences // gpus
    batch = max(number for number in divisors(per_gpu) if number <= batch_size)
    return batch, per_gpu // batch


@dataclass(frozen=True)
class Setup:
    """How a model runs one update: on which GPUs, with which parallelism, and in which micro-batches."""

    config: GPTConfig
    gpu: GPU
    gpus: int
    parallel: str
    batch: int
    accumulation: int
    precision: str
    recompute: bool
    utilisation: float
    network: float  # between nodes, bytes per second and GPU
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.batch * self.config.block

    @property
    def tokens_per_update(self) -> int:
        return self.tokens * self.accumulation * self.gpus


def bytes_held(setup: Setup) -> dict[str, float]:
    """Bytes per GPU, by what they hold; their sum is the peak of a step.

    DDP's buckets are a copy of the gradients. FSDP2 shards weights, gradients and moments. It gathers two branches at
    a time (one ahead), and holds embeddings and head whole. An update of several micro-batches also holds every
    gradient whole.
    """
    config, precision = setup.config, setup.precision
    weights, optimizer = memory.weights_bytes(config), memory.optimizer_bytes(config, setup.optimizer)
    # FSDP gathers weights in autocast's dtype, so autocast makes no copies
    activations = memory.peak(config, setup.tokens, precision, setup.recompute, copies=setup.parallel == "ddp")
    if setup.parallel == "ddp":
        buckets = weights if setup.gpus > 1 else 0
        parts: dict[str, float] = {
            "weights": weights,
            "gradients": weights,
            "optimiser": optimizer,
            "DDP buckets": buckets,
        }
    else:
        shape, shards, number = memory.shape(config), setup.gpus, PRECISIONS[precision]
        whole = 2 * FLOAT * (shape.parameters - shape.branches)
        whole += 2 * shape.largest_branch * (2 * number + FLOAT)
        whole += weights if setup.accumulation > 1 else 0
        parts = {
            "weights": weights / shards,
            "gradients": weights / shards,
            "optimiser": optimizer / shards,
            "FSDP gathered": whole,
        }
    return {**parts, "activations": activations}


def fits(setup: Setup) -> bool:
    """Whether the peak of a step fits into the usable share of the GPU's memory."""
    return sum(bytes_held(setup).values()) <= USABLE * setup.gpu.memory


def forward_flops(config: GPTConfig, tokens: int) -> tuple[int, int]:
    """FLOP of the matrix products in all blocks, and of those in the head; attention counts as a full square."""
    d = config.width
    blocks = config.layers * tokens * (2 * config.matrix_entries + 4 * config.block * d)
    blocks += tokens * memory.connection_flops(config.build_scheme(), 2 * config.layers, d)
    return blocks, 2 * tokens * d * config.vocab


def step_flops(config: GPTConfig, tokens: int, recompute: bool = False) -> int:
    """FLOP of a forward and a backward pass; the backward counts twice the forward.

    With recompute the blocks' forward runs once more. That is an upper bound: the last operations may be skipped.
    """
    blocks, head = forward_flops(config, tokens)
    return 3 * (blocks + head) + (blocks if recompute else 0)


def optimizer_flops(config: GPTConfig, optimizer: str) -> int:
    """FLOP of the matrix products of one update. AdamW has none; Muon orthogonalizes every hidden matrix."""
    if optimizer != "muon":
        return 0
    return sum(newton_schulz_flops(rows, columns) for rows, columns in memory.shape(config).matrices)


def bytes_sent(setup: Setup) -> dict[str, float]:
    """Bytes that each GPU sends per update, with ring algorithms."""
    shape, rest = memory.shape(setup.config), (setup.gpus - 1) / setup.gpus
    # Muon's processes share the matrices out, and send each other the updates in bfloat16
    hidden = sum(rows * columns for rows, columns in shape.matrices) if setup.optimizer == "muon" else 0
    updates = {"broadcast": 2 * rest * hidden} if hidden else {}
    if setup.parallel == "ddp":
        return {"all-reduced": 2 * rest * FLOAT * shape.parameters, **updates}
    root = FLOAT * (shape.parameters - shape.branches)
    branches = PRECISIONS[setup.precision] * shape.branches
    # branches are freed after the forward and gathered again for the backward
    return {
        "gathered": rest * (setup.accumulation * (root + 2 * branches) + FLOAT * hidden),
        "reduce-scattered": rest * FLOAT * shape.parameters,
        **updates,
    }


def compute_seconds(setup: Setup) -> float:
    rate = getattr(setup.gpu, setup.precision) * setup.utilisation
    update = optimizer_flops(setup.config, setup.optimizer) / setup.gpus
    return (setup.accumulation * step_flops(setup.config, setup.tokens, setup.recompute) + update) / rate


def network_seconds(setup: Setup) -> float:
    link = setup.gpu.link if setup.gpus <= GPUS_PER_NODE else min(setup.gpu.link, setup.network)
    return sum(bytes_sent(setup).values()) / (link * LINK_UTILISATION)


def step_seconds(setup: Setup) -> float:
    """Seconds per update: computing, and the part of sending that does not overlap with it.

    DDP sends during the last micro-batch's backward, FSDP during every pass.
    """
    compute = compute_seconds(setup)
    overlap = compute if setup.parallel == "fsdp" else compute / setup.accumulation * 2 / 3
    return compute + max(0.0, network_seconds(setup) - overlap)


def _modes(sequences: int, gpus: int, batch_size: int) -> Iterator[tuple[str, bool, int, int]]:
    """Every combination of parallel, recompute, batch and accumulation."""
    batches = dict.fromkeys(split(sequences, gpus, limit) for limit in range(batch_size, 0, -1))
    for parallel, recompute, (batch, accumulation) in product(PARALLEL, (False, True), batches):
        yield parallel, recompute, batch, accumulation


def choose(
    config: GPTConfig, gpu: GPU, gpus: int, sequences: int, batch_size: int, precision: str, utilisation: float,
    network: float, optimizer: str = "adamw",
) -> Setup | None:  # fmt: skip
    """The fastest DDP setup that fits, else the fastest FSDP setup that fits, else None."""
    setups = [
        Setup(config, gpu, gpus, parallel, batch, accumulation, precision, recompute, utilisation, network, optimizer)
        for parallel, recompute, batch, accumulation in _modes(sequences, gpus, batch_size)
    ]
    fitting = [setup for setup in setups if fits(setup)]
    return min(fitting, key=lambda setup: (PARALLEL.index(setup.parallel), step_seconds(setup)), default=None)


def sized(size: str, scheme: str, block: int = 1024, **options: Any) -> GPTConfig:
    """The config of a model of a size of SIZES, or of a modern preset, with further options."""
    if size in MODERN_KV_HEADS:
        return GPTConfig.preset(size, block=block, scheme=scheme, **options)
    if size not in SIZES:
        raise unknown("size", size, [*SIZES, *MODERN_KV_HEADS])
    layers, heads, width = SIZES[size]
    return GPTConfig(layers=layers, heads=heads, width=width, block=block, scheme=scheme, **options)


def resized(size: str, like: GPTConfig) -> GPTConfig:
    """The config of a size of SIZES with the other options of a config.

    As many heads of queries share a head of keys if that divides the heads, else each has its own.
    """
    layers, heads, width = SIZES[size]
    group = like.shape.heads // like.shape.kv_heads
    kv_heads = None if group == 1 else heads // group if heads % group == 0 else heads
    return replace(like, layers=layers, heads=heads, width=width, kv_heads=kv_heads)
