"""ProRes: branches that warm up over the first updates of a training."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from spheret.support.ranges import check_above_zero

# every living BranchWarmup, by its id
_LIVING: weakref.WeakValueDictionary[int, BranchWarmup] = weakref.WeakValueDictionary()


class BranchWarmup(nn.Module):
    """x times min(t/updates, 1) at update t (ProRes, arXiv 2603.05369). Before `at_update` is called it is x.

    The factor is a buffer, so that a checkpoint holds it, and a model that is loaded computes what was trained.
    """

    factor: Tensor

    def __init__(self, updates: float):
        super().__init__()
        self.updates = check_above_zero("the updates of a branch's warm-up", updates)
        self.register_buffer("factor", torch.ones(1))
        # whether it was told of an update, and whether it has run for a gradient
        self.told = self.used = False
        self.register_load_state_dict_post_hook(_tell)
        self._keep()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # copies and unpickled modules come this way
        super().__setstate__(state)
        self._keep()

    def _keep(self) -> None:
        _LIVING[id(self)] = self
        _hook_optimisers()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)

    def at_update(self, update: int) -> None:
        """Set the factor for an update, counted from 1."""
        self.told = True
        self.factor.fill_(min(update / self.updates, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.told and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.used = True
        return x * self.factor.to(x.dtype)

    def extra_repr(self) -> str:
        return f"updates={self.updates:g}"


def _tell(module: BranchWarmup, _: Any) -> None:
    # a checkpoint holds the factor of its update
    module.told = True


def at_update(model: nn.Module, update: int) -> None:
    """Set the factors of all branches of any model that warm up, for an update, counted from 1."""
    for module in model.modules():
        if isinstance(module, BranchWarmup):
            module.at_update(update)


@functools.cache
def _hook_optimisers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, options: Any) -> None:
    """Warn once if a model is trained and its warm-ups were never told of an update: they would do nothing."""
    idle = [module for reference in _LIVING.valuerefs() if (module := reference()) is not None and module.used]
    for module in idle:
        module.used, module.told = False, True
    if idle:
        warnings.warn(
            f"prores does nothing in {len(idle)} branches: nobody has told them of the update. Call "
            "spheret.connections.at_update(model, update) before each one, counted from 1.",
            stacklevel=2,
        )
