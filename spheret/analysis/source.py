"""Where a command's tokens come from: a run's data, or other data in the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from spheret.data import Data, open_named
from spheret.runs.run import Run


def data_of(run: Run, given: str | None) -> Data:
    """The run's own data, or the prepared directory or named corpus that was given, in the run's tokens."""
    if given is None:
        return run.data()
    described = run.config["data"]["tokenizer"]
    data = open_named(given, described["name"], quiet=True)
    if data.manifest["tokenizer"] != described:
        raise ValueError(
            f"the tokenizer of {given} is another {described['name']!r} than {run.path} was trained with: "
            "prepare the data with the run's own tokenizer."
        )
    return data


def validation_windows(data: Data, block: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of as many validation windows as hold `tokens`, (windows, time), spread over the split."""
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {tokens}.")
    there = data.tokens("val")
    time = min(block, there - 1)
    whole = (there - 1) // time * time if time > 0 else 0
    if tokens > whole:
        raise ValueError(
            f"{tokens:,} tokens were asked for, and the validation split of {data.path} has {whole:,} in whole "
            f"windows: ask for fewer, or give other data with --data."
        )
    every = list(data.validation(time, 16, windows=-(-tokens // time)))
    return torch.cat([x for x, _, _ in every]), torch.cat([y for _, y, _ in every])
