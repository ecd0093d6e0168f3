"""The sublayers of a model as functions of single tokens, to be differentiated in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spheret.connections import Connection
from spheret.connections.base import add
from spheret.conversion.trace import Argument
from spheret.model.branches import MLP, Attention
from spheret.observe.finding import BranchEnd, Call, FoundSublayer
from spheret.observe.hooks import After, Before, SeenSublayer, at_calls, with_argument
from spheret.observe.inspection import anatomy_of, call, seen_whole
from spheret.support.errors import shortened

# x -> (f, out): the branch's output and the next state
Both = Callable[[Tensor], tuple[Tensor, Tensor]]
# the largest size of one batch of directional derivatives, in numbers
_NUMBERS = 1 << 22
# a branch that runs again returns what it did, but for rounding
_ROUNDING = 1e-5


@dataclass
class Update:
    """One sublayer of one forward pass over a window of T tokens, in one stream.

    Args:
        number: of the sublayer, from 1 on.
        kind: of its branch, as in `SublayerObservation.branch`.
        h: the stream before it, (1, T, width).
        f: the branch's output.
        out: the stream behind it.
        branch: a function of all states of the window; of any number of states, if `alone`.
        join: (h, f) -> the next states.
        connection: spheret's connection that joins, if there is one.
        attention: spheret's attention, if it is the branch.
        alone: whether the branch may be given some tokens of the window.
    """

    number: int
    kind: str
    h: Tensor
    f: Tensor
    out: Tensor
    branch: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    connection: Connection | None = None
    attention: Attention | None = None
    alone: bool = False

    def branch_output(self, f: Tensor) -> Tensor:
        """f as the connection takes it, see `Connection.branch_output`."""
        return f if self.connection is None else self.connection.branch_output(f)


def float64_twin(model: nn.Module) -> nn.Module:
    """A copy of the model in float64 and evaluation mode, on a device that has float64."""
    place = "cpu" if any(p.device.type == "mps" for p in model.parameters()) else None
    return copy.deepcopy(model).to(place, torch.float64).eval().requires_grad_(False)


@torch.no_grad()
def updates(model: nn.Module, tokens: Tensor) -> list[Update]:
    """The updates of one forward pass over tokens (1, time). It is an error if one cannot be differentiated."""
    anatomy, modules = anatomy_of(model, tokens), dict(model.named_modules())
    given: dict[str, tuple[Any, Any]] = {}
    before: dict[Call, Before] = {}

    def keep(name: str, args: Any, kwargs: Any) -> None:
        given[name] = args, kwargs

    for found in anatomy.sublayers:
        for name in [found.join.module] if found.join is not None else _holders(found):
            before[Call(name, 0)] = partial(keep, name)
    with at_calls(modules, before, {}):
        seen = seen_whole(model, anatomy, lambda: call(model, tokens)).sublayers
    result = []
    for number, (found, each) in enumerate(zip(anatomy.sublayers, seen, strict=True), start=1):
        if not each.states[2].isfinite().all():  # type: ignore[index]
            raise ValueError(f"the stream is not finite after sublayer {number}: there is nothing to measure.")
        if (each.states[0] == 0).all(-1).any():  # type: ignore[index]
            raise ValueError(f"a token's stream is all zeros before sublayer {number}: it lies on no sphere.")
        result.append(_update(number, found, each, modules, given))
    return result


def _update(
    number: int,
    found: FoundSublayer,
    seen: SeenSublayer,
    modules: dict[str, nn.Module],
    given: dict[str, tuple[Any, Any]],
) -> Update:
    assert seen.states is not None
    h, f, out = (x[None] for x in seen.states)
    if found.join is None:
        branch = _branch_of_sum(found, modules, given, tuple(h.shape))
        update = Update(number, found.branch, h, f, out, branch, seen.write or add)
    else:
        connection = modules[found.join.module]
        if not isinstance(connection, Connection) or found.join.module not in given:
            raise ValueError(
                f"{found.join.module} is a {type(connection).__name__}, which is given the branch's output, so that "
                "its branch cannot be run again: revert a conversion first, or use a connection of spheret."
            )
        function = given[found.join.module][0][1]
        branch = _branch_of_connection(connection, function)
        own = modules.get(found.name)
        attention = own if isinstance(own, Attention) else None
        alone = isinstance(own, (Attention, MLP))
        update = Update(number, found.branch, h, f, out, branch, connection.write, connection, attention, alone)
    try:
        again = update.branch(h)
    # the code is not ours, so that any exception may come
    except Exception as error:
        raise ValueError(f"the branch of {found.name} cannot be run again: {shortened(str(error), 200)}") from None
    if not (again - f).norm() <= _ROUNDING * f.norm():
        raise ValueError(f"the branch of {found.name} returns something else when it is run again by itself.")
    return update


def _branch_of_connection(connection: Connection, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(connection.read(x))


class _Done(Exception):
    """The branch has ended, and what comes after it in its layer is not wanted."""


def _holders(found: FoundSublayer) -> list[str]:
    """The modules that hold all readers and ends of a branch, the smallest first; the last one is the model."""
    calls = [*(call for call, _ in found.readers), *(end.call for end in found.ends)]
    names = [call.module.split(".") for call in calls]
    shared = 0
    while all(len(name) > shared and name[shared] == names[0][shared] for name in names):
        shared += 1
    return [".".join(names[0][:count]) for count in range(shared, -1, -1)]


def _branch_of_sum(
    found: FoundSublayer, modules: dict[str, nn.Module], given: dict[str, tuple[Any, Any]], shape: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """The branch's output for the states x (1, T, width), by running the module that holds it as it was called."""
    holder = next(name for name in _holders(found) if name in given)
    args, kwargs = given[holder]

    def run(x: Tensor) -> Tensor:
        parts: list[Tensor] = []

        def read(where: Argument) -> Before:
            return lambda args, kwargs: with_argument(args, kwargs, where, x)

        def end(one: BranchEnd) -> After:
            def take(args: Any, output: Any) -> None:
                parts.append(one.scaled(one.of(output)))
                if len(parts) == len(found.ends):
                    raise _Done

            return take

        before = {call: read(where) for call, where in found.readers}
        after = {one.call: end(one) for one in found.ends}
        try:
            with at_calls(modules, before, after):
                modules[holder](*args, **kwargs)
        except _Done:
            return sum(parts[1:], parts[0]).reshape(shape)
        raise ValueError("it did not end")

    return run


def own_path(update: Update, positions: Tensor) -> Both:
    """The next state of each token as a function of its own state x (1, positions, width), with all others fixed.

    No token attends to a later one. So the product of these Jacobians over the sublayers is exactly the derivative of
    the token's last state with respect to its own first state.
    """
    branch: Callable[[Tensor], Tensor]
    if update.attention is not None:
        assert update.connection is not None
        attend = _attention_of_one(update.attention, update.connection.read(update.h), positions)
        branch = _branch_of_connection(update.connection, attend)
    elif update.alone:
        branch = update.branch
    else:
        branch = partial(_each_in_its_window, update, positions)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        f = branch(x)
        return update.branch_output(f), update.join(x, f)

    return both


def _each_in_its_window(update: Update, positions: Tensor, x: Tensor) -> Tensor:
    """The branch's output at each position, from a window in which only that token has its state from x."""
    outputs = [
        update.branch(update.h.index_copy(1, position, x[:, i : i + 1]))[:, position]
        for i, position in enumerate(positions.split(1))
    ]
    return torch.cat(outputs, 1)


def _attention_of_one(branch: Attention, context: Tensor, positions: Tensor) -> Callable[[Tensor], Tensor]:
    """Attention of the tokens at `positions`, with the keys and values of the tokens before them fixed."""
    keys, values = map(branch.for_every_head, branch.queries_keys_values(context)[1:])
    turn = branch.rotation(positions)
    hidden = torch.arange(context.shape[1], device=context.device) >= positions[:, None]

    def attend(x: Tensor) -> Tensor:
        q, *own_parts = branch.queries_keys_values(x, turn)
        own_key, own_value = map(branch.for_every_head, own_parts)
        before = (q @ keys.mT).masked_fill(hidden, -math.inf)
        own = (q * own_key).sum(-1, keepdim=True)
        weights = (torch.cat([before, own], -1) / math.sqrt(q.shape[-1])).softmax(-1)
        y = weights[..., :-1] @ values + weights[..., -1:] * own_value
        return branch.output(y.transpose(1, 2).reshape(x.shape))

    return attend


@contextmanager
def differentiable() -> Iterator[None]:
    """A context in which attention supports forward-mode differentiation. torch's fast kernels do not."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def token_jacobians(update: Update, both: Both, x: Tensor) -> tuple[Tensor, Tensor]:
    """A = DF and J of every token of x (1, n, width) by automatic differentiation, each (n, width, width)."""

    def along(direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(both, (x,), (direction.expand_as(x),))[1]

    time, width = update.h.shape[1:]
    heads = 0 if update.attention is None else update.attention.heads
    # one batch keeps the intermediate values of its tokens below _NUMBERS
    tokens = x.shape[1] if update.alone else time
    chunk = max(1, _NUMBERS // (tokens * max(8 * width, heads * time)))
    A, J = torch.vmap(along, chunk_size=chunk)(torch.eye(width, dtype=x.dtype, device=x.device))
    return A[:, 0].permute(1, 2, 0), J[:, 0].permute(1, 2, 0)
