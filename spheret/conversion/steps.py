"""The modules that run inside a converted model.

A `Step` stands at each residual sum. Hooks (attach.py) give it the stream x before the branch reads it, and the
branch's output f behind the branch, in whose place it returns x' - x. So the layer's own addition x + (x' - x) gives
the next state x'. Where the layer adds a x + b f, the hook returns (x' - a x)/b, and f stands for b f/a below: the
number a is a factor of the length. The position t of the annealing decides what is computed (rho = |x|/R, u = x/rho):

| stage | t | the stream x | its readers are given | the next state |
|---|---|---|---|---|
| ORIGINAL | 0 | h | h | a (h + f): the layer itself adds |
| BETWEEN | | rho u | rho^(1-t) length^t u | `formulas.blend` |
| SCHEME | 1 | u | length u | the scheme's own retraction |
| CHECK | | `formulas.compress` of h | h | `formulas.exact` |

`length` is one number per reader: 1 in front of a norm, which reads only the direction. CHECK is how `convert` finds
readers without a hook. No stage carries anything from one sum to the next but the stream itself, so layers may be
recomputed, sharded or called by themselves.

t is read from its buffer in every forward pass, and hooks find their modules through the module tree. So whatever
copies, averages, swaps or wraps the state of a model (AveragedModel, functional_call, PEFT's modules_to_save) takes
effect.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spheret.connections import Connection, ScaleNorm
from spheret.conversion import formulas
from spheret.conversion.plan import ResidualSum
from spheret.kernels import compute_dtype, retract_unchecked

# the name of the added modules in the module that hosts them, and of the entry in the model's config
NAME = "spheret"
ORIGINAL, BETWEEN, SCHEME, CHECK = "original", "between", "scheme", "check"


@dataclass
class SublayerState:
    """What a sublayer knows in a forward pass, from its first reader to the end of its last branch."""

    step: ReadPoint
    stage: str
    x: Tensor  # the stream as the layer has it
    rows: Tensor  # h at ORIGINAL and CHECK, else u; the channels are last
    ratio: Tensor | None  # rho at BETWEEN
    reader_input: Tensor
    branch: Tensor | None = None  # the sum of the branches that have ended
    # how often the module that ends a branch was called in it, by the number of the branch
    calls: dict[int, int] = field(default_factory=dict)


class Stream:
    """The state of the sublayer that runs on a stream, per thread; None behind a sum. Copies have none."""

    def __init__(self) -> None:
        self.states: dict[int, SublayerState | None] = {}
        self.checking = False

    def __getstate__(self) -> dict[str, Any]:
        return {"states": {}, "checking": False}

    @staticmethod
    def _thread() -> int:
        return 0 if torch.compiler.is_compiling() else threading.get_ident()

    def begin(self, state: SublayerState) -> SublayerState:
        self.states[self._thread()] = state
        return state

    def end(self) -> None:
        """The sublayer's last branch has ended."""
        self.states[self._thread()] = None

    def forget(self) -> None:
        self.states.pop(self._thread(), None)

    @property
    def is_behind_a_sum(self) -> bool:
        """Whether a sublayer has ended, and no reader of the next one was called."""
        return self.states.get(self._thread(), self) is None

    def state_of(self, step: ReadPoint) -> SublayerState | None:
        """The state of the sublayer that runs, if this step is that sublayer's."""
        state = self.states.get(self._thread())
        return state if state is not None and state.step is step else None


class StepRecord(NamedTuple):
    """What one residual sum did, as rows (..., dim): the channels are last."""

    stream: Tensor  # u, on the sphere
    branch: Tensor  # f
    after: Tensor  # u' after the sum, on the sphere
    ratio: Tensor | None  # rho before the sum; None at t = 1
    next_ratio: Tensor | None  # rho after it; None at t = 1


class ReadPoint(nn.Module):
    """A point of the stream where modules read it, with the position t of the annealing.

    first: whether the stream begins here.
    enters: whether the stream is put on the sphere here at t = 1. Where the model leaves out layers at random, every
        step does that, because any may be the first.
    like: a parameter near the point, whose device and dtype the buffers take.
    """

    t: Tensor
    length: Tensor
    # where the stack's ScaleNorm is, which has the radius. It is set where the point is put into a model
    norm_address: Address

    def __init__(self, stream: Stream, channel_dim: int, reads_length: bool, like: Tensor, first: bool = False):
        super().__init__()
        self.stream, self.channel_dim, self.reads_length, self.first = stream, channel_dim, reads_length, first
        self.enters = first
        self.register_buffer("t", torch.ones(1, device=like.device, dtype=like.dtype))
        self.register_buffer("length", torch.ones(1, device=like.device, dtype=like.dtype))
        self._stage = SCHEME
        # the tensor, and its version, that the stage was read from
        self._source: tuple[weakref.ref[Tensor] | None, int] = None, -1
        self.register_load_state_dict_post_hook(_read_loaded)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": (None, -1)}

    @property
    def entry_norm(self) -> ScaleNorm:
        """The ScaleNorm of the stack."""
        norm: ScaleNorm = self.norm_address.module
        return norm

    @property
    def radius(self) -> Tensor:
        """R of the stack, a 1-element tensor."""
        return self.entry_norm.radius

    def anneal(self, t: float) -> None:
        with torch.no_grad():
            self.t.fill_(t)
        self.read_t()

    def read_t(self) -> None:
        """Read the stage from the buffer t."""
        self._source = weakref.ref(self.t), self.t._version
        self._stage = {0.0: ORIGINAL, 1.0: SCHEME}.get(float(self.t), BETWEEN)

    def stage(self) -> str:
        """The stage that the buffer t gives now. It does not wait for a GPU."""
        t = self.t
        if self.stream.checking:
            return CHECK
        if torch.compiler.is_compiling() or type(t) is not Tensor or t.is_meta:
            # no number can be read: `_check_stage` has the graph compare it
            return self._stage
        if torch._C._functorch.is_batchedtensor(t):
            # an ensemble under vmap, whose members may have any t. The formulas of this stage hold at the ends, too
            return BETWEEN
        source, version = self._source
        if t.device.type == "cpu" or source is None or source() is not t or version != t._version:
            self.read_t()
        return self._stage

    def _check_stage(self, stage: str) -> None:
        """Raise an error where t was changed and could not be read: in a graph, or through `.data` on a GPU."""
        if stage in (ORIGINAL, SCHEME) and (torch.compiler.is_compiling() or self.t.is_cuda):
            torch._assert_async(
                (self.t == (stage == SCHEME)).all(),
                "the position t of a converted model was changed where it could not be read: call "
                "spheret.conversion.position(model), which reads it anew, before the next forward pass.",
            )

    def to_rows(self, x: Tensor) -> Tensor:
        return x if self.channel_dim == -1 else x.movedim(self.channel_dim, -1)

    def from_rows(self, x: Tensor) -> Tensor:
        return x if self.channel_dim == -1 else x.movedim(-1, self.channel_dim)

    def read(self, x: Tensor) -> SublayerState:
        """The state of a sublayer that begins with the stream x."""
        stage = self.stage()
        if self.first:
            # all points of a model move together
            self._check_stage(stage)
        rows = given = self.to_rows(x)
        ratio = None
        if stage == CHECK and not self.first:
            rows = given = formulas.expand(rows, self.radius.to(x.device))
        elif stage == BETWEEN:
            rows, ratio = formulas.on_sphere(rows, self.radius.to(x.device))
            given = formulas.reader_input(rows, ratio, self.length if self.reads_length else None, self.t)
        elif stage == SCHEME:
            rows = self.entry_norm(rows) if self.enters else rows
            given = formulas.scaled(rows, self.length) if self.reads_length else rows
        return SublayerState(self, stage, x, rows, ratio, x if given is x else self.from_rows(given))


def _read_loaded(point: ReadPoint, _: Any) -> None:
    if not point.t.is_meta:
        point.read_t()


class Step(ReadPoint):
    """One residual sum of a converted model.

    residual: the sum in the model's code. The layer multiplies the stream and the output of each branch by factors,
        and it may have a dropout of the branch's output, which would be behind the hook.
    gains: for each branch, where the parameters are that the layer multiplies its output by.
    connection: the scheme's own connection, which has the learned step size.
    unit: a fixed factor of the step size. It is fitted, so that the learned step size starts in its interval.
    """

    unit: Tensor

    def __init__(
        self,
        stream: Stream,
        residual: ResidualSum,
        connection: Connection,
        reads_length: bool,
        like: Tensor,
        first: bool,
        gains: list[list[Gain]],
    ):
        super().__init__(stream, residual.channel_dim, reads_length, like, first)
        self.gains, self.stream_factor = gains, residual.stream_factor
        self.connection = connection.to(like.device, like.dtype)
        self.register_buffer("unit", torch.ones(1, device=like.device, dtype=like.dtype))
        self.factors = [end.factor for end in residual.ends]
        self.dropout = residual.dropout[1] if residual.dropout is not None else 0.0
        self.watcher: Callable[[Step, StepRecord], None] | None = None

    @property
    def alpha(self) -> Tensor:
        """The learned step size times its unit, a 1-element tensor."""
        alpha = self.connection.alpha
        assert alpha is not None
        return alpha.to(self.unit.device) * self.unit.to(alpha.dtype)

    def factor(self, number: int) -> float | Tensor | None:
        """What the layer multiplies the output of a branch by, if it does."""
        factor: Any = self.factors[number]
        for gain in self.gains[number]:
            factor = factor * gain.parameter
        return None if isinstance(factor, float) and factor == 1 else factor

    def join(self, state: SublayerState, f: Tensor, number: int) -> Tensor:
        """What the layer adds instead of a branch's output: nothing before the last branch, then all of x' - x."""
        if self.dropout > 0:
            f = torch.nn.functional.dropout(f, self.dropout, self.training)
        factor, is_last = self.factor(number), number == len(self.factors) - 1
        part = f if factor is None else f * factor
        state.branch = part if state.branch is None else state.branch.reshape(part.shape) + part
        if is_last:
            self.stream.end()
        if state.stage != ORIGINAL:
            delta = self._delta(state, state.branch) if is_last else torch.zeros_like(f)
            return delta if factor is None else delta / factor
        if is_last and self.watcher is not None:
            self._delta(state, state.branch)
        # the layer adds what it always did
        unused = [*self.connection.parameters(), *(self.entry_norm.parameters() if self.first else ())]
        return formulas.with_unused(f, unused) if is_last else f

    def _delta(self, state: SublayerState, branch: Tensor) -> Tensor:
        """x' - x, in the dtype of the sum."""
        f, x = self.to_rows(branch), self.to_rows(state.x)
        wide, kept = compute_dtype(x, f), torch.promote_types(x.dtype, f.dtype)
        # a layer may flatten its tokens
        rows, x, f = state.rows.reshape(f.shape).to(wide), x.reshape(f.shape).to(wide), f.to(wide)
        a = self.stream_factor
        f, x = (f, x) if a == 1 else (f / a, x * a)
        step = self.connection.retraction_step()
        assert step is not None
        u, ratio, next_ratio = rows, None, None
        if state.stage == SCHEME:
            after = x_next = retract_unchecked(u, f, self.alpha, step.retraction, step.p, step.max_angle)
        elif state.stage == BETWEEN:
            assert state.ratio is not None
            ratio = state.ratio.reshape(*f.shape[:-1], 1).to(wide)
            radius, alpha, t = self.radius.to(x.device, wide), self.alpha.to(wide), self.t.to(wide)
            after, next_ratio = formulas.blend(u, f, ratio, radius, alpha, t, step.retraction, step.p, step.max_angle)
            next_ratio = next_ratio * a
            x_next = after * next_ratio
        else:
            radius = self.radius.to(x.device, wide)
            u, ratio = formulas.on_sphere(rows, radius)
            after, next_ratio = formulas.exact(rows, f, radius)
            next_ratio, x_next = next_ratio * a, formulas.compress((rows + f) * a, radius)
        if self.watcher is not None:
            self.watcher(self, StepRecord(u, f, after, ratio, next_ratio))
        return self.from_rows((x_next - x).to(kept))


class AddedModules(nn.Module):
    """The modules that a conversion puts into one host. A copy of only the host stays a part of the model.

    PEFT's modules_to_save=["spheret"] takes no ModuleList. It puts a wrapper in its place, which finds `listed` in
    the active copy.
    """

    def listed(self) -> list[nn.Module]:
        return list(self.children())

    def __deepcopy__(self, memo: dict[int, Any]) -> AddedModules:
        if not memo:
            # nothing else is copied: the streams and their norms stay the model's
            for point in self.children():
                if isinstance(point, ReadPoint):
                    memo[id(point.stream)] = point.stream
                    hosts = [point.norm_address.host]
                    if isinstance(point, Step):
                        hosts += [gain.host for gains in point.gains for gain in gains]
                    memo |= {id(host): host for host in hosts}
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


@dataclass(frozen=True)
class Gain:
    """A parameter of the model, by its name in the module that has it. What is there may be replaced."""

    host: nn.Module
    name: str

    @property
    def parameter(self) -> Tensor:
        parameter: Tensor = getattr(self.host, self.name)
        return parameter


@dataclass(frozen=True)
class Address:
    """Where an added module is: in this host, under this number. What is there may be replaced."""

    host: nn.Module
    number: int

    @property
    def module(self) -> Any:
        added: Any = self.host._modules[NAME]
        return added.listed()[self.number]
