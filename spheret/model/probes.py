"""Record the input, branch output and output of every sublayer of a GPT, with hooks that are removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from spheret.connections import Connection, State
from spheret.model.gpt import GPT, Attention

# a "parallel" branch of someone else's model holds an attention and an MLP, "other" mixes tokens without attention
BranchKind = Literal["attention", "mlp", "parallel", "other"]

# how the names of classes end that are an MLP or a part of one. Qwen3MoeAttention is not a mixture of experts
_MLP_WORDS = ("mlp", "moe", "moeblock", "experts", "feedforward", "ffn")
# what an MLP has, and an attention may have too
_LINEAR_WORDS = ("linear", "conv1d", "dense", "intermediate")


def branch_kind(modules: Iterable[nn.Module]) -> BranchKind:
    """What a branch of someone else's model is, by the words that the classes of its modules are called."""
    words = [type(module).__name__.lower() for module in modules]
    attention = any("attention" in word or "attn" in word for word in words)
    mlp = any(word.endswith(_MLP_WORDS) for word in words)
    if attention:
        return "parallel" if mlp else "attention"
    return "mlp" if mlp or any(own in word for word in words for own in _LINEAR_WORDS) else "other"


def sublayer_name(number: int) -> str:
    """A sublayer of a GPT by its number, its branch and its block."""
    return f"sublayer {number} ({'attention' if number % 2 else 'MLP'} of block {(number + 1) // 2})"


@dataclass
class Sublayer:
    """One sublayer of one forward pass.

    Args:
        number: the 1-based sublayer.
        state: what the scheme carries into the sublayer.
        f: the branch's output.
        next_state: what it carries on.
        connection: the connection of the sublayer.
        branch: the attention or the MLP.
        branch_input: what the branch read.
    """

    number: int
    state: State
    f: Tensor
    next_state: State
    connection: Connection
    branch: Any
    branch_input: Tensor

    @property
    def h(self) -> Tensor:
        """The stream before the sublayer, (..., width)."""
        return self.connection.stream(self.state)

    @property
    def out(self) -> Tensor:
        """The stream after the sublayer, (..., width)."""
        return self.connection.stream(self.next_state)

    @property
    def angle(self) -> Tensor:
        """The angle between h and out, (...) in radians."""
        return self.connection.angle(self.state, self.f, self.next_state)

    @property
    def attention(self) -> Tensor | None:
        """Attention weights (batch, heads, time, time), or None for an MLP. They are computed on each access."""
        return self.branch.weights(self.branch_input) if isinstance(self.branch, Attention) else None


@contextmanager
def probe(model: GPT, observe: Callable[[Sublayer], object]) -> Iterator[None]:
    """Within the `with` block, call `observe` after every sublayer of every forward pass. Outside there are no hooks.

    With `recompute` a backward pass inside the block runs the sublayers again, and `observe` is called again. During
    cached generation a branch receives only the new tokens, so the attention weights cover only those.

    Args:
        model: the GPT to look into.
        observe: called with the `Sublayer`.
    """
    handles = []
    number = 0
    for block in model.each_block():
        for connection, branch in (
            (block.attention_connection, block.attention),
            (block.mlp_connection, block.mlp),
        ):
            number += 1
            recorded: dict[str, Tensor] = {}

            def record_branch(
                module: Any, args: tuple[Any, ...], f: Tensor, recorded: dict[str, Tensor] = recorded
            ) -> None:
                recorded["input"], recorded["f"] = args[0], f

            def record_sublayer(
                module: Any, args: tuple[Any, ...], out: State,
                recorded: dict[str, Tensor] = recorded, branch: Any = branch, number: int = number,
            ) -> None:  # fmt: skip
                observe(Sublayer(number, args[0], recorded.pop("f"), out, module, branch, recorded.pop("input")))

            handles += [
                branch.register_forward_hook(record_branch),
                connection.register_forward_hook(record_sublayer),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
