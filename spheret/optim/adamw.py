"""torch's AdamW, which starts faster."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

# torch keeps a step out of compiled graphs, and imports dynamo for it
adamw_step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the import of torch._dynamo, which takes a second at the start of every run.

    torch keeps these methods out of compiled graphs, and imports dynamo for it. No graph here holds an optimiser.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    # the first optimiser that is made puts the hooks of a step around it again
    step = adamw_step

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The tensors that the optimiser keeps for each parameter of a group after a step."""
        return "exp_avg", "exp_avg_sq", "step"
