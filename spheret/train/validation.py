"""The loss on fixed windows, which the processes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from spheret.data import Validation
from spheret.model.gpt import GPT
from spheret.train.distributed import World


@torch.no_grad()
def validate(
    model: GPT, windows: Validation, world: World, precision: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, dict[int, tuple[int, float]]]:
    """The validation loss, and per document its tokens and summed loss."""
    mine: dict[int, list[tuple[int, int, float]]] = {}
    model.eval()
    for number, (x, y, documents) in enumerate(windows):
        # a process without a batch in the last round computes it too: shards are gathered by all together
        ours, last = number % world.size == world.rank, number == len(windows) - 1
        if not ours and not (last and world.rank > number % world.size):
            continue
        with precision():
            losses = model.token_losses(x.to(world.device), y.to(world.device))
        flat, owner = losses.cpu().double().flatten().numpy(), documents.flatten().numpy()
        if ours:
            counts, sums = np.bincount(owner), np.bincount(owner, flat)
            mine[number] = [(int(d), int(counts[d]), float(sums[d])) for d in np.flatnonzero(counts)]
    model.train()
    totals: dict[int, tuple[int, float]] = {}
    # added up in the order of the batches, on whichever process they were computed
    for _, rows in sorted(pair for part in world.gather(mine) for pair in part.items()):
        for document, tokens, loss in rows:
            before = totals.get(document, (0, 0.0))
            totals[document] = before[0] + tokens, before[1] + loss
    return sum(loss for _, loss in totals.values()) / sum(tokens for tokens, _ in totals.values()), totals
