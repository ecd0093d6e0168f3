"""Where the first value that is not finite stands: in the weights, the forward pass or the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from spheret.observe.finding import Anatomy
from spheret.observe.judge import Item
from spheret.observe.measures import expert_of
from spheret.observe.records import Event, NotFinite
from spheret.observe.rules import REMEDIES
from spheret.support.sharding import local

# where no place has such a value
_NOWHERE: dict[NotFinite, str] = {
    "loss": "the loss is not finite, though the output of every module is",
    "gradient norm": "the norm of the whole gradient overflowed, though every gradient is finite",
}


def items_of(anatomy: Anatomy, name: Callable[[int], str] | None = None) -> list[Item]:
    """What is judged: the sublayers, then the other places. name: what a sublayer is called, if not as its module."""
    items = [
        Item(
            name(number) if name is not None else found.name,
            found.peers,
            number,
            (found.name,) if found.join is None else (found.name, found.join.module),
            found.parameters,
            experts=_experts(found.parameters),
        )
        for number, found in enumerate(anatomy.sublayers, start=1)
    ]
    peers = "layer" if anatomy.found == "parameters only" else ""
    return items + [
        Item(
            place, peers if any(c.isdigit() for c in place) else "", parameters=parameters,
            runs=place not in anatomy.idle and expert_of(place) is None, experts=_experts(parameters),
        )
        for place, parameters in anatomy.places.items()
    ]  # fmt: skip


def _experts(names: Iterable[str]) -> int:
    """How many experts the parameters of these names belong to."""
    return len({expert for name in names if (expert := expert_of(name)) is not None})


def bad_value(step: int, item: Item, measured: NotFinite, sentence: str, parameter: str | None = None) -> Event:
    """The event of a place, of what is not finite there, and of this in a sentence. parameter: the bad weights."""
    return Event(
        "not finite", step, item.name, sentence, REMEDIES["not finite"],
        sublayer=item.sublayer, parameter=parameter, measured=measured,
    )  # fmt: skip


def bad_nowhere(step: int, measured: NotFinite) -> Event:
    """The loss or the norm of the whole gradient is not finite, and every place is."""
    return bad_value(step, Item("the model", ""), measured, _NOWHERE[measured])


def is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(local(x.detach()).isfinite().all())


def _inside(item: Item, name: str) -> str:
    """The end of a sentence about a module or a parameter: what it is a part of, if its name does not say so."""
    return "" if name == item.name or name.startswith(f"{item.name}.") else f", in {item.name}"


def bad_weights(step: int, items: Sequence[Item]) -> Event | None:
    """The first place with such weights, in the order of the model."""
    for item in items:
        for name, parameter in item.parameters.items():
            if not is_finite(parameter):
                sentence = f"the weights {name} are not finite{_inside(item, name)}"
                return bad_value(step, item, "weights", sentence, name)
    return None


def bad_gradient(step: int, items: Sequence[Item], entry: Collection[str]) -> Event | None:
    """The first place with such a gradient, in the order of the backward pass. entry: see `Anatomy`."""

    def order(item: Item) -> int:
        return 1 if item.sublayer is not None else 0 if item.name in entry else 2

    for item in sorted(items, key=order)[::-1]:
        for name, parameter in item.parameters.items():
            if parameter.grad is not None and not is_finite(parameter.grad):
                sentence = f"the gradient of {name} is not finite{_inside(item, name)}"
                return bad_value(step, item, "gradient", sentence, name)
    return None


@contextmanager
def bad_outputs(step: int, model: nn.Module, items: Sequence[Item]) -> Iterator[list[Event]]:
    """Within the block, the first module whose output is not finite is put into the list."""
    found: list[Event] = []

    def check(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, (tuple, list)) else [output]
            if not found and not all(is_finite(x) for x in parts if isinstance(x, Tensor)):
                item = next((item for item in items if _holds(item, name)), Item(name, ""))
                joined = len(item.modules) > 1 and name == item.modules[1]
                measured: NotFinite = "output" if item.sublayer is None or joined else "branch"
                sentence = f"the output of {name} is not finite{_inside(item, name)}"
                found.append(bad_value(step, item, measured, sentence))

        return hook

    handles = [module.register_forward_hook(check(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _holds(item: Item, module: str) -> bool:
    """Whether a module belongs to a place, by its name or by its weights."""
    named = any(f"{module}.".startswith(f"{name}.") for name in (item.name, *item.modules))
    return named or any(name.startswith(f"{module}.") for name in item.parameters)
