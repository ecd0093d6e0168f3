"""What the connections of spheret join, seen as they do it: called, by `write`, or in a converted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from spheret.connections import Connection, SpheretNorm, State
from spheret.conversion import steps
from spheret.conversion.trace import Joined


def connections(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that join branches to a stream, by name. A part of another connection is not one of them."""
    known = {id(step) for step in steps(model)}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_one = isinstance(module, (Connection, SpheretNorm)) or id(module) in known
        if is_one and not any(name.startswith(f"{other}.") for other in found):
            found[name] = module
    return found


def write_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(h, f) -> the next state of rows; None where that needs more: for a converted model, and for many streams."""
    if isinstance(module, Connection) and module.state_type is Tensor:
        return module.write
    # its rows are last here, whatever its channels are
    return None


@contextmanager
def joining(model: nn.Module, note: Joined) -> Iterator[None]:
    """Within the block, every connection calls `note` with its name, the stream, the branch's output, the next state.

    Rows are last in all of them.
    """
    found = connections(model)
    handles: list[Any] = []
    try:
        for name, module in found.items():
            if isinstance(module, Connection):
                module.write = _noting(name, module, note)  # type: ignore[method-assign]
            elif isinstance(module, SpheretNorm):
                handles.append(module.register_forward_hook(_norm_hook(name, module.channel_dim, note)))
            else:
                module.watcher = partial(_record, name, note)  # type: ignore[assignment]
        yield
    finally:
        for module in found.values():
            if isinstance(module, Connection):
                vars(module).pop("write", None)
            elif not isinstance(module, SpheretNorm):
                module.watcher = None  # type: ignore[assignment]
        for handle in handles:
            handle.remove()


def _noting(name: str, connection: Connection, note: Joined) -> Callable[..., State]:
    write = connection.write

    def noting(state: State, f: Tensor, *prepared: Any) -> State:
        out = write(state, f, *prepared)
        note(name, connection.stream(state), f, connection.stream(out))
        return out

    return noting


def _norm_hook(name: str, channel_dim: int, note: Joined) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if len(args) == 2:
            note(name, *(x if channel_dim == -1 else x.movedim(channel_dim, -1) for x in (*args, output)))

    return hook


def _record(name: str, note: Joined, step: object, record: Any) -> None:
    stream, after = record.stream, record.after
    if record.ratio is not None:
        # before t = 1 the stream carries its length
        stream, after = stream * record.ratio, after * record.next_ratio
    note(name, stream, record.branch, after)
