"""What a connection and a scheme are. The model knows these two, and no method by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from spheret.kernels import check_rows, compute_dtype


def check_dim(dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2:
        raise ValueError(f"dim must be an integer of at least 2, got {dim!r}.")
    return dim


def check_sublayer(sublayer: int, num_sublayers: int | None) -> None:
    if isinstance(sublayer, bool) or not isinstance(sublayer, int) or sublayer < 1:
        raise ValueError(f"sublayer is the 1-based index of the sublayer, got {sublayer!r}.")
    if num_sublayers is not None and sublayer > num_sublayers:
        raise ValueError(
            f"sublayer {sublayer} lies beyond num_sublayers = {num_sublayers}, which counts two sublayers per block."
        )


def add(h: Tensor, f: Tensor) -> Tensor:
    """h + f in float32 or better, in the dtype of the stream."""
    dtype = compute_dtype(h, f)
    return (h.to(dtype) + f.to(dtype)).to(h.dtype)


class Connection(nn.Module):
    """How one residual branch joins the stream: `read` what the branch sees, `write` what it says.

        h' = write(h, branch(read(h)))

    A new connection overrides `read` (by default the stream itself) and `join`. Both compute in float32 or
    better and return the stream's dtype.
    """

    def __init__(self, dim: int, sublayer: int = 1, num_sublayers: int | None = None):
        super().__init__()
        check_sublayer(sublayer, num_sublayers)
        self.dim, self.sublayer, self.num_sublayers = check_dim(dim), sublayer, num_sublayers

    def read(self, h: Tensor) -> Tensor:
        """The branch's input."""
        return h

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        """The next state of the stream, from checked arguments."""
        return add(h, f)

    def write(self, h: Tensor, f: Tensor) -> Tensor:
        """The next state of the stream; h and f are (..., dim) of one shape."""
        check_rows(h, f, self.dim)
        return self.join(h, f)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return self.write(h, branch(self.read(h)))

    def extra_repr(self) -> str:
        return f"{self.dim}, sublayer={self.sublayer}, num_sublayers={self.num_sublayers}"


@dataclass(frozen=True)
class Initialisation:
    """Factors on the standard deviation of a block's weights, as a scheme asks for them."""

    output: float  # the projections that write to the stream: attention's and the MLP's last
    value: float = 1.0  # attention's value projection
    hidden: float = 1.0  # the MLP's first projection


@dataclass(frozen=True)
class Scheme:
    """What happens where the stream enters, at each sublayer, and where it leaves: three modules.

    A scheme is a frozen record of its options. `sublayer` is the 1-based sublayer (a block's attention is odd,
    its MLP even) and `num_sublayers` the number of sublayers, two a block.
    """

    name: str = field(default="", kw_only=True)
    # one line for tables and reports, and where the method comes from
    source: ClassVar[str] = ""

    def enter(self, dim: int) -> nn.Module:
        return nn.Identity()

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        return Connection(dim, sublayer, num_sublayers)

    def exit(self, dim: int) -> nn.Module:
        return nn.Identity()

    def initialisation(self, num_sublayers: int) -> Initialisation:
        """nanoGPT's: what writes to the stream starts smaller by sqrt(number of sublayers)."""
        return Initialisation(output=1 / math.sqrt(num_sublayers))

    def constrain(self, reading: Iterable[Tensor], writing: Iterable[Tensor]) -> None:
        """Called after each optimiser step with the (out, in) weights that read from and write to the stream."""
