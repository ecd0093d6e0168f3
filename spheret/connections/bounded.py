"""`Bounded`: the base class of modules with learnable scalars that are kept in an interval."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from spheret.bounds import bounded_softplus
from spheret.support.sharding import whole


class BoundedScalar(NamedTuple):
    """A parameter x whose value is clamp(softplus(x), low, high)."""

    name: str
    parameter: nn.Parameter
    low: float
    high: float

    def softplus(self) -> Tensor:
        """softplus(x) before the clamp, without a gradient. It gathers a sharded parameter."""
        return F.softplus(whole(self.parameter))

    def value(self) -> float:
        """clamp(softplus(x), low, high) of a 1-element x as a Python number."""
        return min(max(float(self.softplus()), self.low), self.high)


class Bounded(nn.Module):
    """A module with learnable scalars that are kept in an interval.

    A subclass lists its scalars in `bounded_scalars` and computes their values with `bounded_softplus`:

        class Gate(spheret.Bounded):
            def __init__(self):
                super().__init__()
                self.x = nn.Parameter(torch.zeros(1))

            def bounded_scalars(self):
                return [BoundedScalar("x", self.x, 0.1, 2.0)]

            def forward(self, h):
                return h * self.bounded_softplus(self.x, 0.1, 2.0)

    Then `sum_bounded_gradients` and `stop_outward_gradients` of spheret.optim handle the scalars, and the training
    metrics list those that are on a bound.

    exact_clamp: use torch.clamp, whose gradient is 0 beyond the bound (see spheret.bounds).
    passing: let every gradient through. `sum_bounded_gradients` sets it.
    """

    exact_clamp: bool = False
    passing: bool = False

    def bounded_scalars(self) -> Iterable[BoundedScalar]:
        """The scalars of this module, without those of its submodules."""
        raise NotImplementedError(f"{type(self).__name__} must define bounded_scalars.")

    def bounded_softplus(self, x: Tensor, low: float, high: float, scale: float = 1.0) -> Tensor:
        """scale clamp(softplus(x), low, high) in float32 or better."""
        return bounded_softplus(x, low, high, self.exact_clamp, scale, self.passing)
