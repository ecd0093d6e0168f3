"""`Bounded` and `Constrained`: base classes of modules whose parameters stay in a set, whatever the training loop.

After each step of any torch optimiser, the parameters that it holds are put back on the bounds that they crossed. So
they never wind up beyond a bound, and the first step inward moves the value.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Container, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from spheret.bounds import bounded_softplus, inverse_softplus
from spheret.support.sharding import local, whole


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


class _Kept(nn.Module):
    """A module that torch's optimisers ask for after their steps."""

    # every living module of the subclass, by its id
    living: ClassVar[weakref.WeakValueDictionary[int, Any]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keep()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # copies and unpickled modules come this way
        super().__setstate__(state)
        self._keep()

    def _keep(self) -> None:
        self.living[id(self)] = self
        _hook_optimisers()


@functools.cache
def _hook_optimisers() -> None:
    # not at the import: a process without such modules keeps its optimisers as they are
    register_optimizer_step_post_hook(_after_step)


class Bounded(_Kept):
    """A module with learnable scalars that are kept in an interval.

    A subclass lists its scalars in `bounded_scalars` and computes their values with `bounded_softplus`::

        class Gate(spheret.Bounded):
            def __init__(self):
                super().__init__()
                self.x = nn.Parameter(torch.zeros(1))

            def bounded_scalars(self):
                return [BoundedScalar("x", self.x, 0.1, 2.0)]

            def forward(self, h):
                return h * self.bounded_softplus(self.x, 0.1, 2.0)

    Then torch's optimisers keep the parameter in its interval, and the training metrics list the scalars that are on
    a bound. Gradients add up over micro-batches and processes as for any parameter.

    Attributes:
        exact_clamp: use torch.clamp, whose gradient is 0 beyond the bound (see spheret.bounds). The parameters are
            then left where the optimiser puts them.
    """

    living: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    exact_clamp: bool = False
    # whether an optimiser's groups were looked at for what rounds its scalars away or decays them
    _checked: bool = False

    def bounded_scalars(self) -> Iterable[BoundedScalar]:
        """The scalars of this module, without its `Bounded` submodules."""
        raise NotImplementedError(f"{type(self).__name__} must define bounded_scalars.")

    def bounded_softplus(self, x: Tensor, low: float, high: float, scale: float | Tensor = 1.0) -> Tensor:
        """scale clamp(softplus(x), low, high) in float32 or better.

        Args:
            x: the parameter.
            low: the lower bound of the value, before the scale.
            high: the upper bound.
            scale: a fixed factor.
        """
        return bounded_softplus(x, low, high, self.exact_clamp, scale)

    def project_scalars(self) -> None:
        """Put each parameter that crossed a bound back on it.

        A step of a torch optimiser does this by itself. An update that you write by hand needs the call.
        """
        _project(() if self.exact_clamp else self.bounded_scalars())

    @torch.no_grad()
    def drop_outward_gradients(self) -> None:
        """Set the gradient to 0 where the parameter is on a bound and a descent step would cross it."""
        for _, parameter, low, high in () if self.exact_clamp else self.bounded_scalars():
            if parameter.grad is not None:
                x, g = local(parameter), local(parameter.grad)
                floor, ceiling = inverse_softplus(low), inverse_softplus(high)
                g.masked_fill_(((x >= ceiling) & (g < 0)) | ((x <= floor) & (g > 0)), 0.0)


def float32_scalars(model: nn.Module) -> None:
    """Put the learnable scalars of every `Bounded` back into float32, after a model was made half-precise.

    In bfloat16 a scalar near 0.5 has neighbours 0.004 away, and the steps of an optimiser are rounded away. Call it
    before the optimiser is made. Only the scalars change; what they multiply keeps its dtype.
    """
    for module in model.modules():
        if isinstance(module, Bounded):
            for parameter in _narrow_scalars(module):
                parameter.data = parameter.data.float()


def _scalars(module: Bounded) -> list[nn.Parameter]:
    """The learnable scalars of a module: bounded ones, and a learned p."""
    return [p for p in module.parameters(recurse=False) if p.numel() == 1]


def _narrow_scalars(module: Bounded) -> list[nn.Parameter]:
    return [p for p in _scalars(module) if p.dtype in (torch.bfloat16, torch.float16)]


class Constrained(_Kept):
    """A module that restores a constraint on its weights after each step of a torch optimiser that holds some.

    constrained_by_steps: set it to False on a module to call `constrain` by hand instead.
    """

    living: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    constrained_by_steps: bool = True

    def constrain(self, held: Container[int] | None = None) -> None:
        """Restore the constraint on all weights, or on those whose id is in `held`."""
        raise NotImplementedError(f"{type(self).__name__} must define constrain.")


@torch.no_grad()
def _project(scalars: Iterable[BoundedScalar]) -> None:
    """Clamp the parameters to the inverses of their bounds, without waiting for a GPU."""
    tensors, floors, ceilings = [], [], []
    for _, parameter, low, high in scalars:
        tensor = local(parameter)
        # of a sharded scalar most processes hold nothing
        if tensor.numel():
            tensors.append(tensor)
            floors.append(inverse_softplus(low))
            ceilings.append(inverse_softplus(high))
    if tensors:
        torch._foreach_clamp_min_(tensors, floors)
        torch._foreach_clamp_max_(tensors, ceilings)


def _after_step(optimizer: Optimizer, args: Any, options: Any) -> None:
    """Project the bounded scalars that an optimiser holds, and restore the constraints on its weights."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    scalars, unchecked = [], []
    # the list of references is copied at once, so other threads may build modules meanwhile
    for reference in Bounded.living.valuerefs():
        module = reference()
        if module is None or (module.exact_clamp and module._checked):
            continue
        # a module of another model is not asked: it may be half built
        own = module.parameters() if module._modules else module._parameters.values()
        if any(id(p) in held for p in own):
            if not module._checked:
                unchecked.append(module)
                module._checked = True
            if not module.exact_clamp:
                scalars += [scalar for scalar in module.bounded_scalars() if id(scalar.parameter) in held]
    _project(scalars)
    if unchecked:
        _warn_of_scalars(unchecked, optimizer)
    for weak in Constrained.living.valuerefs():
        model = weak()
        if model is not None and model.constrained_by_steps and any(id(p) in held for p in model.parameters()):
            model.constrain(held)


def _warn_of_scalars(modules: Iterable[Bounded], optimizer: Optimizer) -> None:
    """Warn of learnable scalars that an optimiser rounds away or decays."""
    if rounded := sum(len(_narrow_scalars(module)) for module in modules):
        warnings.warn(
            f"{rounded} step sizes and radii are half-precise, where small steps of an optimiser are rounded away: "
            "call spheret.connections.float32_scalars(model) before the optimiser is made, or keep float32 weights "
            "and train under autocast.",
            stacklevel=3,
        )
    decaying = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    if decayed := sum(id(p) in decaying for module in modules for p in _scalars(module)):
        warnings.warn(
            f"the optimiser's weight decay pulls {decayed} step sizes and radii towards 0, which is not a neutral "
            "value for them: give it spheret.parameter_groups(model, weight_decay), which leaves them out.",
            stacklevel=3,
        )
