"""What the analysis asks of a model, whosever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from spheret.connections import Connection
from spheret.model.probes import BranchKind, Sublayer

# x -> (f, out): the branch's output and the next state
Both = Callable[[Tensor], tuple[Tensor, Tensor]]


class Decoder(Protocol):
    """A decoder in evaluation mode. `sublayers.OwnDecoder` is a GPT, `foreign.decoder.ForeignDecoder` anyone's."""

    @property
    def scheme(self) -> str:
        """How its branches join the stream."""

    @property
    def width(self) -> int: ...

    @property
    def kinds(self) -> list[BranchKind]:
        """The kind of each sublayer's branch, as in `Sublayer.kind`."""

    @property
    def names(self) -> Sequence[str | None]:
        """What the model calls the end of each branch; None where the number says enough."""

    @property
    def connections(self) -> list[Connection]:
        """The connection of each sublayer."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def probe(self, see: Callable[[Sublayer], object]) -> AbstractContextManager[None]:
        """Within the block, call `see` after every sublayer of every forward pass."""

    def record(self, tokens: Tensor) -> list[Any]:
        """The sublayers of one forward pass over tokens (1, time), for `own_path` and `whole_sequence`."""

    def token_losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of every token, (windows, time), without a gradient."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss, with a gradient."""

    def removed(self, sublayer: int) -> AbstractContextManager[None]:
        """Within the block, this sublayer (counted from 1) passes the stream on unchanged."""

    def gradient_norms(self) -> list[float]:
        """The norm of the gradient of each sublayer's weights."""

    def own_path(self, s: Any, positions: Tensor) -> Both:
        """The next state of each token as a function of its own state x (1, positions, width), with others fixed."""

    def whole_sequence(self, s: Any) -> Both:
        """The next states of all tokens as a function of all their states x (1, time, width)."""
