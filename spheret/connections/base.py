"""`Connection` and `Scheme`: the interface between the model and every method."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch
from torch import Tensor, nn

from spheret.kernels import check_rows, compute_dtype, normalize
from spheret.schedules import check_sublayer
from spheret.support.autograd import recorded
from spheret.support.precision import wide, widest

if TYPE_CHECKING:
    from spheret.connections.spherical import SpheretNorm


def check_dim(dim: SupportsIndex) -> int:
    """dim as an int. numpy's integers are integers, too."""
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex) or (number := dim.__index__()) < 2:
        raise ValueError(f"dim must be an integer of at least 2, got {dim!r}.")
    return number


def channels_last(x: Tensor, dim: int, channel_dim: int) -> Tensor:
    """A view of x with its `dim` channels moved from dimension `channel_dim` to the last one."""
    if not -x.dim() <= channel_dim < x.dim() or x.shape[channel_dim] != dim:
        raise ValueError(
            f"this module was built for {dim} channels in dimension {channel_dim}, got shape {tuple(x.shape)}."
        )
    return x.movedim(channel_dim, -1)


class LayerNumbers(nn.Module):
    """A module with fixed numbers that differ from layer to layer. They are in no state dict.

    Compiled code reads each as a tensor, which is an input of the graph, so that all layers share one graph. All
    other code reads the number itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers: dict[str, float] = {}
        self._tensors: dict[str, Tensor] = {}

    def hold_number(self, name: str, number: float) -> None:
        self._numbers[name] = number
        # 0-d, so that it may stay on the CPU beside rows on another device
        self._tensors[name] = torch.tensor(number, dtype=torch.float64, device="cpu")

    def number(self, name: str) -> float | Tensor:
        return self._tensors[name] if torch.compiler.is_compiling() and not recorded() else self._numbers[name]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerNumbers:
        super()._apply(fn, recurse)
        # made anew on the device: a change of dtype would round it, and one from the meta device would not fill it
        for name, number in self._numbers.items():
            device = fn(self._tensors[name]).device
            self._tensors[name] = torch.tensor(number, dtype=widest(device), device=device)
        return self


# what a scheme carries from sublayer to sublayer: for one stream the tensor h, else a named tuple of tensors, which
# may be nested. The model passes it on and never looks inside
State = Any


def check_state_type(state: State, kind: type) -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"the state of this scheme is a {kind.__name__}, got {type(state).__name__}: take the entry, all "
            "connections and the exit from one scheme."
        )


def check_parts(parts: tuple[Tensor, ...], expected: int, sublayer: int) -> None:
    """Raise an error unless a state holds as many tensors as the sublayers before it have made."""
    if len(parts) != expected:
        raise ValueError(
            f"the state before sublayer {sublayer} holds {expected} earlier tensors, got {len(parts)}: call the "
            "connections of a scheme in order, each once."
        )


def add(h: Tensor, f: Tensor) -> Tensor:
    """h + f, computed in float32 or better and returned in the dtype of h."""
    dtype = compute_dtype(h, f)
    return (h.to(dtype) + f.to(dtype)).to(h.dtype)


def angle_between(first: Tensor, second: Tensor) -> Tensor:
    """The angle between the rows of two tensors (..., d), in radians and float64 where the device has it, (...)."""
    u, v = (normalize(wide(x), 1.0) for x in (first, second))
    # half-angle form: arccos would lose every small angle
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))


class Connection(nn.Module):
    """How one residual branch joins the stream: `read` gives the branch its input, `write` joins its output. ::

        state' = write(state, branch(read(state)))

    A new connection overrides `read` (by default the stream itself) and `join`. Both compute in float32 or
    better and return the stream's dtype.

    For one stream the state is the tensor h. A connection with a state of its own overrides `read`, `write` and
    `stream` (see spheret.connections.many_streams).

    Modules with parameters have names that end in `norm`, because transformers' Trainer does not decay those.

    Args:
        dim: the width of the stream, at least 2.
        sublayer: the 1-based index of the sublayer.
        num_sublayers: the number of sublayers, two per block.
    """

    # what the state is: a Tensor, or a named tuple
    state_type: ClassVar[type] = Tensor

    def __init__(self, dim: int, sublayer: int = 1, num_sublayers: int | None = None):
        super().__init__()
        check_sublayer(sublayer, num_sublayers)
        self.dim, self.sublayer, self.num_sublayers = check_dim(dim), sublayer, num_sublayers

    def stream(self, state: State) -> Tensor:
        """The stream of a state, (..., dim): what probes, norms, angles and cosines look at."""
        return state

    def read(self, h: State) -> Tensor:
        """The branch's input."""
        return h

    def join(self, h: Tensor, f: Tensor) -> Tensor:
        """The next state of the stream, from checked arguments."""
        return add(h, f)

    def write(self, h: State, f: Tensor) -> State:
        """The next state; f is (..., dim), and so is h where it is the stream."""
        check_rows(h, f, self.dim)
        return self.join(h, f)

    def skip(self, h: State) -> State:
        """The next state if the sublayer is left out."""
        return h

    def angle(self, h: State, f: Tensor, out: State | None = None) -> Tensor:
        """The angle between the stream and the next one, (...), in radians.

        Args:
            h: the state.
            f: the branch's output.
            out: the next state, if it is already known. It saves the call of `write`.
        """
        return angle_between(self.stream(h), self.stream(self.write(h, f) if out is None else out))

    @property
    def alpha(self) -> Tensor | None:
        """The step size, a 1-element tensor; None for a connection without one."""
        return None

    def branch_output(self, f: Tensor) -> Tensor:
        """The branch's output f as a retraction takes it: f itself, or f after a norm of the branch's output."""
        return f

    def mixing(self, state: State) -> Tensor | None:
        """The matrix (..., n, n) that mixes the n streams of a state; None where no streams are mixed."""
        return None

    def branch_gains(self) -> list[nn.Parameter]:
        """The only parameters that decide how far the branch moves the stream, where its output is normalised.

        Empty if the output's own length decides, which the last layer of the branch sets.
        """
        return []

    def retraction_step(self) -> SpheretNorm | None:
        """The update if it is a retraction of the sphere, else None."""
        return None

    def check_state(self, state: State) -> None:
        """Raise an error unless the state is one that this connection takes."""
        check_state_type(state, self.state_type)

    def forward(self, h: State, branch: Tensor | Callable[[Tensor], Tensor]) -> State:
        """The next state after h, given the branch as a function, or its output f of what `read` returned."""
        self.check_state(h)
        return self.write(h, branch) if isinstance(branch, Tensor) else self.join_branch(h, branch)

    def join_branch(self, h: State, branch: Callable[[Tensor], Tensor]) -> State:
        """`forward`, from checked arguments."""
        return self.write(h, branch(self.read(h)))

    def extra_repr(self) -> str:
        return f"{self.dim}, sublayer={self.sublayer}, num_sublayers={self.num_sublayers}"


class PreparedConnection(Connection):
    """A connection whose `read` and `write` share what `prepare` computes from the state.

    A sublayer computes it once. A subclass defines `prepare`, `read_prepared`, `write_prepared` and `stream`.
    """

    def prepare(self, state: State) -> Any:
        """What both need."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare.")

    def read_prepared(self, state: State, prepared: Any) -> Tensor:
        """`read`, given what `prepare` returned."""
        raise NotImplementedError(f"{type(self).__name__} must define read_prepared.")

    def write_prepared(self, state: State, prepared: Any, f: Tensor) -> State:
        """`write`, given what `prepare` returned."""
        raise NotImplementedError(f"{type(self).__name__} must define write_prepared.")

    def read(self, state: State, prepared: Any = None) -> Tensor:
        """As in `Connection`. prepared: what `prepare` returned, if it is already known."""
        self.check_state(state)
        return self.read_prepared(state, self.prepare(state) if prepared is None else prepared)

    def write(self, state: State, f: Tensor, prepared: Any = None) -> State:
        """As in `Connection`. prepared: as in `read`."""
        self.check_state(state)
        return self.write_prepared(state, self.prepare(state) if prepared is None else prepared, f)

    def join_branch(self, state: State, branch: Callable[[Tensor], Tensor]) -> State:
        prepared = self.prepare(state)
        return self.write(state, branch(self.read(state, prepared)), prepared)


@dataclass(frozen=True)
class BranchShape:
    """What a scheme is told about a block's branches before it puts something inside them.

    dim: the width of the stream.
    heads, kv_heads: the heads of the queries, and of the keys and values.
    hidden: the width of the MLP's hidden layer after its activation.
    gated: whether the MLP has a gate, whose entries come first in its first projection, before the `hidden` others.
    """

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    gated: bool = False

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.dim // self.heads


@dataclass(frozen=True)
class Initialisation:
    """A scheme's factors on the standard deviation of a block's weights at the start."""

    output: float  # the projections that write to the stream: attention's and the MLP's last
    value: float = 1.0  # attention's value projection
    hidden: float = 1.0  # the MLP's first projection


@dataclass(frozen=True)
class Scheme:
    """Three modules: one where the stream enters, one at each sublayer, and one where the stream leaves. ::

        state = enter(x)    state' = write(state, branch(read(state)))    h = exit(state)

    Some schemes also ask for modules inside the branches: see `inside_attention`, `inside_mlp` and `logit_gain`.

    A scheme is a frozen record of its options. `sublayer` is the 1-based sublayer: a block's attention is odd, its
    MLP even. `num_sublayers` is the number of sublayers, two per block.

    Args:
        name: the row of SCHEMES that it was built from, for reports. A subclass adds its options.
    """

    name: str = field(default="", kw_only=True)
    # where the method comes from, in one line, for tables and reports, as is `formula`
    source: ClassVar[str] = ""
    # whether the state is the tensor h. Proofs, conversions and parametrizations are only for such schemes
    one_stream: ClassVar[bool] = True
    # whether its branches or their starts have factors that depend on the depth by a rule of its own
    own_depth_rule: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        """The method: the first line of the class's docstring."""
        return (inspect.getdoc(type(self)) or "").partition("\n")[0]

    def enter(self, dim: int) -> nn.Module:
        """The module between the embeddings and the first sublayer: it maps x (..., dim) to the first state."""
        return nn.Identity()

    def connect(self, dim: int, sublayer: int, num_sublayers: int) -> Connection:
        """The connection of one sublayer."""
        return Connection(dim, sublayer, num_sublayers)

    def connect_block(self, dim: int, block: int, num_blocks: int) -> tuple[Connection, Connection]:
        """The connections of the attention and the MLP of one block, counted from 1.

        A scheme overrides it if the two share a parameter.
        """
        return self.connect(dim, 2 * block - 1, 2 * num_blocks), self.connect(dim, 2 * block, 2 * num_blocks)

    def exit(self, dim: int) -> nn.Module:
        """The module between the last sublayer and the head: it maps the last state to h (..., dim)."""
        return nn.Identity()

    def inside_attention(self, shape: BranchShape, sublayer: int, num_sublayers: int) -> nn.Module | None:
        """A module that maps q, k, v to q, k, v; None changes nothing.

        q is (batch, heads, time, head_dim); k and v have kv_heads heads. Attention divides the scores by
        sqrt(head_dim) after it. Rotary positions turn q and k after it, or before it if the module has an attribute
        `after_rotation` that is True.
        """
        return None

    def inside_mlp(self, shape: BranchShape, sublayer: int, num_sublayers: int) -> nn.Module | None:
        """A module that maps the output of the MLP's first projection, before its activation; None changes nothing.

        It has `hidden` entries per token, or 2 `hidden` if the MLP is gated.
        """
        return None

    def logit_gain(self, dim: int, vocab: int) -> nn.Module | None:
        """A module that multiplies each logit (..., vocab) by a factor of its own; None changes nothing.

        It must be such a product, because the loss applies it to the rows of the head's weight.
        """
        return None

    def initialisation(self, num_sublayers: int) -> Initialisation:
        """nanoGPT's: weights that write to the stream start smaller by sqrt(num_sublayers)."""
        return Initialisation(output=1 / math.sqrt(num_sublayers))

    @property
    def unit_weights(self) -> bool:
        """Whether `constrain` keeps the vectors that face the stream, and so the stream too, at length 1."""
        return False

    def step_sum(self, num_sublayers: int) -> float | None:
        """The sum of the fixed factors on the branches of a stack, by which the depth rule divides.

        None for a scheme with a depth rule of its own.
        """
        return None if self.own_depth_rule else float(num_sublayers)

    def constrain(self, reading: Iterable[Tensor], writing: Iterable[Tensor]) -> None:
        """Called before the first optimiser step and after each one.

        Args:
            reading: the (out, in) weights that read from the stream.
            writing: the (out, in) weights that write to it.
        """
