"""`Residual` and `residual_stack`: one wrapper that gives any branches any connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spheret.connections import Connection, Scheme, SpheretNorm, State
from spheret.connections import scheme as make_scheme


class Residual(nn.Module):
    """A branch with its connection: h' = write(h, branch(read(h))).

    h is the stream, or the state of a scheme that has its own.

    Args:
        branch: a module or function that maps the stream's shape to itself. Further arguments of `forward` go to it.
        connection: a Connection, or a SpheretNorm.
        channel_dim: the dimension that holds a row's entries. (N, C, H, W) has channel_dim=1.
    """

    def __init__(
        self, branch: Callable[..., Tensor], connection: Connection | SpheretNorm, channel_dim: int | None = None
    ):
        super().__init__()
        if not callable(branch):
            raise TypeError(f"a branch is a module or a function, got {type(branch).__name__}.")
        if not isinstance(connection, (Connection, SpheretNorm)):
            raise TypeError(
                f"a connection is a spheret.Connection or a spheret.SpheretNorm, got {type(connection).__name__}: "
                'take e.g. spheret.scheme("proj-spheretnorm").connect(dim, sublayer, num_sublayers).'
            )
        self.branch, self.connection = branch, connection
        # a SpheretNorm may know its own
        own = getattr(connection, "channel_dim", -1)
        if channel_dim is not None and own not in (-1, channel_dim):
            raise ValueError(f"channel_dim = {channel_dim} does not fit the connection's, {own}.")
        self.channel_dim = own if channel_dim is None else channel_dim

    def forward(self, h: State, *args: Any, **kwargs: Any) -> State:
        connection, dim = self.connection, self.channel_dim
        if dim == getattr(connection, "channel_dim", -1):
            return connection(h, lambda x: self.branch(x, *args, **kwargs))
        rows = connection(
            _moved(h, dim, -1), lambda x: self.branch(x.movedim(-1, dim), *args, **kwargs).movedim(dim, -1)
        )
        return _moved(rows, -1, dim)

    def extra_repr(self) -> str:
        return "" if self.channel_dim == -1 else f"channel_dim={self.channel_dim}"


def _moved(state: State, source: int, destination: int) -> State:
    """A state with a dimension of each of its tensors moved."""
    return tree_map(lambda x: x.movedim(source, destination), state)


class ResidualStack(nn.Module):
    """The entry of a scheme, its connections around the branches, and its exit."""

    def __init__(self, enter: nn.Module, layers: Iterable[Residual], exit: nn.Module, channel_dim: int):
        super().__init__()
        # transformers' Trainer does not decay what has _norm in its name
        self.entry_norm, self.layers, self.exit_norm = enter, nn.ModuleList(layers), exit
        self.channel_dim = channel_dim

    def _on_rows(self, module: nn.Module, h: State) -> State:
        dim = self.channel_dim
        return module(h) if dim == -1 else _moved(module(_moved(h, dim, -1)), -1, dim)

    def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The stream after the last branch. Further arguments go to every branch."""
        h = self._on_rows(self.entry_norm, h)
        for layer in self.layers:
            h = layer(h, *args, **kwargs)
        return self._on_rows(self.exit_norm, h)


def residual_stack(
    branches: Iterable[Callable[..., Tensor]],
    scheme: str | Scheme = "proj-spheretnorm",
    dim: int | None = None,
    *,
    channel_dim: int = -1,
    **options: Any,
) -> ResidualStack:
    """A network of these branches, joined by a scheme: entry, one connection per branch, exit.

    Args:
        branches: modules or functions that map the stream's shape to itself. Branch l is sublayer l.
        scheme: a name of SCHEMES, or a Scheme.
        dim: the width of the stream; by default the width of the first layer of the first branch that has one.
        channel_dim: the dimension that holds a row's entries. (N, C, H, W) has channel_dim=1.
        options: the options of the named scheme.
    """
    branches = list(branches)
    if not branches:
        raise ValueError("residual_stack needs at least one branch, got none.")
    if isinstance(scheme, Scheme) and options:
        raise ValueError(f"options go with the name of a scheme, got {', '.join(options)} beside a Scheme.")
    chosen = scheme if isinstance(scheme, Scheme) else make_scheme(scheme, **options)
    dim = _width(branches) if dim is None else dim
    layers = [
        Residual(branch, chosen.connect(dim, number, len(branches)), channel_dim)
        for number, branch in enumerate(branches, start=1)
    ]
    return ResidualStack(chosen.enter(dim), layers, chosen.exit(dim), channel_dim)


def _width(branches: list[Callable[..., Tensor]]) -> int:
    """The width of the stream that the first layers of the branches tell."""
    # a branch that mixes tokens and one that mixes channels tell different ones
    told = {width for branch in branches if (width := _first_width(branch)) is not None}
    if len(told) != 1:
        listed = ", ".join(map(str, sorted(told))) or "none"
        raise ValueError(
            f"the first layers of the branches must tell one width of the stream, got {listed}: give dim."
        )
    return told.pop()


def _first_width(branch: Callable[..., Tensor]) -> int | None:
    for module in branch.modules() if isinstance(branch, nn.Module) else ():
        for name in ("in_features", "in_channels", "embed_dim", "num_features"):
            if isinstance(width := getattr(module, name, None), int):
                return width
        if isinstance(module, nn.LayerNorm):
            return module.normalized_shape[-1]
    return None
