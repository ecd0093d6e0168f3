"""`Residual` and `residual_stack`: any branch with any connection."""

import pytest
import torch
from torch import nn

import spheret

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", spheret.SCHEMES)
def test_a_stack_of_any_scheme_is_its_modules_one_after_another(name):
    torch.manual_seed(0)
    branches = [nn.Linear(8, 8) for _ in range(3)]
    stack = spheret.residual_stack(branches, name)
    assert [layer.branch for layer in stack.layers] == branches
    h = stack.entry_norm(X)
    for layer in stack.layers:
        h = layer.connection(h, layer.branch)
    out = stack(X)
    assert torch.equal(out, stack.exit_norm(h))
    out.sum().backward()
    assert all(branch.weight.grad is not None for branch in branches)


@pytest.mark.parametrize("name", ["proj-spheretnorm", "pre-ln"])
def test_channels_may_stand_in_another_dimension(name):
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(6, 6, 3, padding=1) for _ in range(2)]
    stack = spheret.residual_stack(convolutions, name, channel_dim=1)
    images = torch.randn(2, 6, 4, 4)
    out = stack(images)
    assert out.shape == images.shape
    h = stack.entry_norm(images.movedim(1, -1))
    for layer in stack.layers:
        read = layer.connection.read(h).movedim(-1, 1)
        h = layer.connection.write(h, layer.branch(read).movedim(1, -1))
        if name == "proj-spheretnorm":
            assert torch.allclose(h.norm(dim=-1), torch.tensor(6.0).sqrt().expand(2, 4, 4), atol=1e-5)
    assert torch.equal(out, stack.exit_norm(h).movedim(-1, 1))


def test_branches_may_take_more_arguments_and_be_functions():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, h, adjacency):
            return adjacency @ self.linear(h)

    adjacency = torch.rand(5, 5)
    stack = spheret.residual_stack([Graph(), Graph()])
    assert stack(X, adjacency=adjacency).shape == X.shape
    connection = spheret.scheme("proj-spheretnorm").connect(8, 1, 1)
    assert torch.equal(spheret.Residual(torch.tanh, connection)(X), connection.write(X, X.tanh()))
    norm = spheret.SpheretNorm(8, 1)
    assert torch.equal(spheret.Residual(torch.tanh, norm)(X), norm(X, X.tanh()))
    turned = spheret.Residual(torch.tanh, spheret.SpheretNorm(5, 1, channel_dim=1))(X)
    assert torch.allclose(turned.norm(dim=1), X.norm(dim=1), atol=1e-5)
    assert torch.equal(turned, spheret.Residual(torch.tanh, spheret.SpheretNorm(5, 1), channel_dim=1)(X))
