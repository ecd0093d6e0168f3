"""The sublayers of a model as functions to differentiate, in float64: for single tokens and for whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spheret.analysis.decoders import Both, Decoder
from spheret.connections import Connection, Scheme
from spheret.model.gpt import GPT, Attention
from spheret.model.monitor import gradient_norms
from spheret.model.probes import BranchKind, Sublayer, probe
from spheret.support.sharding import whole

# the largest size of one batch of directional derivatives, in numbers
_NUMBERS = 1 << 22


def float64_twin(model: GPT) -> GPT:
    """A copy of the model in float64 and evaluation mode, which computes in nearly exact arithmetic.

    The given model, its gradients and the random states are not changed.
    """
    where = "cpu" if next(model.parameters()).device.type == "mps" else None
    # on the meta device no random number is drawn and no memory is allocated
    with torch.device("meta"):
        twin = GPT(model.config)
    wide = {name: whole(x).to(where, torch.float64) for name, x in model.state_dict().items()}
    twin.load_state_dict(wide, assign=True)
    return twin.eval().requires_grad_(False)


def check_finite(model: GPT, what: str) -> None:
    """Raise an error that names the first parameter with NaN or infinity. `what` names the model in the message."""
    for name, x in model.state_dict().items():
        if not x.isfinite().all():
            raise ValueError(
                f"{what} has NaN or infinity in {name}, so it cannot be analysed: take an earlier checkpoint."
            )


def check_one_stream(scheme: Scheme) -> None:
    """Raise an error unless the Jacobian of a sublayer is that of one stream."""
    if not scheme.one_stream:
        raise ValueError(
            f"certify bounds the Jacobians of one stream, and {scheme.name} carries more than one: take a scheme "
            "with one stream, or spheret inspect, which measures any scheme."
        )


@torch.no_grad()
def states(model: GPT | Decoder, tokens: Tensor) -> list[Sublayer]:
    """One record per sublayer, from one forward pass over tokens (1, time)."""
    sublayers = decoder_of(model).record(tokens)
    for s in sublayers:
        if not s.out.isfinite().all():
            raise ValueError(f"the stream is not finite after sublayer {s.number}: there is nothing to certify.")
        if (s.h == 0).all(-1).any():
            raise ValueError(f"a token's stream is all zeros before sublayer {s.number}: it lies on no sphere.")
    return sublayers


class OwnDecoder:
    """A GPT as a `Decoder`."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    @property
    def scheme(self) -> str:
        return self.model.config.scheme

    @property
    def width(self) -> int:
        return self.model.config.width

    @property
    def kinds(self) -> list[BranchKind]:
        both: list[BranchKind] = ["attention", "mlp"]
        return both * self.model.config.layers

    @property
    def names(self) -> list[None]:
        return [None] * (2 * self.model.config.layers)

    @property
    def connections(self) -> list[Connection]:
        return [c for block in self.model.each_block() for c in (block.attention_connection, block.mlp_connection)]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def probe(self, see: Callable[[Sublayer], object]) -> AbstractContextManager[None]:
        return probe(self.model, see)

    def record(self, tokens: Tensor) -> list[Sublayer]:
        sublayers: list[Sublayer] = []
        with probe(self.model, sublayers.append):
            self.model.stream(tokens)
        return sublayers

    def token_losses(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.token_losses(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y)

    @contextmanager
    def removed(self, sublayer: int) -> Iterator[None]:
        handle = self.connections[sublayer - 1].register_forward_hook(lambda module, args, out: module.skip(args[0]))
        try:
            yield
        finally:
            handle.remove()

    def gradient_norms(self) -> list[float]:
        return gradient_norms(self.model)

    def own_path(self, s: Sublayer, positions: Tensor) -> Both:
        return own_path(s, positions)

    def whole_sequence(self, s: Sublayer) -> Both:
        return whole_sequence(s)


def decoder_of(model: GPT | Decoder) -> Decoder:
    """The model as a `Decoder`."""
    return OwnDecoder(model) if isinstance(model, GPT) else model


def is_spherical(s: Sublayer) -> bool:
    """Whether the sublayer's update is a retraction of the sphere."""
    return s.connection.retraction_step() is not None


# a state that moves by less cannot be told from its own rounding in float32, the precision of a run
INACTIVE = torch.finfo(torch.float32).eps


@torch.no_grad()
def moved(s: Sublayer) -> Tensor:
    """By how much the branch moves each state, relative to the state that an output of zeros would give: (...)."""
    still = s.connection.stream(s.connection.write(s.state, torch.zeros_like(s.f))).double()
    length = still.norm(dim=-1)
    return (s.out.double() - still).norm(dim=-1) / torch.where(length > 0, length, 1.0)


def is_inactive(share: Tensor) -> bool:
    """Whether a sublayer does nothing: half of the states or more move by less than float32 resolves."""
    return bool(share.median() < INACTIVE)


def turn_arguments(s: Sublayer) -> dict[str, Any]:
    """The arguments of `jacobians.turn` besides h and f."""
    with torch.no_grad():
        step = s.connection.retraction_step()
    assert step is not None, "the sublayer is not spherical"
    return {"alpha": step.alpha, "retraction": step.retraction, "max_angle": step.max_angle, "p": step.p}


def own_path(s: Sublayer, positions: Tensor) -> Both:
    """The next state of each token as a function of its own state x (1, positions, width), with all others fixed.

    No token attends to a later one. So the product of these Jacobians over the sublayers is exactly the derivative of
    the token's last state with respect to its own first state.
    """
    branch = s.branch
    if isinstance(s.branch, Attention):
        branch = _attention_of_one(s.branch, s.branch_input, positions)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        f = branch(s.connection.read(x))
        return f, s.connection.write(x, f)

    return both


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


def whole_sequence(s: Sublayer) -> Both:
    """The next states of all tokens as a function of all their states x (1, time, width)."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        f = s.branch(s.connection.read(x))
        return f, s.connection.write(x, f)

    return both


@contextmanager
def differentiable() -> Iterator[None]:
    """A context in which attention supports forward-mode differentiation. torch's fast kernels do not."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def chunk_size(s: Sublayer, rows: int) -> int:
    """The number of directions per batch that keeps the intermediate values of `rows` tokens below `_NUMBERS`."""
    width, time = s.h.shape[-1], s.h.shape[1]
    return max(1, _NUMBERS // (s.rows(rows) * max(8 * width, s.heads * time)))


def token_jacobians(s: Sublayer, both: Both, x: Tensor) -> tuple[Tensor, Tensor]:
    """A = DF and J of every token of x (1, n, width) by automatic differentiation, each (n, width, width)."""

    def along(direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(both, (x,), (direction.expand_as(x),))[1]

    width = x.shape[-1]
    basis = torch.eye(width, dtype=x.dtype, device=x.device)
    A, J = torch.vmap(along, chunk_size=chunk_size(s, x.shape[1]))(basis)
    return A[:, 0].permute(1, 2, 0), J[:, 0].permute(1, 2, 0)


def sequence_jacobians(s: Sublayer, both: Both, x: Tensor) -> tuple[Tensor, Tensor]:
    """A = DF and J of the whole sequence x (1, time, width), each (time width, time width)."""
    size = x.numel()

    def along(direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(both, (x,), (direction.view_as(x),))[1]

    basis = torch.eye(size, dtype=x.dtype, device=x.device)
    A, J = torch.vmap(along, chunk_size=chunk_size(s, x.shape[1]))(basis)
    return A.flatten(1).mT, J.flatten(1).mT


def frobenius(s: Sublayer, both: Both, x: Tensor, c: Tensor, sequence: bool) -> Tensor:
    """An upper bound on |B|, B = DF - c, computed a few columns at a time, so that B is never held as a whole.

    For tokens it is the Frobenius norm, (n,). For a whole sequence it is the spectral norm of the (time, time) matrix
    of the Frobenius norms of B's blocks. That is at least |B| and at most the Frobenius norm of B.
    """
    n, width = x.shape[1:]
    chunk = chunk_size(s, n)
    squares = torch.zeros((n, n) if sequence else (n,), dtype=x.dtype, device=x.device)

    def column(direction: Tensor) -> Tensor:
        f = torch.func.jvp(lambda x: both(x)[0], (x,), (direction,))[1]
        return (f - c[:, None] * direction).square().sum(-1)[0]

    for source in range(n) if sequence else [None]:
        for first in range(0, width, chunk):
            count = min(chunk, width - first)
            directions = torch.zeros(count, *x.shape, dtype=x.dtype, device=x.device)
            index = torch.arange(count, device=x.device)
            directions[index, :, slice(None) if source is None else source, first + index] = 1.0
            sums = torch.vmap(column)(directions).sum(0)
            if source is None:
                squares += sums
            else:
                squares[:, source] += sums
    return torch.linalg.matrix_norm(squares.sqrt(), ord=2) if sequence else squares.sqrt()
