"""States of any scheme, for tests that iterate the table."""

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from spheret.connections import Scheme, State


@torch.no_grad()
def state_before(built: Scheme, sublayer: int, num_sublayers: int, x: torch.Tensor) -> State:
    """The state before a sublayer, when x enters and every branch is a tanh."""
    state = built.enter(x.shape[-1]).to(x.dtype)(x)
    for number in range(1, sublayer):
        state = built.connect(x.shape[-1], number, num_sublayers).to(x.dtype)(state, torch.tanh)
    if built.one_stream:
        # any row is a state of one stream
        return x
    # streams that are equal hide what is done to them
    generator = torch.Generator().manual_seed(7)
    return tree_map(lambda y: y + 0.5 * torch.randn(y.shape, generator=generator, dtype=y.dtype), state)


def to(state: State, dtype: torch.dtype) -> State:
    return tree_map(lambda x: x.to(dtype), state)


def assert_same(first: State, second: State) -> None:
    """The same structure and the same bits."""
    assert tree_structure(first) == tree_structure(second)
    assert all(torch.equal(x, y) for x, y in zip(tree_leaves(first), tree_leaves(second), strict=True))
