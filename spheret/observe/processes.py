"""The processes that train together: what each has seen becomes what all of them know, so that they decide alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from spheret.support.precision import widest

T = TypeVar("T")


class Processes:
    """All processes of torch.distributed, or only this one. If there are several, each must call every method.

    Args:
        device: where the tensors are that are sent, e.g. for NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        distributed = torch.distributed
        together = distributed.is_available() and distributed.is_initialized()
        self.size = distributed.get_world_size() if together else 1
        self.is_main = not together or distributed.get_rank() == 0
        self._device = device

    def sum(self, values: Tensor) -> Tensor:
        if self.size == 1:
            return values
        values = values.to(self._device, copy=True)
        torch.distributed.all_reduce(values)
        return values

    def of_main(self, values: Sequence[float | None]) -> list[float | None]:
        """The numbers of the main process. None stands for one that is not finite."""
        if self.size > 1:
            held = [math.nan if value is None else value for value in values]
            sent = torch.tensor(held, dtype=widest(self._device), device=self._device)
            torch.distributed.broadcast(sent, 0)
            values = sent.tolist()
        return [value if value is not None and math.isfinite(value) else None for value in values]

    def first(self, value: T | None) -> T | None:
        """The value of the first process that has one."""
        if self.size == 1:
            return value
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return next((each for each in values if each is not None), None)
