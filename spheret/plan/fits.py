"""Whether a model can fit into a machine, by arithmetic alone: it is asked before anything is built or written."""

from __future__ import annotations

import torch

from spheret.model.gpt import GPTConfig
from spheret.plan import memory
from spheret.plan.memory import FLOAT
from spheret.runs.config import RunConfig
from spheret.support.machine import check_bytes

# what else helps, in the commands that have the flag
IGNORE_MEMORY = ", or give --ignore-memory to try all the same"


def least_training_bytes(
    config: GPTConfig, tokens: int, precision: str, shards: int = 1, optimizer: str = "adamw"
) -> float:
    """A lower bound of what training on micro-batches of `tokens` tokens holds at once, whatever the scheme.

    shards: the number of processes among which FSDP divides weights, gradients and moments.
    """
    kept = memory.least_activations(config, tokens, precision)
    workspace = memory.loss_workspace(config, tokens, precision)
    # weights, gradients and AdamW's two moments, or Muon's one moment of a matrix
    held = 4 * FLOAT * config.least_parameters / shards
    if optimizer == "muon":
        held -= FLOAT * config.matrix_entries * config.layers / shards
    if not config.recompute:
        return held + kept.total + workspace
    block = (kept.connections + kept.attention + kept.mlp + kept.copies) / config.layers
    inputs = config.layers * tokens * FLOAT * config.width
    return held + inputs + kept.ends + max(workspace + kept.copies, block)


def check_training(
    config: GPTConfig,
    tokens: int,
    precision: str,
    device: torch.device,
    shards: int = 1,
    remedy: str = "",
    optimizer: str = "adamw",
) -> None:
    """Raise if training cannot fit into the memory of the device.

    tokens: those of one micro-batch of one process. remedy: what else helps, beside a smaller model or batch.
    """
    needed = least_training_bytes(config, tokens, precision, shards, optimizer)
    model = f"{config.layers:,} layers of width {config.width:,}, and {tokens:,} tokens at once,"
    check_bytes(needed, device, f"training {model}", f"take a smaller model, batch or block{remedy}")


def check_run(config: RunConfig, device: torch.device, ignore: bool, shards: int = 1) -> None:
    """Raise if the model and a micro-batch of a run cannot fit into the memory of the device.

    ignore: what --ignore-memory says.
    """
    if not ignore:
        tokens = config.train.batch_size * config.model.block
        train = config.train
        check_training(config.model, tokens, train.precision, device, shards, IGNORE_MEMORY, train.optimizer)


def check_generating(config: GPTConfig, rows: int, tokens: int, device: torch.device) -> None:
    """Raise if generating `rows` texts of `tokens` tokens at once cannot fit: weights, keys and values, and ids."""
    cache = 2 * FLOAT * config.layers * config.block * config.shape.kv_heads * config.shape.head_dim
    needed = FLOAT * config.least_parameters + rows * (cache + 8 * tokens)
    check_bytes(needed, device, f"{rows:,} texts of {tokens:,} tokens at once", "ask for fewer or shorter texts")
