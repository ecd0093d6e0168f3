"""Where the first value that is not finite stands: in the weights, the forward pass or the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from spheret.support.sharding import local
from spheret.watching.alarms import Item

Group = tuple[Item, dict[str, nn.Parameter]]
# what is said if no place has such a value: by whether the loss is one
WHOLE = {
    True: "the loss is not finite, though the output of every module is",
    False: "the norm of the gradient overflowed",
}


class BadPlace(NamedTuple):
    """A place, and what is not finite there."""

    item: Item
    sentence: str


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(local(x.detach()).isfinite().all())


def bad_weights(groups: Sequence[Group]) -> BadPlace | None:
    """The first place with such weights, in the order of the model."""
    for item, group in groups:
        for name, parameter in group.items():
            if not _is_finite(parameter):
                return BadPlace(item, f"the weights {name} are not finite")
    return None


def bad_gradient(groups: Sequence[Group]) -> BadPlace | None:
    """The first place with such a gradient. groups: in the order of the backward pass."""
    for item, group in groups:
        for name, parameter in group.items():
            if parameter.grad is not None and not _is_finite(parameter.grad):
                return BadPlace(item, f"the gradient of {name} is not finite")
    return None


def bad_output(model: nn.Module, call: Callable[[], object], groups: Sequence[Group]) -> BadPlace | None:
    """The first module whose output is not finite while `call` calls the model."""
    found: list[str] = []

    def check(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, (tuple, list)) else [output]
            if not found and not all(_is_finite(x) for x in parts if isinstance(x, Tensor)):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(check(name)) for name, module in model.named_modules() if name]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return None
    item = next((item for item, group in groups if _holds(item.name, group, found[0])), Item(found[0], ""))
    return BadPlace(item, f"the output of {found[0]} is not finite")


def _holds(place: str, group: dict[str, nn.Parameter], module: str) -> bool:
    """Whether a module belongs to a place, by its name or by its weights."""
    return module == place or module.startswith(f"{place}.") or any(name.startswith(f"{module}.") for name in group)
