"""What `certify` and `inspect` work on: a device with float64, data in the run's tokens, and validation windows."""

from __future__ import annotations

import torch
from torch import Tensor

from spheret.data import Data, open_named
from spheret.runs.run import Run
from spheret.support.machine import resolve_device


def float64_device(name: str) -> torch.device:
    """The device of that name. It must have float64 arithmetic, so mps is an error."""
    device = resolve_device(name)
    if device.type == "mps":
        raise ValueError("--device mps has no float64 arithmetic, which this command needs: use --device cpu.")
    return device


def open_data(run: Run, name: str | None) -> Data:
    """The prepared directory or corpus of that name; None is the run's own data. The tokenizer must be the run's."""
    if name is None:
        return run.data()
    tokenizer = run.config.data.tokenizer
    data = open_named(name, tokenizer.name, quiet=True)
    if data.manifest.tokenizer != tokenizer:
        raise ValueError(
            f"the tokenizer of {name} differs from the {tokenizer.name!r} that {run.path} was trained with: "
            "prepare the data with the run's own tokenizer."
        )
    return data


# how many tokens of the validation split the loss in a certificate is measured on, if there are as many
_LOSS_TOKENS = 4096


def loss_windows(data: Data, block: int, most: int = _LOSS_TOKENS) -> tuple[Tensor, Tensor]:
    """Inputs and targets of about 4,096 tokens of the validation split, or of `most` if that is less, for a loss."""
    available = data.tokens("val")
    time = max(1, min(block, available - 1))
    return validation_windows(data, block, min(_LOSS_TOKENS, most, (available - 1) // time * time))


def validation_windows(data: Data, block: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (windows, time), of the fewest validation windows that hold `tokens` tokens.

    The windows are spread over the validation split.
    """
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {tokens}.")
    available = data.tokens("val")
    time = min(block, available - 1)
    usable = (available - 1) // time * time if time > 0 else 0
    if tokens > usable:
        raise ValueError(
            f"{tokens:,} tokens were asked for, but the whole windows of the validation split of {data.path} hold "
            f"{usable:,}: ask for fewer, or give other data with --data."
        )
    batches = list(data.validation(time, 16, windows=-(-tokens // time)))
    return torch.cat([x for x, _, _ in batches]), torch.cat([y for _, y, _ in batches])
